"""The nouns of laya-batch: questions, jobs, messages and tables. No torch, no Celery, no I/O."""
