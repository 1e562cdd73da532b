"""A job on an exported graph, scored by a real worker on both stores."""

import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa

import jobs
import laya
from schemas.tables import batches
from tests.integration.service import QUESTIONS, Service, make_texts, write_tickets


@pytest.fixture(scope="session")
def exported(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "tiny"
    shutil.copytree(tiny_checkpoint, folder)
    laya.export_onnx(folder)
    return folder


def test_a_job_runs_on_the_graph_in_its_checkpoints_folder(warm_service: Service, exported: Path) -> None:
    path = write_tickets(warm_service.folder / "onnx" / "a.parquet", [*make_texts(120)])
    asked = {"questions": QUESTIONS, "state": "text", "settings": warm_service.settings}
    answers = {}
    for backend in ("onnx", "eager"):
        job = jobs.submit(path, checkpoint=exported, backend=backend, **asked)
        job = jobs.wait(job.id, timeout_s=90, settings=warm_service.settings)
        ran = sa.select(batches.c.backend, batches.c.fallback_reason).where(batches.c.job_id == job.id).distinct()
        assert [tuple(row) for row in warm_service.query(ran)] == [(backend, None)]
        answers[backend] = jobs.results(job.id, settings=warm_service.settings).read_all().to_pylist()
    for graph, eager in zip(answers["onnx"], answers["eager"], strict=True):
        assert graph["row_number"] == eager["row_number"]
        assert graph["confidence"] == pytest.approx(eager["confidence"], abs=1e-4)


def test_a_job_without_a_graph_fails_and_says_how_to_make_one(warm_service: Service, tiny_checkpoint: Path) -> None:
    path = write_tickets(warm_service.folder / "absent" / "a.parquet", ["a"])
    asked = {"questions": QUESTIONS, "state": "text", "settings": warm_service.settings}
    job = jobs.submit(path, checkpoint=tiny_checkpoint, backend="onnx", **asked)
    with pytest.raises(jobs.JobFailedError, match=r"\.onnx: no such file; write it with laya\.export_onnx"):
        jobs.wait(job.id, timeout_s=90, settings=warm_service.settings)
