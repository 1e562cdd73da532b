"""Which files a job's inputs name, what the folders above them say, and what a file is that is no Parquet."""

import glob
import os
import re
from collections import Counter
from pathlib import Path, PurePath, PurePosixPath
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
from fsspec.utils import glob_translate
from pyarrow import fs

from jobs.errors import InputError, UnreadableInputError
from jobs.locations import Roots, check_root, check_url, is_url, locate, open_input, short_error
from jobs.terminal import is_utf8, printable
from schemas.job import InputFile

ENDINGS = (".parquet", ".parq", ".pq")  # in small or capital letters
_GLOB_CHARACTERS = "*?["
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_URL_SAFE = "/=:@!$&'()*+,;~"
_KINDS_SHOWN = 4  # of the files of a folder without Parquet
_SNIFFED_BYTES = 512

_TO_PARQUET = (
    'python -c "from pyarrow import {module}, parquet; parquet.write_table({module}.{read}({name!r}), {to!r})"'
)
# How a file begins, what it is, and what reads it: a function of pyarrow, or words.
_KINDS = (
    (b"PAR1", "Parquet that is cut off or damaged", "write it again"),
    (b"PARE", "encrypted Parquet", "decrypt it first"),
    (b"ARROW1", "an Arrow or Feather file", ("feather", "read_table")),
    (b"ORC", "ORC", ("orc", "read_table")),
    (b"Obj\x01", "Avro", "convert it to Parquet"),
    (b"PK\x03\x04", "a zip archive or an Excel sheet", "export it as CSV and convert that to Parquet"),
    (b"\x1f\x8b", "compressed with gzip", "decompress it with gunzip, and convert it unless that is Parquet"),
    (b"BZh", "compressed with bzip2", "decompress it with bunzip2, and convert it unless that is Parquet"),
    (b"\xfd7zXZ", "compressed with xz", "decompress it with unxz, and convert it unless that is Parquet"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "decompress it with unzstd, and convert it unless that is Parquet"),
    (b"SQLite format 3", "an SQLite database", "export its table to Parquet"),
)


def find_files(inputs: list[str], roots: Roots = ()) -> list[InputFile]:
    """Return the Parquet files that the inputs name: files, folders (with their subfolders), globs or URLs.

    Files come in the order given, a folder's or glob's in the order of their names.

    Raises:
        InputError: an input names nothing, a file twice, or one outside the roots.
    """
    files: list[InputFile] = []
    for name in inputs:
        files += _find_remote(name, roots) if is_url(name) else _find_local(name)
    seen: set[str] = set()
    for file in files:
        if file.name in seen:
            raise InputError(f"{file.name}: named twice; each row is scored once")
        seen.add(file.name)
        check_root(file.name, roots)
    return files


def identify(name: str, roots: Roots = ()) -> InputFile:
    """Return the file as it is now; raises InputError when it is gone."""
    if not is_utf8(name):
        raise InputError(f"{printable(name)}: the path is not UTF-8; rename the file or its folder")
    filesystem, path = open_input(name, roots)
    try:
        info = filesystem.get_file_info(path)
    except OSError as error:
        raise UnreadableInputError(f"{name}: cannot be reached: {short_error(error)}") from error
    if not info.is_file:
        raise InputError(f"{name}: no such file")
    return _input_file(name, info)


def partition_values(name: str) -> dict[str, str | None]:
    """Return the columns that the folders of a file's path hold, as in `day=2026-01-02/country=de/part-0.parquet`."""
    path = unquote(urlsplit(name).path) if is_url(name) else name
    values: dict[str, str | None] = {}
    for folder in PurePosixPath(path).parts[:-1]:
        key, equals, value = folder.partition("=")
        if key and equals:
            values[unquote(key)] = None if value == _NULL_PARTITION else unquote(value)
    return values


def describe_other(filesystem: fs.FileSystem, path: str, name: str) -> str | None:
    """Return what a file is that could not be read as Parquet, and what to do; None when nothing is known of it."""
    try:
        with filesystem.open_input_stream(path, compression=None) as source:
            start = source.read(_SNIFFED_BYTES)
    except (OSError, pa.ArrowException):
        return None
    what, how = _kind_of(start)
    if not isinstance(how, str):
        target = str(Path(name).with_suffix(".parquet")) if not is_url(name) else "converted.parquet"
        how = f"convert it: {_TO_PARQUET.format(module=how[0], read=how[1], name=name, to=target)}"
    return f"is {what}, and laya-batch reads Parquet; {how}" if what else None


