"""A disk so small that a test can fill it."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BLOCK_BYTES = 1 << 16


@contextmanager
def small_disk(size_mb: int) -> Iterator[Path]:
    """A tmpfs of this size; skips the test where none can be mounted."""
    with tempfile.TemporaryDirectory(prefix="laya-batch-disk-") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", folder]
        if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
            pytest.skip("no tmpfs can be mounted here")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def fill(disk: Path) -> Iterator[None]:
    """Within the block, not a byte is free."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (BLOCK_BYTES, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue
    try:
        yield
    finally:
        ballast.unlink()
