"""From a call to a queued job: everything is checked first, so that what is refused leaves nothing behind."""

import difflib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import ValidationError

from jobs.discovery import find_files
from jobs.engine_options import check_engine_options
from jobs.errors import BrokerError, DatabaseConflictError, IdempotencyError, InputError, SettingsError
from jobs.hub import check_loadable
from jobs.locations import is_url
from jobs.planning import plan_job
from jobs.question_fit import check_fit
from jobs.queue import check_broker, send_shards
from jobs.settings import Settings
from jobs.store import lifecycle, recovery
from jobs.store.database import Database
from jobs.store.lifecycle import JobOptions, MadeBefore
from jobs.terminal import is_utf8, printable
from schemas.checkpoints import ALIASES, NAMES, known_name, missing_files
from schemas.job import MAX_PRIORITY, ROUTED_TO, ROUTER, JobSpec, JobStatus, TransitionError
from schemas.question import check_questions
from schemas.question_file import read_questions
from schemas.question_text import word_questions

_SEND_CHUNK_SHARDS = 1000
MAX_SHARD_ANSWERS = 2**19  # rows x questions: a worker that goes on with a shard holds which of them are saved
_SHOWN_FILES = 3
# What the Hub takes for a repository, and a folder in it.
_HUB_ID = re.compile(
    r"\b((?!--|\.\.)[\w.-])+\b/\b((?!--|\.\.)[\w.-]){1,96}\b(?<!\.git)(/[\w.-]+)*",
)


@dataclass(frozen=True)
class Again:
    """What is wanted of a job that the idempotency key has made before."""

    return_existing: bool = False  # whatever has become of its input files
    retry_failed: bool = False


FIRST = Again()


def build_spec(**asked: Any) -> JobSpec:
    """Check and normalise what a caller asked for; questions may be a dict or a file's path.

    Raises:
        QuestionSetError: the questions cannot be asked.
        InputError: any other part is wrong.
    """
    inputs, state, questions = asked.pop("inputs"), asked.pop("state"), asked.pop("questions")
    questions = read_questions(questions) if isinstance(questions, str | Path) else check_questions(questions)
    checkpoint, routes = asked.pop("checkpoint"), asked.pop("routes", None)
    if checkpoint != ROUTER and asked.get("language_column") is not None:
        raise InputError(f"a language column is read only with checkpoint {ROUTER!r}, not {str(checkpoint)!r}")
    routes = resolve_routes(str(checkpoint), routes)
    checkpoint = ROUTER if checkpoint == ROUTER else resolve_checkpoint(checkpoint)
    engine_options = check_engine_options(asked.pop("engine_options"), checkpoint, routes)
    if asked.get("unique_ids") and asked.get("row_id") is None:
        raise InputError("unique ids are asked for, but no row id column; name one (--row-id)")
    try:
        return JobSpec(
            inputs=[_absolute(name) for name in _as_list(inputs)],
            state=_as_list(state),
            questions=questions,
            checkpoint=checkpoint,
            routes=routes,
            **engine_options,
            **asked,
        )
    except ValidationError as error:
        problems = [
            f"{'.'.join(str(part) for part in p['loc'])}: {p['msg']}" for p in error.errors(include_input=False)
        ]
        raise InputError("; ".join(problems)) from error