def _kind_of(start: bytes) -> tuple[str, str | tuple[str, str]]:
    for magic, what, how in _KINDS:
        if start.startswith(magic):
            return what, how
    text = start.decode("utf-8", errors="ignore").lstrip("\ufeff \t\r\n")
    if not start:
        return "an empty file", "write it again"
    if text.startswith(("{", "[")):
        return "JSON", ("json", "read_json")
    if text and "\x00" not in text and len(text.encode()) > len(start) - 8:  # a character may be cut
        return "text or CSV", ("csv", "read_csv")
    return "", ""


def _find_local(name: str) -> list[InputFile]:
    path = Path(name).expanduser().absolute()
    if path.is_file():
        found = [path]
    elif path.is_dir():
        below = [file for file in path.rglob("*") if not _is_hidden(file.relative_to(path)) and file.is_file()]
        found = [Path(file) for file in _pick_parquet(name, list(map(str, below)), fs.LocalFileSystem())]
    elif any(character in name for character in _GLOB_CHARACTERS):
        found = [Path(file) for file in glob.glob(str(path), recursive=True) if Path(file).is_file()]  # noqa: PTH207
        if not found:
            raise InputError(f"{name}: no file matches")
    else:
        raise InputError(f"{name}: no such file or folder")
    return [identify(os.path.normpath(file)) for file in sorted(found)]


def _find_remote(name: str, roots: Roots) -> list[InputFile]:
    """Return a URL's file, folder or glob. The names found keep the URL's scheme, host and options."""
    parts = check_url(name)
    fixed = parts.path
    if is_glob := any(character in parts.path for character in _GLOB_CHARACTERS):
        fixed = os.path.dirname(parts.path[: min(parts.path.find(c) for c in _GLOB_CHARACTERS if c in parts.path)])  # noqa: PTH120
    filesystem, base, path = locate(parts._replace(path=fixed).geturl(), roots)
    try:
        info = filesystem.get_file_info(path)
        if info.is_file:
            return [_input_file(name, info)]
        below = {info.path: info for info in filesystem.get_file_info(fs.FileSelector(path, recursive=True))}
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {short_error(error)}") from error
    files = [found for found, info in below.items() if info.is_file]
    if is_glob:
        pattern = re.compile(glob_translate(unquote(parts.path)))
        found = [file for file in files if pattern.match(file.removeprefix(base))]
        if not found:
            raise InputError(f"{name}: no file matches")
    else:
        visible = [file for file in files if not _is_hidden(PurePosixPath(file.removeprefix(path).lstrip("/")))]
        found = _pick_parquet(name, visible, filesystem)
    # What the filesystem calls a file is no URL yet: it may hold spaces and per cents.
    url = {file: parts._replace(path=quote(file.removeprefix(base), safe=_URL_SAFE)).geturl() for file in found}
    return [_input_file(url[file], below[file]) for file in sorted(found)]


def _pick_parquet(folder: str, files: list[str], filesystem: fs.FileSystem) -> list[str]:
    """Return the files of a folder that are Parquet: by their ending, or without one, by how they begin.

    Raises InputError, saying what is there instead.
    """
    endings = {file: PurePosixPath(file).suffix.lower() for file in files}
    found = [
        file
        for file, ending in endings.items()
        if ending in ENDINGS or (not ending and _begins_as_parquet(filesystem, file))
    ]
    if not found:
        kinds = Counter(ending or "without an ending" for ending in endings.values()).most_common(_KINDS_SHOWN)
        there = (
            "the folder is empty" if not files else f"{len(files)} files: " + ", ".join(f"{n} {k}" for k, n in kinds)
        )
        raise InputError(f"{folder}: no Parquet file there ({there}); laya-batch reads {', '.join(ENDINGS)}")
    return found


def _begins_as_parquet(filesystem: fs.FileSystem, path: str) -> bool:
    try:
        with filesystem.open_input_stream(path, compression=None) as source:
            return bool(source.read(4) == b"PAR1")
    except (OSError, pa.ArrowException):
        return False


def _input_file(name: str, info: fs.FileInfo) -> InputFile:
    return InputFile(name, info.size, str(info.mtime_ns))


def _is_hidden(path: PurePath) -> bool:
    """Return whether a writer of Parquet keeps the file for itself: `_SUCCESS`, `_temporary`, `.part-0.crc`.

    A folder such as `_day=2026-01-02` is a partition.
    """
    return any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in path.parts)
