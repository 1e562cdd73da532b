"""What the documents promise: their queries run, their tables name what is there."""

import re
from pathlib import Path

import pytest
import sqlalchemy as sa

import jobs
from jobs.settings import PREFIX, Settings
from tests.integration.service import QUESTIONS, Service, make_texts, write_tickets

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```", README, re.DOTALL)


def test_every_query_of_the_readme_answers(warm_service: Service) -> None:
    questions = {
        "urgency": QUESTIONS["anger"],
        "refund": QUESTIONS["refund"],
        "team": {**QUESTIONS["team"], "criteria": ["billing", "technical", "other"]},
    }
    path = write_tickets(warm_service.folder / "readme.parquet", [*make_texts(60), None])
    for _ in range(2):
        job = jobs.submit(
            path,
            questions=questions,
            state="text",
            row_id="ticket",
            checkpoint=warm_service.settings.checkpoint,
            settings=warm_service.settings,
        )
        jobs.wait(job.id, timeout_s=90, settings=warm_service.settings)
    assert len(QUERIES) >= 8
    counts = [len(warm_service.query(sa.text(query))) for query in QUERIES]
    for query, count in zip(QUERIES, counts, strict=True):
        compares = "before" in query
        assert count == 0 if compares else count > 0, query


@pytest.mark.parametrize("name", list(Settings.model_fields))
def test_every_setting_is_documented(name: str) -> None:
    documented = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    (line,) = [line for line in documented.splitlines() if line.startswith(f"| `{PREFIX}{name.upper()}` |")]
    assert line.endswith(f"| {Settings.model_fields[name].description} |")


def test_every_file_that_the_structure_page_names_is_there() -> None:
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    named = re.findall(r"\b((?:schemas|jobs|laya|worker)/[\w/]+\.py)", page)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).is_file()] == []
