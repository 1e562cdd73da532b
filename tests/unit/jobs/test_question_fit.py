"""What a submitter is told of questions is what a worker finds, by the same tokenizer and rule."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import laya
from jobs.question_fit import check_fit
from schemas.job import JobSpec
from schemas.question import QuestionSetError, check_questions

WORDS = [
    "billing",
    "[MASK] [MASK]",
    "[SEP]",
    "Где",
    "退款",
    "a common prefix of several words",
    "😀",
    "x",
    "refund 12",
]


def make_spec(checkpoint: str | Path, questions: dict[str, Any], **asked: Any) -> JobSpec:
    return JobSpec(
        inputs=["/a"], state=["text"], checkpoint=str(checkpoint), questions=check_questions(questions), **asked
    )


def make_questions(seed: int) -> dict[str, Any]:
    """Some of any type, with few or many options, long or short."""
    random_words = random.Random(seed)
    questions: dict[str, Any] = {"holds": {"type": "noul", "instructions": "Is it?"}}
    for count in (2, 5, 12, 40):
        texts = [" ".join(random_words.choices(WORDS, k=random_words.randint(1, 9))) for _ in range(count)]
        levels = [f"{text} {index}" for index, text in enumerate(texts)]
        questions[f"level {count}"] = {"type": "score", "instructions": texts[0], "criteria": texts}
        questions[f"label {count}"] = {"type": "choice", "instructions": {"ask": texts}, "criteria": levels}
    return questions


@pytest.mark.parametrize("seed", range(6))
def test_a_submitter_is_told_what_the_engine_finds(tiny_checkpoint: Path, agent: laya.Agent, seed: int) -> None:
    questions = make_questions(seed)
    lengths = {"max_len": random.Random(seed).choice((60, 96)), "head_max_len": random.Random(seed).choice((16, 48))}
    prepared = agent.with_options(**lengths).prepare(questions)
    if prepared.unfit:
        with pytest.raises(QuestionSetError) as raised:
            check_fit(make_spec(tiny_checkpoint, questions, **lengths))
        assert raised.value.problems == list(prepared.unfit.values())
    fitting = {name: question for name, question in questions.items() if name not in prepared.unfit}
    assert check_fit(make_spec(tiny_checkpoint, fitting, **lengths)) == [
        why for name, why in prepared.alike.items() if name not in prepared.unfit
    ]


@pytest.fixture(scope="module")
def agent(tiny_checkpoint: Path) -> laya.Agent:
    return laya.load(tiny_checkpoint, device="cpu")


def test_a_routed_job_is_told_of_each_checkpoint(tiny_checkpoint: Path) -> None:
    alike = {"type": "choice", "instructions": "x", "criteria": [f"a common prefix {i}" for i in range(12)]}
    spec = make_spec("router", {"q": alike}, routes={"english": "nobody/knows", "multilingual": str(tiny_checkpoint)})
    (warning,) = check_fit(spec)
    assert warning.startswith("checkpoint multilingual: question 'q': its 12 options, cut to 4 tokens each, leave 1 ")


def test_a_snapshot_in_the_hubs_cache_is_read_and_nothing_is_fetched(tiny_checkpoint: Path, tmp_path: Path) -> None:
    wide = {"q": {"type": "choice", "instructions": "x", "criteria": [f"option {i}" for i in range(200)]}}
    commit = "0123456789" * 4
    repository = tmp_path / "hub" / "models--some--model"
    shutil.copytree(tiny_checkpoint, repository / "snapshots" / commit / "sub")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    program = (
        "import json, sys; from jobs.question_fit import check_fit; from schemas.job import JobSpec\n"
        "for spec in json.loads(sys.argv[1]):\n"
        "    try: print(check_fit(JobSpec.model_validate(spec)))\n"
        "    except ValueError as error: print(error)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    specs = [make_spec(name, wide) for name in ("some/model/sub", "some/other", "english", "nonsense")]
    specs += [make_spec("some/model/sub", wide, revision=revision) for revision in (commit, "other")]
    run = subprocess.run(
        [sys.executable, "-c", program, json.dumps([spec.model_dump(mode="json") for spec in specs])],
        capture_output=True,
        text=True,
        check=True,
        env={"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
    )
    problem = "of its 200 options fit in max_len 96"
    told, *rest = [line for line in run.stdout.splitlines() if "problem(s)" not in line]
    assert problem in told
    assert rest[:3] == ["[]"] * 3
    assert problem in rest[3]
    assert rest[4:] == ["[]", "[]"]


def test_files_that_cannot_be_read_are_left_to_the_worker(tiny_checkpoint: Path, tmp_path: Path) -> None:
    wide = {"q": {"type": "choice", "instructions": "x", "criteria": [f"option {i}" for i in range(200)]}}
    config = "rl_agent_config.json"
    for file, content in (("tokenizer/tokenizer.json", "{"), (config, "[]"), (config, "x"), (config, "{}")):
        broken = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny_checkpoint, broken)
        (broken / file).write_text(content)
        assert check_fit(make_spec(broken, wide)) == []
