import stat
from pathlib import Path

import pytest

from jobs.errors import SettingsError
from worker.devices import list_devices, parse_devices, pin_environment, short_name

TWO_GPUS = """GPU 0: NVIDIA H200 (UUID: GPU-11111111-aaaa-bbbb-cccc-000000000000)
GPU 1: NVIDIA H200 (UUID: GPU-22222222-aaaa-bbbb-cccc-000000000000)
"""
SLICED = """GPU 0: NVIDIA H100 (UUID: GPU-11111111-aaaa-bbbb-cccc-000000000000)
  MIG 3g.40gb     Device  0: (UUID: MIG-aaaaaaaa-1111-5555-9999-000000000000)
  MIG 3g.40gb     Device  1: (UUID: MIG-bbbbbbbb-1111-5555-9999-000000000000)
GPU 1: NVIDIA H100 (UUID: GPU-22222222-aaaa-bbbb-cccc-000000000000)
"""
SLICED_BEFORE = """GPU 0: NVIDIA A100 (UUID: GPU-11111111-aaaa-bbbb-cccc-000000000000)
  MIG 3g.20gb     Device  0: (UUID: MIG-GPU-11111111-aaaa-bbbb-cccc-000000000000/1/0)
  MIG 3g.20gb     Device  1: (UUID: MIG-GPU-11111111-aaaa-bbbb-cccc-000000000000/2/0)
  MIG 1g.5gb      Device  2: (UUID: MIG-GPU-11111111-aaaa-bbbb-cccc-000000000000/20/0)
GPU 1: NVIDIA A100 (UUID: GPU-22222222-aaaa-bbbb-cccc-000000000000)
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver tool that lists two GPUs."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{TWO_GPUS}END\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_gpu_is_named_by_its_uuid_and_a_sliced_one_by_its_slices() -> None:
    assert [device[:12] for device in parse_devices(TWO_GPUS)] == ["GPU-11111111", "GPU-22222222"]
    assert [device[:12] for device in parse_devices(SLICED)] == ["MIG-aaaaaaaa", "MIG-bbbbbbbb", "GPU-22222222"]
    assert parse_devices("No devices found.\n") == []


def test_each_device_has_a_name_of_its_own() -> None:
    assert [short_name(device) for device in ["cpu", *parse_devices(TWO_GPUS)]] == ["cpu", "11111111", "22222222"]
    assert [short_name(device) for device in parse_devices(SLICED)] == ["aaaaaaaa", "bbbbbbbb", "22222222"]
    assert [short_name(device) for device in parse_devices(SLICED_BEFORE)] == [
        *("11111111-1-0", "11111111-2-0", "11111111-20-0", "22222222")
    ]


@pytest.mark.usefixtures("driver")
def test_a_driver_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 100\n")
    monkeypatch.setattr("worker.devices.DRIVER_TIMEOUT_S", 0.5)
    with pytest.raises(SettingsError, match="nvidia-smi does not answer"):
        list_devices()


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-1", "GPU-2"]),
        ("1", ["GPU-2"]),
        ("1,0", ["GPU-2", "GPU-1"]),
        ("GPU-2222", ["GPU-2"]),
        ("0,7,1", ["GPU-1"]),
        ("", ["cpu"]),
        ("-1", ["cpu"]),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [device[:5] for device in list_devices()] == expected


def test_a_machine_without_a_driver_has_one_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list_devices() == ["cpu"]


@pytest.mark.usefixtures("driver")
def test_a_driver_that_fails_is_an_error_and_not_a_silent_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho 'Driver/library version mismatch'\nexit 18\n")
    with pytest.raises(SettingsError, match="Driver/library version mismatch; mend the driver"):
        list_devices()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list_devices() == ["cpu"]


def test_a_worker_sees_its_device_alone_and_its_share_of_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    pinned = pin_environment("GPU-1", processes=10_000)
    assert pinned == {"CUDA_VISIBLE_DEVICES": "GPU-1", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    assert "CUDA_VISIBLE_DEVICES" not in pin_environment("cpu", processes=1)
