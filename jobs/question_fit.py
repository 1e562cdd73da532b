"""Whether a job's questions fit its checkpoint, told before anything is queued where the tokenizer is on this machine.

Reads the tokenizer of a checkpoint's folder, or of a snapshot in the Hub's cache, and fetches nothing. The rules are
`schemas.question_text`'s; a worker asks the same of the checkpoint that it has loaded.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.hub import find_cached
from schemas.job import JobSpec
from schemas.question import QuestionSetError
from schemas.question_text import SequenceLimits, count_distinct, cut_head, why_alike, why_unfit, word_questions

AGENT_CONFIG, TOKENIZER = "rl_agent_config.json", "tokenizer/tokenizer.json"


@dataclass
class Findings:
    """Questions that do not fit, and questions some of whose options are alike to the model; in words."""

    unfit: list[str] = field(default_factory=list)
    alike: list[str] = field(default_factory=list)


def check_fit(spec: JobSpec) -> list[str]:
    """Return a warning for each question some of whose options are alike to the model, as far as is known here.

    Raises:
        QuestionSetError: a question does not fit.
    """
    findings = Findings()
    for name, location in (spec.routes or {"": spec.checkpoint}).items():
        found = _examine(spec, location)
        where = f"checkpoint {name}: " if name else ""
        findings.unfit += [where + problem for problem in found.unfit]
        findings.alike += [where + problem for problem in found.alike]
    if findings.unfit:
        raise QuestionSetError(findings.unfit)
    return findings.alike


def _examine(spec: JobSpec, location: str) -> Findings:
    findings = Findings()
    files = _find_files(location, spec.revision)
    limits = None if files is None else _read_limits(files[0], spec)
    if files is None or limits is None:
        return findings
    try:
        tokenizer, mask = _open_tokenizer(files[1]), _read_mask_token(files[1].parent)
    except Exception:  # noqa: BLE001 - the Rust library raises no narrower class; the worker says what is wrong
        return findings
    for question in word_questions(spec.questions):
        # One by one: a batch starts the library's threads, in a process that may fork.
        instructions, *options = [
            tokenizer.encode(text.replace(mask, " "), add_special_tokens=False).ids for text in question.texts
        ]
        cuts = cut_head(len(instructions), list(map(len, options)), limits.head_max_len)
        if (problem := why_unfit(question.id, cuts, limits)) is not None:
            findings.unfit.append(problem)
        elif (problem := why_alike(question.id, cuts, count_distinct(options, cuts))) is not None:
            findings.alike.append(problem)
    return findings


def _find_files(location: str, revision: str | None) -> tuple[Path, Path] | None:
    """The checkpoint's configuration and tokenizer, where both are on this machine."""
    if Path(location).is_dir():
        found = [Path(location) / name for name in (AGENT_CONFIG, TOKENIZER)]
    else:
        found = find_cached(location, (AGENT_CONFIG, TOKENIZER), revision)
    return (found[0], found[1]) if len(found) == 2 and all(path.is_file() for path in found) else None


def _read_limits(path: Path, spec: JobSpec) -> SequenceLimits | None:
    """The lengths of the job, or else of the checkpoint; None where neither says."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        max_len, head_max_len = spec.max_len or config["max_len"], spec.head_max_len or config["head_max_len"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return SequenceLimits(max_len, head_max_len) if type(max_len) is type(head_max_len) is int else None


def _open_tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer  # noqa: PLC0415 - loaded where a job is submitted, never in a worker's parent

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True  # their literal text is text
    return tokenizer


def _read_mask_token(folder: Path) -> str:
    """The text of which every question and state has a space instead."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            token = json.loads((folder / name).read_text(encoding="utf-8")).get("mask_token")
            if token:
                return str(token["content"] if isinstance(token, dict) else token)
    return "[MASK]"
