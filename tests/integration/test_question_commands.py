"""Questions given to the real command: refused with one clear message and the place, or asked as they are typed."""

import json
import uuid
from pathlib import Path

import pytest

from tests.commands import Shown, run_commands
from tests.integration.service import make_texts, write_tickets

BOMB = "a0: &a0 [lol,lol,lol,lol,lol,lol,lol,lol,lol]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
LABELS = "\n".join(f"    - option {i}" for i in range(77))
REFUSED = {
    "bomb.yaml": (f"{BOMB}q: {{type: noul, instructions: *a9}}", "line 1, column 10: more than 20000 values"),
    "list as key [x].yaml": (
        "? [a, b]\n: {type: noul, instructions: x}",
        "line 1, column 3: a sequence cannot be a key",
    ),
    "deep.yaml": ("q: " + "[" * 5000, "nested more than 32 levels deep"),
    "itself.yaml": ("q: &q {type: noul, instructions: *q}", "holds itself"),
    "label.yaml": ("q: {type: noul, instructions: x, labels: {true: a, false: ''}}", "question 'q': labels must give"),
    "half.json": (
        '{"q": {"type": "noul", "instructions": "\\ud83d"}}',
        "question 'q': instructions holds half a surrogate",
    ),
    "nan.json": ('{"q": {"type": "noul", "instructions": {"a": NaN}}}', "question 'q': instructions.a is nan"),
    "comma.json": ('{"q": {"type": "noul",}}', "is not valid JSON"),
    "wide.yaml": (
        f"q:\n  type: choice\n  instructions: x\n  criteria:\n{LABELS}\n",
        "of its 77 options fit in max_len 96",
    ),
}


@pytest.fixture
def submit(redis_url: str, tiny_checkpoint: Path, tmp_path: Path) -> list[str]:
    """The command, but for its questions."""
    tickets = write_tickets(tmp_path / "tickets.parquet", make_texts(3))
    return ["submit", str(tickets), "--state", "text", "--checkpoint", str(tiny_checkpoint), "--questions"]


def run(commands: list[list[str]], redis_url: str, data_dir: Path) -> list[Shown]:
    return run_commands(
        commands,
        LAYA_BATCH_BROKER_URL=redis_url,
        LAYA_BATCH_QUEUE=f"test-{uuid.uuid4().hex[:8]}",
        LAYA_BATCH_DATA_DIR=str(data_dir),
    )


def test_what_cannot_be_asked_is_one_message_with_its_place(submit: list[str], redis_url: str, tmp_path: Path) -> None:
    for name, (content, _) in REFUSED.items():
        (tmp_path / name).write_text(content)
    shown = run([[*submit, str(tmp_path / name)] for name in REFUSED] + [["list"]], redis_url, tmp_path / "data")
    for (name, (_, problem)), one in zip(REFUSED.items(), shown, strict=False):
        assert one.code == "1", one.text
        assert problem in one.text
        assert one.text.startswith("laya-batch: ")
        assert name in one.text or name == "wide.yaml"
        assert "Traceback" not in one.text
    assert "there are no jobs" in shown[-1].text


def test_what_is_typed_is_asked_and_the_same_call_is_the_same_job(
    submit: list[str], redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "q.json").write_text(
        json.dumps({"mood": {"type": "choice", "instructions": "a\tb", "criteria": {"😀 [x]": None, "sad": ""}}})
    )
    (tmp_path / "q.yaml").write_text(
        "when: {type: choice, instructions: {since: 2024-01-01, 7: .nan}, criteria: [12:30, 01067, 1.10, null, no]}\n"
        f"alike: {{type: choice, instructions: x, criteria: [{', '.join(f'a common prefix {i}' for i in range(12))}]}}"
    )
    call = [*submit, str(tmp_path / "q.yaml"), "--idempotency-key", "k"]
    commands = [[*submit, str(tmp_path / "q.json")], call, call, ["status", "2", "--json"], ["status", "2"]]
    as_json, first, again, status, _ = run(commands, redis_url, tmp_path / "data")
    assert (as_json.code, as_json.text) == ("0", "1")
    assert first.code == again.code == "0"
    assert first.text.splitlines()[-1] == again.text.splitlines()[-1] == "2"
    (warning,) = json.loads(status.text)["warnings"]
    assert "question 'alike': its 12 options, cut to 4 tokens each, leave 1" in warning
    assert warning in first.text
