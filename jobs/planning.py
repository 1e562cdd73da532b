"""From input names to shards: finds Parquet files, checks their footers, refuses what cannot be scored, divides rows.

Reads no rows: `worker.reader` does, with `open_input` and `identify` from here, so that both sides find files alike.
"""

import difflib
import glob
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from itertools import accumulate
from pathlib import Path
from textwrap import shorten
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.utils import glob_translate
from pyarrow import fs

from jobs.errors import InputError, UnreadableInputError
from jobs.settings import without_password
from jobs.terminal import is_utf8, printable
from schemas.job import InputFile, JobFile, JobPlan, JobSpec, ShardPlan

FOOTERS_AT_ONCE = 16  # each is a wait for a disk or a network
MAX_FILES_PER_SHARD = 256  # each takes a worker some milliseconds to open, or from an object store some hundreds
LISTED_CHARACTERS = 300  # of the columns of a file that lacks one
_GLOB_CHARACTERS = "*?["


@dataclass(frozen=True)
class _Footer:
    """What planning keeps of a file's footer, which may be large: the columns that the job reads, and its rows."""

    schema: pa.Schema
    row_counts: list[int]  # of each row group


def plan_job(spec: JobSpec, rows_per_shard: int, roots: list[str]) -> JobPlan:
    """Check every file's footer against what the job needs, and divide its rows.

    Files come in the order given, a folder's or glob's in the order of their names. `roots`: when not empty, every file
    must lie under one of them.

    Raises:
        InputError: naming the file and what is wrong with it.
    """
    files = find_files(spec.inputs)
    for file in files:
        check_root(file.name, roots)
    with ThreadPoolExecutor(FOOTERS_AT_ONCE, "footers") as threads:
        footers = list(threads.map(lambda file: _read_footer(file, spec), files))
    for file, footer in zip(files, footers, strict=True):
        if not footer.schema.equals(footers[0].schema):
            difference = _difference(footer.schema, footers[0].schema)
            raise InputError(f"{file.name}: columns differ from {files[0].name}: {difference}")
    rows = [sum(footer.row_counts) for footer in footers]
    firsts = accumulate(rows, initial=0)
    planned = [JobFile(*astuple(file), *of_job) for file, *of_job in zip(files, rows, firsts, strict=False)]
    return JobPlan(planned, divide_rows([footer.row_counts for footer in footers], rows_per_shard))


def find_files(inputs: list[str]) -> list[InputFile]:
    """The Parquet files that the inputs name: files, folders (with their subfolders), globs or URLs.

    Raises:
        InputError: an input names nothing, or names a file twice.
    """
    files: list[InputFile] = []
    for name in inputs:
        if name != without_password(name):
            raise InputError(f"{without_password(name)}: holds a secret; give it to the workers' environment instead")
        files += _find_remote(name) if is_url(name) else _find_local(name)
    seen: set[str] = set()
    for file in files:
        if file.name in seen:
            raise InputError(f"{file.name}: named twice; each row is scored once")
        seen.add(file.name)
    return files


def is_url(name: str) -> bool:
    """Whether an input is a URL for pyarrow's filesystems rather than a local path."""
    return "://" in name


def open_input(name: str) -> tuple[fs.FileSystem, str]:
    """The filesystem and the path in it of a file that `find_files` named.

    Raises InputError for a URL that means nothing, UnreadableInputError when the filesystem cannot be reached.
    """
    try:
        return fs.FileSystem.from_uri(name) if is_url(name) else (fs.LocalFileSystem(), name)
    except (pa.ArrowInvalid, ValueError) as error:
        raise InputError(f"{name}: cannot be opened: {error}") from error
    except OSError as error:
        raise UnreadableInputError(f"{name}: cannot be reached: {error}") from error


