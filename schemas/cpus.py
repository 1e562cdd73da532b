"""How many CPUs a process may use, and what to tell the thread libraries: known to the supervisor and to the engine.

Reads the affinity mask, the cores behind it, and the quotas of control groups (versions 1 and 2). Sets nothing.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

# Any of these says how idle OpenMP threads wait; GNU's and LLVM's library each have one of their own.
_WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def usable_cpus(root: Path = Path("/")) -> int:
    """Return how many threads can compute at once: cores of the affinity mask, at most the quota, rounded up.

    Two hyperthreads of one core count once, as in torch's own default. `root`: where /proc and /sys are.
    """
    cores = {_siblings(root, number) for number in allowed_cpus()}
    return max(1, min([len(cores), *(math.ceil(quota) for quota in _quotas(root))]))


def allowed_cpus() -> set[int]:
    """Return the numbers of the CPUs in this process's affinity mask; of all CPUs where the system has no such mask."""
    return set(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def thread_variables(environ: Mapping[str, str], processes: int = 1) -> dict[str, str]:
    """Return the variables that thread libraries should start with; what `environ` sets already is left out.

    The CPUs are divided among `processes`. Idle OpenMP threads sleep: spinning ones, the default, take the CPU from
    the threads that they wait for as soon as another process runs.
    """
    threads = str(max(1, usable_cpus() // processes))
    wanted = {"OMP_NUM_THREADS": threads, "RAYON_NUM_THREADS": threads}
    if not any(environ.get(name) for name in _WAIT_VARIABLES):
        wanted["OMP_WAIT_POLICY"] = "PASSIVE"
    return {name: value for name, value in wanted.items() if not environ.get(name)}


def _siblings(root: Path, number: int) -> str:
    """Return the hyperthreads of a CPU's core, or its own number where the system does not tell."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(number)


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas of this process's control groups, and of all that contain them, in CPUs."""
    mounts = root / "sys/fs/cgroup"
    try:
        memberships = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Inside a container the path may be the host's: then only the mount itself is there, and is the container's.
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            for mount in (mounts / controllers, mounts / "cpu") if controllers else (mounts, mounts / "unified"):
                yield from _quota_of(mount / group)


def _quota_of(folder: Path) -> Iterator[float]:
    with suppress(OSError, ValueError):  # version 2: "200000 100000", or "max 100000"
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            yield int(quota) / int(period)
    with suppress(OSError, ValueError):  # version 1: -1 is none
        quota_us = int((folder / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        if quota_us > 0:
            yield quota_us / int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
