"""docker/compose.yaml without containers: the same commands and settings, against servers on this machine."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

import jobs
from jobs.settings import PREFIX, SECRETS, Settings
from schemas.cpus import allowed_cpus
from schemas.tables import workers
from tests.integration.service import QUESTIONS, WAIT_S, Service, make_texts, write_tickets
from tests.traps import set_traps

COMPOSE: dict[str, Any] = yaml.safe_load((Path(__file__).resolve().parents[2] / "docker" / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


@pytest.fixture
def database_url(postgres_url: str) -> str:
    """The compose file's store is PostgreSQL."""
    return postgres_url


def command_of(words: list[str]) -> list[str]:
    """A command of the image, whose entry point is `laya-batch`, on this machine."""
    return [str(Path(sys.executable).with_name("laya-batch")), *words]


def test_it_sets_only_settings_that_exist() -> None:
    known = {PREFIX + name.upper() for name in Settings.model_fields} | {f"{name}_FILE" for name in SECRETS}
    assert set(SERVICES["worker"]["environment"]) <= known
    assert SERVICES["worker"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert "deploy" not in SERVICES["worker-cpu"] or SERVICES["worker-cpu"]["deploy"] == {}


def test_each_profile_builds_its_own_torch_and_no_password_stands_in_a_url() -> None:
    variants = {name: SERVICES[name]["build"]["args"]["VARIANT"] for name in ("worker", "worker-cpu")}
    assert variants == {"worker": "gpu", "worker-cpu": "cpu"}
    for name in ("migrate", "client", "worker", "worker-cpu"):
        assert SERVICES[name]["init"] is True
        assert SERVICES[name]["secrets"] == ["postgres_password"]
        assert "PASSWORD}" not in str(SERVICES[name])
    assert SERVICES["postgres"]["environment"]["POSTGRES_PASSWORD_FILE"] == "/run/secrets/postgres_password"
    assert any(volume.endswith(":/output") for volume in SERVICES["client"]["volumes"])
    assert "output" in COMPOSE["volumes"]


def test_its_commands_migrate_work_and_report_health(service: Service) -> None:
    (service.folder / "password").write_text("unused: trust is configured\n")
    local = {
        "LAYA_BATCH_DATABASE_URL": service.settings.resolved_database_url,
        "LAYA_BATCH_DATABASE_PASSWORD_FILE": str(service.folder / "password"),
        "LAYA_BATCH_BROKER_URL": service.settings.require_broker_url(),
        "LAYA_BATCH_INPUT_ROOTS": str(service.folder),
        "LAYA_BATCH_CHECKPOINT": service.settings.checkpoint,
        "LAYA_BATCH_BACKEND": "auto",
    }
    assert set(local) == set(SERVICES["worker"]["environment"])
    environment = {**os.environ, **local, "LAYA_BATCH_QUEUE": service.settings.queue}
    traps = service.folder / "traps"
    set_traps(traps)
    probe = command_of(SERVICES["worker"]["healthcheck"]["test"][2:])

    migrated = subprocess.run(
        command_of(SERVICES["migrate"]["command"]), env=environment, capture_output=True, text=True, check=True
    )
    assert "is up to date" in migrated.stdout
    sick = subprocess.run(probe, env=environment, capture_output=True, text=True, check=False)
    assert sick.returncode == 1
    assert "0 of 1 workers" in sick.stderr
    with (service.folder / "worker.log").open("ab") as log:
        worker = subprocess.Popen(
            ["taskset", "--cpu-list", str(min(allowed_cpus())), *command_of(SERVICES["worker"]["command"])],
            env=environment,
            cwd=traps,
            stdout=log,
            stderr=log,
        )
    service.processes.append(worker)
    service.wait_for(service.ready_workers, worker)
    service.wait_for(lambda: subprocess.run(probe, env=environment, check=False).returncode == 0, worker)
    # One worker where the driver lists two devices is not well.
    smi = service.folder / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\nprintf 'GPU 0: A (UUID: GPU-1)\\nGPU 1: A (UUID: GPU-2)\\n'\n")
    smi.chmod(0o755)
    with_driver = {**environment, "PATH": f"{smi.parent}:{environment['PATH']}"}
    with_driver.pop("CUDA_VISIBLE_DEVICES", None)
    half = subprocess.run(probe, env=with_driver, capture_output=True, text=True, check=False)
    assert (half.returncode, "1 of 2 workers" in half.stderr) == (1, True), half.stderr
    # Nor is one whose workers take another queue's work.
    other = subprocess.run(
        probe, env={**environment, "LAYA_BATCH_QUEUE": "other"}, capture_output=True, text=True, check=False
    )
    assert "0 of 1 workers" in other.stderr
    (started,) = service.query(sa.select(workers.c.pid))
    given = Path(f"/proc/{started.pid}/environ").read_text().split("\0")
    assert {"OMP_NUM_THREADS=1", "RAYON_NUM_THREADS=1", "OMP_WAIT_POLICY=PASSIVE"} <= set(given)
    assert "1 CPU threads" in service.log
    path = write_tickets(service.folder / "in.parquet", make_texts(20))
    job = jobs.submit(
        path, questions=QUESTIONS, state="text", checkpoint=service.settings.checkpoint, settings=service.settings
    )
    assert jobs.wait(job.id, timeout_s=WAIT_S, settings=service.settings).answers == 60
    worker.terminate()
    assert worker.wait(WAIT_S) == 0