def identify(name: str) -> InputFile:
    """The file as it is now; raises InputError when it is gone."""
    if not is_utf8(name):
        raise InputError(f"{printable(name)}: the path is not UTF-8; rename the file or its folder")
    filesystem, path = open_input(name)
    try:
        info = filesystem.get_file_info(path)
    except OSError as error:
        raise UnreadableInputError(f"{name}: cannot be reached: {error}") from error
    if not info.is_file:
        raise InputError(f"{name}: no such file")
    return _input_file(name, info)


def check_root(name: str, roots: list[str]) -> None:
    """Raise InputError unless the file, its symlinks followed, lies under one of the roots; no roots allow any file."""
    if not roots or any(_lies_under(name, root) for root in roots):
        return
    allowed = ", ".join(roots)
    raise InputError(f"{name}: not under an input root ({allowed}); add its folder to LAYA_BATCH_INPUT_ROOTS")


def _lies_under(name: str, root: str) -> bool:
    local_name, local_root = _local_path(name), _local_path(root)
    if local_name is not None and local_root is not None:
        return Path(local_name).resolve().is_relative_to(Path(local_root).resolve())
    if local_name is not None or local_root is not None:
        return False
    parts = unquote(urlsplit(name).path).split("/")  # %2e%2e is .. to a filesystem
    return ".." not in parts and f"{name}/".startswith(f"{root.rstrip('/')}/")


def _local_path(name: str) -> str | None:
    """Where a file of this machine lies, be it named by a path or a URL; None for any other."""
    if not is_url(name):
        return name
    return open_input(name)[1] if urlsplit(name).scheme.lower() == "file" else None


def _find_local(name: str) -> list[InputFile]:
    path = Path(name).expanduser().absolute()
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = [file for file in path.rglob("*.parquet") if not _is_hidden(file.relative_to(path))]
    elif any(character in name for character in _GLOB_CHARACTERS):
        found = [Path(file) for file in glob.glob(str(path), recursive=True) if Path(file).is_file()]  # noqa: PTH207
    else:
        raise InputError(f"{name}: no such file or folder")
    if not found:
        raise InputError(f"{name}: no Parquet file there")
    return [identify(os.path.normpath(file)) for file in sorted(found)]


def _find_remote(name: str) -> list[InputFile]:
    """A URL's file, folder or glob. The names found keep the URL's scheme, host and query."""
    parts = urlsplit(name)
    fixed = parts.path
    if any(character in parts.path for character in _GLOB_CHARACTERS):
        fixed = os.path.dirname(parts.path[: min(parts.path.find(c) for c in _GLOB_CHARACTERS if c in parts.path)])  # noqa: PTH120
    filesystem, base = open_input(parts._replace(path=fixed).geturl())
    try:
        info = filesystem.get_file_info(base)
        if info.is_file:
            return [_input_file(name, info)]
        below = filesystem.get_file_info(fs.FileSelector(base, recursive=True))
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error}") from error
    pattern = re.compile(glob_translate(parts.path))
    found = []
    for info in below:
        url = parts._replace(path=fixed.rstrip("/") + info.path.removeprefix(base.rstrip("/"))).geturl()
        wanted = info.path.endswith(".parquet") if fixed == parts.path else bool(pattern.match(urlsplit(url).path))
        if info.is_file and wanted:
            found.append(_input_file(url, info))
    if not found:
        raise InputError(f"{name}: no Parquet file there")
    return sorted(found, key=lambda file: file.name)


def _read_footer(file: InputFile, spec: JobSpec) -> _Footer:
    filesystem, path = open_input(file.name)
    try:
        with filesystem.open_input_file(path) as source:
            metadata = pq.read_metadata(source)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{file.name}: is not a readable Parquet file: {error}") from error
    if metadata.num_rows == 0:
        raise InputError(f"{file.name}: has no rows")
    schema = _needed_columns(file.name, metadata.schema.to_arrow_schema(), spec)
    return _Footer(schema, [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)])