def submit_job(db: Database, settings: Settings, spec: JobSpec, options: JobOptions, again: Again = FIRST) -> int:
    """Plan, record and queue a job; returns its id. Called again with the same idempotency key, the first job's id.

    Raises:
        QuestionSetError, InputError, IdempotencyError, BrokerError, DatabaseError: nothing was queued, and nothing is
            left behind.
    """
    _check_options(options, again)
    if (made := _made_before(db, settings, options.idempotency_key, spec, again)) is not None:
        return made
    # Every job has a key: one that was made, though nobody heard so, can be told from one that was not.
    options = replace(options, idempotency_key=options.idempotency_key or f"submit-{uuid4()}")
    options = replace(options, warnings=check_fit(spec))
    rows_per_shard = max(1, min(settings.rows_per_shard, MAX_SHARD_ANSWERS // len(spec.questions)))
    plan = plan_job(spec, rows_per_shard, settings.input_roots)
    if settings.owns_database:  # which only this machine's workers can open
        check_checkpoints(spec)
    check_broker(settings)
    try:
        job_id = lifecycle.create_job(db, spec, options, plan)
    except DatabaseConflictError:  # another caller used the key meanwhile, or the reply to our own COMMIT was lost
        if (made := _made_before(db, settings, options.idempotency_key, spec, again)) is None:
            raise
        with suppress(BrokerError):  # queued it is; a sweep will send what this could not
            send_job(db, settings, made)
        return made
    try:
        send_job(db, settings, job_id)
    except BrokerError:
        # A worker that has begun it proves that messages arrive; the sweep will send the others again.
        if lifecycle.forget_job(db, job_id):
            raise
    return job_id


def check_checkpoints(spec: JobSpec) -> None:
    """Raise InputError when this machine can load one of the checkpoints neither from its cache nor from the Hub."""
    for location in spec.routes.values() if spec.routes else [spec.checkpoint]:
        check_loadable(location, spec.revision)


def _check_options(options: JobOptions, again: Again) -> None:
    if options.idempotency_key == "":
        raise SettingsError("the idempotency key is empty; leave it out, or give it a value")
    for field, text in (("name", options.name), ("idempotency key", options.idempotency_key)):
        if not is_utf8(text or ""):
            raise SettingsError(f"the {field} {printable(text or '')} is not UTF-8; write it in UTF-8")
    if not 0 <= options.priority <= MAX_PRIORITY:
        raise SettingsError(f"priority {options.priority} is not between 0 (nightly) and {MAX_PRIORITY} (urgent)")
    if options.idempotency_key is None and again != FIRST:
        raise SettingsError("return_existing and retry_failed want an idempotency key, by which the job is found")


def send_job(db: Database, settings: Settings, job_id: int) -> None:
    """Send the messages of all the job's waiting shards."""
    queued = recovery.list_queued(db, job_id)
    for start in range(0, len(queued), _SEND_CHUNK_SHARDS):
        send_shards(settings, queued[start : start + _SEND_CHUNK_SHARDS])


def resolve_checkpoint(name: str | Path) -> str:
    """A known name without its aliases; a folder as an absolute path, once it is seen to hold a checkpoint; a Hub id
    as it is. Raises InputError."""
    if known := known_name(str(name)):
        return known
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if str(name).startswith((".", "/", "~")):
            raise InputError(f"checkpoint {name}: no such folder")
        if not _HUB_ID.fullmatch(str(name)) or ".." in str(name).split("/"):
            near = difflib.get_close_matches(str(name).lower(), [ROUTER, *NAMES, *ALIASES], n=1)
            raise InputError(
                f"checkpoint {name}: no such folder, and no name ({', '.join(NAMES)}, {ROUTER}) or Hub id "
                "(owner/repository[/subfolder])" + (f"; did you mean {near[0]}?" if near else "")
            )
        return str(name)
    if missing := missing_files(folder):
        raise InputError(f"checkpoint {name}: has no {missing[0]}")
    return str(folder.absolute())


def resolve_routes(checkpoint: str, routes: Mapping[str, str | Path] | None) -> dict[str, str] | None:
    """Where each checkpoint of a routed job is: the public ones but for what `routes` says; None for any other job."""
    if checkpoint != ROUTER:
        if routes:
            raise InputError(f"routes are taken only with checkpoint {ROUTER!r}, not {checkpoint!r}")
        return None
    if unknown := sorted((routes or {}).keys() - set(ROUTED_TO)):
        raise InputError(f"route {unknown[0]!r}: rows go to {' or '.join(ROUTED_TO)}")
    return {name: resolve_checkpoint((routes or {}).get(name, name)) for name in ROUTED_TO}


def _made_before(db: Database, settings: Settings, key: str | None, spec: JobSpec, again: Again) -> int | None:
    """Return the job that the key made before, tried again if that is asked for, or None.

    Raises IdempotencyError when it asks for something else, or its input files are no longer what they were.
    """
    made = None if key is None else lifecycle.find_by_key(db, key)
    if made is None:
        return None
    check_same(key, made, spec)
    if not again.return_existing and (changes := _changed_files(made, spec, settings.input_roots)):
        raise IdempotencyError(
            f"idempotency key {key!r} already made job {made.id}, but its input files have changed since: {changes}; "
            "use another key to score them as they are, or ask for that job with --return-existing"
        )
    if again.retry_failed and made.status in (JobStatus.FAILED, JobStatus.CANCELLED):
        check_broker(settings)
        try:
            lifecycle.retry_job(db, made.id, spec.max_row_errors)
        except TransitionError:
            if lifecycle.find_status(db, made.id) in (JobStatus.FAILED, JobStatus.CANCELLED):
                raise  # not another call's retry, a moment before
        with suppress(BrokerError):  # queued it is; a sweep will send what this could not
            send_job(db, settings, made.id)
    return made.id


def check_same(key: str | None, made: MadeBefore, spec: JobSpec) -> None:
    """Raise IdempotencyError when the job that the key made asks for something else."""
    answering = JobSpec.model_fields.keys() - {"max_row_errors"}  # a retry may have raised that
    differing = {field for field in answering if getattr(made.spec, field) != getattr(spec, field)}
    # Two dicts of other order are equal, but the model reads options, and an object's keys, in their order.
    if set(word_questions(made.spec.questions)) != set(word_questions(spec.questions)):
        differing.add("questions")
    if differing:
        raise IdempotencyError(
            f"idempotency key {key!r} already made job {made.id}, which differs in {', '.join(sorted(differing))}; "
            "use another key for another job"
        )


def _changed_files(made: MadeBefore, spec: JobSpec, roots: list[str]) -> str:
    """Say which input files were added, removed or changed since the job was made; an empty text when none was."""
    try:
        now = {file.name: (file.size, file.modified) for file in find_files(spec.inputs, roots)}
    except InputError as error:
        return str(error)
    both = now.keys() & made.files.keys()
    kinds = {
        "added": now.keys() - made.files.keys(),
        "removed": made.files.keys() - now.keys(),
        "changed": {name for name in both if now[name] != made.files[name]},
    }
    shown = []
    for kind, names in kinds.items():
        some = sorted(names)[:_SHOWN_FILES]
        more = f" and {len(names) - len(some):,} more" if len(names) > len(some) else ""
        shown += [f"{kind} {', '.join(some)}{more}"] if names else []
    return "; ".join(shown)


def _as_list(names: object) -> list[str]:
    if isinstance(names, str | Path):
        return [str(names)]
    return [str(name) for name in names] if isinstance(names, list | tuple) else []


def _absolute(name: str) -> str:
    return name if is_url(name) else str(Path(name).expanduser().absolute())
