"""Every SQL statement of laya-batch.

`database` connects and migrates; `lifecycle` creates, cancels, retries and settles jobs; `leases` claims, saves and
finishes shards; `recovery` finds lost ones; `workers` records who scores; `reports` reads what was saved. `replay` runs
a transaction again, and `traces` finds what it left behind the first time.
"""
