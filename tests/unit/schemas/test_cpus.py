"""How many threads: quotas from files as the kernel writes them, and affinity from the kernel itself."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.cpus import allowed_cpus, thread_variables, usable_cpus

V1 = Path("/sys/fs/cgroup/cpu")


def system(root: Path, membership: str, files: dict[str, str], cpus: int = 8, threads_per_core: int = 1) -> Path:
    """Write /proc and /sys as a machine has them on which this process may use `cpus` CPUs."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    for number in range(cpus):
        topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        first = number // threads_per_core * threads_per_core
        (topology / "thread_siblings_list").write_text(f"{first}-{first + threads_per_core - 1}\n")
    return root


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("membership", "files", "usable"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "5000 100000\n"}, 1),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 8),
        ("0::/\n", {}, 8),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "nonsense\n"}, 8),
        # A service under systemd: its own quota, and that of the slice around it.
        ("0::/a.slice/b.service\n", {"sys/fs/cgroup/a.slice/b.service/cpu.max": "300000 100000\n"}, 3),
        (
            "0::/a.slice/b.service\n",
            {
                "sys/fs/cgroup/a.slice/b.service/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a.slice/cpu.max": "400000 100000",
            },
            4,
        ),
        # Version 1, in a container that sees the host's path but not the folder.
        (
            "5:cpuset:/docker/x\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/docker/x\n",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            3,
        ),
        (
            "1:cpu:/jobs/7\n",
            {
                "sys/fs/cgroup/cpu/jobs/7/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/jobs/7/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
def test_the_least_quota_of_all_groups_around_the_process_counts(
    tmp_path: Path, membership: str, files: dict[str, str], usable: int
) -> None:
    assert usable_cpus(system(tmp_path, membership, files)) == usable


@pytest.mark.usefixtures("eight")
def test_two_hyperthreads_are_one_core(tmp_path: Path) -> None:
    assert usable_cpus(system(tmp_path, "0::/\n", {}, threads_per_core=2)) == 4


@pytest.mark.usefixtures("eight")
def test_a_system_without_proc_and_sys_counts_its_cpus(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path) == 8


def test_the_cpus_are_divided_and_what_the_user_set_wins() -> None:
    usable = usable_cpus()
    assert thread_variables({}) == {
        "OMP_NUM_THREADS": str(usable),
        "RAYON_NUM_THREADS": str(usable),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    assert thread_variables({}, processes=10_000)["OMP_NUM_THREADS"] == "1"
    assert thread_variables({"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"}) == {"RAYON_NUM_THREADS": str(usable)}
    assert "OMP_WAIT_POLICY" not in thread_variables({"GOMP_SPINCOUNT": "1000"})
    assert "OMP_WAIT_POLICY" not in thread_variables({"KMP_BLOCKTIME": "1"})


def test_the_engine_alone_takes_the_affinity_and_waits_without_spinning() -> None:
    cpu = min(allowed_cpus())
    program = "import os; before = dict(os.environ); import laya, torch; assert dict(os.environ) == before; "
    shown = run(program + "print(torch.get_num_threads())", OMP_DISPLAY_ENV="VERBOSE", cpus={cpu})
    assert shown.stdout.strip() == "1"
    if sys.platform == "linux":  # GNU's library tells what it read
        assert "OMP_WAIT_POLICY = 'PASSIVE'" in shown.stderr
        assert "GOMP_SPINCOUNT = '0'" in shown.stderr


def test_what_the_user_set_reaches_the_engine_unchanged() -> None:
    program = "import laya, torch; print(torch.get_num_threads())"
    shown = run(program, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="ACTIVE", OMP_DISPLAY_ENV="TRUE")
    assert shown.stdout.strip() == "1"
    if sys.platform == "linux":
        assert "OMP_WAIT_POLICY = 'ACTIVE'" in shown.stderr


@pytest.fixture
def one_cpu_group() -> Iterator[Path]:
    """A control group with a quota of one CPU; made where this machine lets us."""
    group = V1 / f"test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("100000")
    except OSError:
        pytest.skip("no control group of version 1 can be made here")
    yield group
    group.rmdir()


def test_a_real_quota_is_seen_and_lowers_the_threads_of_a_torch_that_was_loaded_before(one_cpu_group: Path) -> None:
    join = f"open({str(one_cpu_group / 'cgroup.procs')!r}, 'w').write('0'); "
    look = "from schemas.cpus import usable_cpus; print(usable_cpus()); "
    assert run(f"{join}{look}import torch, laya; print(torch.get_num_threads())").stdout.split() == ["1", "1"]


def run(program: str, cpus: set[int] | None = None, **variables: str) -> "subprocess.CompletedProcess[str]":
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    environment = {name: value for name, value in os.environ.items() if name not in names} | variables
    narrowed = f"import os; os.sched_setaffinity(0, {cpus}); " if cpus else ""
    command = [sys.executable, "-c", narrowed + program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
