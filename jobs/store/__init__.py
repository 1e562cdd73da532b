"""Every SQL statement of laya-batch.

`database` connects and migrates; `lifecycle` creates, cancels, retries and settles jobs; `leases` claims, saves and
finishes shards; `workers` records who scores; `reports` answers questions about what was saved.
"""
