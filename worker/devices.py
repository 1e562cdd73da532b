"""Which devices this machine has, without touching them: a process that has opened CUDA must not fork."""

import os
import re
import shutil
import subprocess

from jobs.errors import SettingsError
from schemas.cpus import thread_variables

CPU = "cpu"
DRIVER_TIMEOUT_S = 120.0  # a driver that is asleep takes seconds for each GPU
_DEVICE_LINE = re.compile(r"^(\s*)(?:GPU|MIG)\b.*\(UUID:\s*((?:GPU|MIG)-[^)]+)\)", re.MULTILINE)


def list_devices() -> list[str]:
    """The UUID of each GPU (of its slices, where it is divided) that CUDA_VISIBLE_DEVICES leaves, or one `cpu`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return [CPU]
    if visible is not None:
        return _select(_ask_driver(), [part.strip() for part in visible.split(",")]) or [CPU]
    return _ask_driver() or [CPU]


def pin_environment(device: str, processes: int) -> dict[str, str]:
    """Return the variables with which a process sees this device alone and takes its share of the CPUs.

    To be set before its Python starts. `processes`: those that share this machine, one for each device.
    """
    pinned = {} if device == CPU else {"CUDA_VISIBLE_DEVICES": device}
    return {**pinned, **thread_variables(os.environ, processes)}


def short_name(device: str) -> str:
    """What people call a device by: the beginning of its UUID, and the numbers of a slice that has no UUID."""
    uuid, *slices = re.sub("^(MIG-)?(GPU-)?", "", device).split("/")
    return "-".join([uuid[:8], *slices])


def _ask_driver() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
            timeout=DRIVER_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise SettingsError(
            f"nvidia-smi does not answer within {DRIVER_TIMEOUT_S:.0f} s; mend the driver, "
            "or set CUDA_VISIBLE_DEVICES= (empty) to use the CPU"
        ) from error
    if listed.returncode != 0:
        reason = (listed.stdout + listed.stderr).strip().splitlines()
        raise SettingsError(
            f"nvidia-smi lists no GPU: {reason[-1] if reason else listed.returncode}; mend the driver, "
            "or set CUDA_VISIBLE_DEVICES= (empty) to use the CPU"
        )
    return parse_devices(listed.stdout)


def parse_devices(listing: str) -> list[str]:
    """UUIDs out of `nvidia-smi -L`: a GPU's, or instead of it those of its MIG slices, which are listed indented."""
    devices: list[str] = []
    for indent, uuid in _DEVICE_LINE.findall(listing):
        if indent and devices and devices[-1].startswith("GPU-"):
            devices.pop()
        devices.append(uuid)
    return devices


def _select(devices: list[str], visible: list[str]) -> list[str]:
    """As CUDA reads the variable: indices or UUID prefixes, ending at the first that names nothing."""
    selected = []
    for part in visible:
        matching = [device for device in devices if part and device.startswith(part)]
        matching.sort(key=lambda device: device != part)  # a slice's name may begin another's: …/1/1 and …/1/10
        if part.isdigit() and int(part) < len(devices):
            matching = [devices[int(part)]]
        if not matching:
            break
        selected.append(matching[0])
    return selected


if __name__ == "__main__":
    print("\n".join(list_devices()))
