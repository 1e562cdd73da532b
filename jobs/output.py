"""Writing a job's answers to a file, whole or not at all. Reads no answers: it writes the batches that it is given."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from jobs.errors import LayaBatchError, OutputError
from jobs.locations import is_url, local_path, open_input, open_url
from jobs.terminal import is_utf8, printable

ENDINGS = (".parquet", ".pq")


@dataclass(frozen=True)
class OutputFile:
    """Where answers go: a file of this machine, its symlinks followed, or of an object store."""

    name: str  # as the caller wrote it
    filesystem: fs.FileSystem
    path: str

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, fs.LocalFileSystem)


def open_output(name: str, input_files: Iterable[str], overwrite: bool) -> OutputFile:
    """Return where to write, once it is known that a file may be written there.

    Raises:
        OutputError: the name's ending is of a format that is not written, the file is an input of the job, it exists
            and `overwrite` is not given, or its folder cannot be written.
    """
    if not name.lower().endswith(ENDINGS):
        raise OutputError(f"{name}: answers are written as Parquet; end the name in {' or '.join(ENDINGS)}")
    file = _locate(name)
    try:
        info = file.filesystem.get_file_info(file.path)
    except OSError as error:
        raise OutputError(f"{name}: cannot be reached: {_reason(error)}") from error
    if info.type is not fs.FileType.NotFound:
        _check_replaceable(file, info, input_files, overwrite)
    elif file.is_local:
        folder = Path(file.path).parent
        if not folder.is_dir():
            raise OutputError(f"{name}: there is no folder {folder}; make it first")
    return file


def _check_replaceable(file: OutputFile, info: fs.FileInfo, input_files: Iterable[str], overwrite: bool) -> None:
    if info.type is fs.FileType.Directory:
        raise OutputError(f"{file.name}: is a folder; name a file in it")
    if any(_is_same(file, other) for other in input_files):
        raise OutputError(f"{file.name}: is an input of this job; write the answers to another file")
    if not info.is_file:
        raise OutputError(f"{file.name}: is no file that could be replaced")
    if not overwrite:
        raise OutputError(f"{file.name}: exists; name another file, or replace this one with overwrite (--overwrite)")


def write_parquet(file: OutputFile, schema: pa.Schema, batches: Iterable[pa.RecordBatch], overwrite: bool) -> int:
    """Write the batches, and put the file in its place when it is whole; returns how many rows it has.

    Raises OutputError when it cannot be written; then nothing of it is left.
    """
    written = 0
    with (
        _partial_file(file, overwrite) as partial,
        file.filesystem.open_output_stream(partial) as sink,
        pq.ParquetWriter(sink, schema, compression="zstd") as writer,
    ):
        for batch in batches:
            writer.write_batch(batch)
            written += batch.num_rows
    return written


@contextmanager
def _partial_file(file: OutputFile, overwrite: bool) -> Iterator[str]:
    """A name of this export alone beside the file's, hidden from those who read the folder; moved at the end."""
    folder, _, name = file.path.rpartition("/")
    partial = f"{folder}/.{name[:100]}.{uuid4().hex[:12]}.partial"
    try:
        yield partial
        _put_in_place(file, partial, overwrite)
    except OSError as error:
        raise OutputError(f"{file.name}: cannot be written: {_reason(error)}") from error
    finally:
        with suppress(OSError):
            if file.filesystem.get_file_info(partial).is_file:
                file.filesystem.delete_file(partial)


def _put_in_place(file: OutputFile, partial: str, overwrite: bool) -> None:
    if not overwrite and file.is_local:
        # A move would replace what was made since one looked; a link does not. Some filesystems have none.
        with suppress(OSError):
            os.link(partial, file.path)
            return
    if not overwrite and file.filesystem.get_file_info(file.path).type is not fs.FileType.NotFound:
        raise OutputError(f"{file.name}: was made by someone else meanwhile; it is left as it is")
    file.filesystem.move(partial, file.path)


def _locate(name: str) -> OutputFile:
    try:
        # Not as a job's input: who exports chooses the endpoint, too.
        filesystem, path = open_url(name) if is_url(name) else open_input(str(Path(name).expanduser().absolute()))
    except (LayaBatchError, RuntimeError) as error:  # RuntimeError: there is no such home folder
        raise OutputError(str(error)) from error
    if isinstance(filesystem, fs.LocalFileSystem):
        path = os.path.realpath(path)
    if not is_utf8(path):
        raise OutputError(f"{printable(path)}: the path is not UTF-8; write to another")
    return OutputFile(name, filesystem, path)


def _is_same(file: OutputFile, input_file: str) -> bool:
    """Whether an input is this file, under whatever name: a link, another spelling, the same object of a store."""
    local = local_path(input_file)
    if (local is not None) != file.is_local:
        return False  # without opening the input's filesystem, which may be out of reach
    if local is None:
        filesystem, path = open_input(input_file)
        return bool(filesystem.type_name == file.filesystem.type_name and path == file.path)
    try:
        return Path(local).samefile(file.path)
    except OSError:  # the input is gone
        return False


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
