"""The room where jobs meet the engine: one Celery worker for each device, supervised by `python -m worker`."""