def _needed_columns(name: str, schema: pa.Schema, spec: JobSpec) -> pa.Schema:
    """The columns that the job reads, checked: present, and of a type that can be a state, a row id or a language."""
    needed = [*spec.state, *(name for name in (spec.row_id, spec.language_column) if name is not None)]
    if missing := [column for column in needed if column not in schema.names]:
        raise InputError(f"{name}: no column {missing[0]!r}; {_describe_columns(schema.names, missing[0])}")
    if repeated := [column for column in needed if schema.names.count(column) > 1]:
        raise InputError(f"{name}: has more than one column {repeated[0]!r}")
    if len(spec.state) == 1 and not _is_text_or_turns(state_type := schema.field(spec.state[0]).type):
        raise InputError(
            f"{name}: column {spec.state[0]!r} is {state_type}; a state is text, or a list of turns "
            "(text, or structs such as role and content)"
        )
    for column in spec.state if len(spec.state) > 1 else []:
        if _holds_bytes(schema.field(column).type):
            raise InputError(f"{name}: column {column!r} is {schema.field(column).type}; bytes are no JSON")
    if spec.row_id is not None and not _is_id(id_type := schema.field(spec.row_id).type):
        raise InputError(f"{name}: row id column {spec.row_id!r} is {id_type}; an id is text or a whole number")
    if spec.language_column is not None and not _is_text(language_type := schema.field(spec.language_column).type):
        raise InputError(f"{name}: language column {spec.language_column!r} is {language_type}; a language is text")
    return pa.schema([schema.field(column).remove_metadata().with_nullable(True) for column in dict.fromkeys(needed)])


def _describe_columns(names: list[str], wanted: str) -> str:
    """What a file has instead of a column: all its columns where these fit in a line, else the nearest."""
    if len(listed := ", ".join(names)) <= LISTED_CHARACTERS:
        return f"it has {listed}"
    near = difflib.get_close_matches(wanted, names, 3)
    shown = ", ".join(repr(shorten(name, LISTED_CHARACTERS // 3, placeholder="…")) for name in near or names[:3])
    return f"it has {len(names):,} columns, {'the nearest are' if near else 'such as'} {shown}"


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_text_or_turns(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return bool(
            _is_text(kind.value_type) or (pa.types.is_struct(kind.value_type) and not _holds_bytes(kind.value_type))
        )
    return _is_text(kind)


def _is_id(kind: pa.DataType) -> bool:
    return bool(_is_text(kind) or pa.types.is_integer(kind))


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_holds_bytes(kind.field(i).type) for i in range(kind.num_fields))
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _difference(schema: pa.Schema, first: pa.Schema) -> str:
    pairs = zip(schema, first, strict=True)
    return ", ".join(f"{here.name} is {here.type}, not {there.type}" for here, there in pairs if here != there)


def divide_rows(row_counts: list[list[int]], rows_per_shard: int) -> list[ShardPlan]:
    """Cut a job's rows into shards of at most `rows_per_shard` rows, given the rows of each row group of each file.

    A shard is whole row groups, of several files where these are small, so that each group is read for one shard. A row
    group that is larger than a shard is divided; a worker goes on in it where its shard before ended.
    """
    plans: list[ShardPlan] = []
    first, rows, files = 0, 0, 0
    for groups in row_counts:
        files += 1
        for piece in (piece for group in groups for piece in _pieces(group, rows_per_shard)):
            if rows and (rows + piece > rows_per_shard or files > MAX_FILES_PER_SHARD):
                plans.append(ShardPlan(first, rows))
                first, rows, files = first + rows, 0, 1
            rows += piece
    return [*plans, ShardPlan(first, rows)] if rows else plans


def _pieces(rows: int, largest: int) -> Iterator[int]:
    for start in range(0, rows, largest):
        yield min(largest, rows - start)


def _input_file(name: str, info: fs.FileInfo) -> InputFile:
    return InputFile(name, info.size, str(info.mtime_ns))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)
