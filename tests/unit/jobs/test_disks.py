"""A folder that cannot be written is told soon, and not again and again."""

import subprocess
import sys
from pathlib import Path

import pytest

from jobs import disks
from jobs.disks import DiskProbe

PROGRAM = """
import resource, signal, sys
from pathlib import Path
from jobs import disks
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
disks.PROBE_EVERY_S = 0.0
probe = disks.DiskProbe([Path(sys.argv[1])])
print(probe.check())
print(probe.check())
"""


def test_a_write_that_the_system_refuses_is_told_once_and_leaves_no_file(tmp_path: Path) -> None:
    shown = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == [f"{tmp_path} cannot be written: File too large", "None"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_room_is_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "PROBE_EVERY_S", 0.0)
    probe = DiskProbe([tmp_path])
    assert probe.check() is None
    assert list(tmp_path.iterdir()) == []
