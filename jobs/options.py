"""The arguments and options that commands share, each described once. Owns no command."""

from pathlib import Path
from typing import Annotated

import typer

from jobs.errors import JobNotFoundError
from schemas.job import MAX_PRIORITY, ROUTER

MAX_ID = 2**63 - 1  # what a database can count to


def check_job_id(job_id: int | None) -> int | None:
    """JobNotFoundError for a number that no job can have."""
    if job_id is not None and not 0 < job_id <= MAX_ID:
        raise JobNotFoundError(job_id)
    return job_id


Inputs = Annotated[list[str], typer.Argument(help="Parquet files, folders, globs or URLs.", show_default=False)]
Questions = Annotated[Path, typer.Option(help="YAML or JSON file of questions.", show_default=False)]
State = Annotated[list[str], typer.Option(help="Column of the text or conversation; repeat it to make a JSON object.")]
RowId = Annotated[str | None, typer.Option(help="Column whose value is kept with each answer.")]
UniqueIds = Annotated[
    bool, typer.Option("--unique-ids", help="Refuse inputs in which a row has no id, or another row's; reads all ids.")
]
Checkpoint = Annotated[
    str,
    typer.Option(
        help="english, multilingual, typed-decisions, OWNER/REPOSITORY[/SUBFOLDER] on the Hub, or a folder; "
        "router: english or multilingual, by each row's language."
    ),
]
Route = Annotated[
    list[str] | None,
    typer.Option(help="For router: where one is, as english=FOLDER or multilingual=FOLDER; repeat it."),
]
LanguageColumn = Annotated[
    str | None, typer.Option(help="For router: column of each row's language; unset or null: detected.")
]
DefaultRoute = Annotated[
    str | None,
    typer.Option(help="For router: english or multilingual, for rows whose language is undecided; unset: the latter."),
]
Revision = Annotated[
    str | None, typer.Option(help="Commit, branch or tag of a checkpoint on the Hub; with router: of both.")
]
ExpectedSha256 = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE=DIGEST",
        help="SHA-256 that a file of the checkpoint must have, as model.safetensors=9f86…; repeat it. "
        "With router: english/model.safetensors=…",
    ),
]
MaxLen = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of a question and a text together; more are cut. Unset: the checkpoint's."),
]
HeadMaxLen = Annotated[
    int | None, typer.Option(min=1, help="Tokens that a question should not exceed. Unset: the checkpoint's.")
]
CalibrationFile = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="JSON file of temperatures that replace the checkpoint's. With router: english=FILE or "
        "multilingual=FILE; repeat it.",
    ),
]
Backend = Annotated[str, typer.Option(help="auto, or one of tilelang, compile, aot, eager and onnx.")]
Name = Annotated[str | None, typer.Option(help="What to call the job.")]
Priority = Annotated[int, typer.Option(min=0, max=MAX_PRIORITY, help="0 (nightly) to 9 (urgent).")]
MaxRowErrors = Annotated[int | None, typer.Option(min=0, help="Fail when more rows cannot be scored; unset: never.")]
JobId = Annotated[
    int,
    typer.Argument(help="The job's id, as `laya-batch list` shows it.", show_default=False, callback=check_job_id),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder of the database and the worker's log; unset: LAYA_BATCH_DATA_DIR.", show_default=False),
]
ReadDataDir = Annotated[
    Path | None,
    typer.Option(
        help="Read the database that `run` keeps in this folder; unset: LAYA_BATCH_DATABASE_URL, and without that the "
        "one in LAYA_BATCH_DATA_DIR.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
AsJsonLines = Annotated[bool, typer.Option("--json", help="One JSON object a line, with all columns.")]


def read_pairs(given: list[str] | None, option: str, form: str) -> dict[str, str] | None:
    """Return `NAME=VALUE` of each time an option was given, None for never. Raises BadParameter for another form."""
    pairs: dict[str, str] = {}
    for text in given or []:
        name, _, value = text.partition("=")
        if not (name and value):
            raise typer.BadParameter(f"{option} {text}: write it as {form}")
        if name in pairs:
            raise typer.BadParameter(f"{option} {text}: {name} was given before")
        pairs[name] = value
    return pairs or None


def read_calibration_option(given: list[str] | None, checkpoint: str) -> str | dict[str, str] | None:
    """Return the one file, or with a router each checkpoint's."""
    if not given:
        return None
    if checkpoint == ROUTER:
        return read_pairs(given, "--calibration", "english=FILE or multilingual=FILE")
    if len(given) > 1:
        raise typer.BadParameter("--calibration: a checkpoint has one; give it once")
    return given[0]
