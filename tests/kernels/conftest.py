"""The GPU tests also run on hosts that have none of the services the other tests' fixtures need."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
