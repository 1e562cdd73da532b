"""Rows of a job from its Parquet files, some at a time. Owns how files are opened and how far ahead they are read.

Knows nothing of states: `worker.states` makes them of the rows.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from jobs.discovery import identify
from jobs.errors import InputError, UnreadableInputError
from jobs.locations import Roots, check_root, open_input, short_error
from schemas.job import JobFile, ShardPlan

# Bytes of each column that are read at once. Without a limit a reader holds all columns of a whole row group.
LOCAL_READ_BYTES = 2**20
REMOTE_READ_BYTES = 8 * 2**20  # each read is a request, and waits for its answer


class ForwardReader:
    """Reads files from the front to the back, and keeps the last one open between shards.

    A Parquet row group can be read from its first row only. A worker that scores one shard of a large row group and
    then the next goes on where it stopped, so that the group is read once and not once for each shard.
    """

    def __init__(self, rows_at_once: int) -> None:
        """`rows_at_once`: rows of a batch, at most. A small file may hold immense rows."""
        self._rows_at_once = rows_at_once
        self._opened: tuple[JobFile, list[str]] | None = None
        self._file: _OpenFile | None = None

    def read(self, plan: ShardPlan, columns: list[str], roots: Roots) -> Iterator[tuple[JobFile, int, pa.RecordBatch]]:
        """Yield the plan's rows in order: the file, the number of the first row within the job, and the rows.

        Raises:
            InputError: a file is gone, has changed since the job was submitted, or lies outside the roots.
            UnreadableInputError: a file cannot be read.
        """
        for file in plan.files:
            first = max(plan.first_row_number, file.first_row_number)
            rows = min(plan.first_row_number + plan.rows, file.first_row_number + file.rows) - first
            if rows <= 0:
                continue
            check_root(file.name, roots)
            _check_unchanged(file, roots)
            try:
                for batch in self._open(file, columns, roots).read(first - file.first_row_number, rows):
                    yield file, first, batch
                    first, rows = first + batch.num_rows, rows - batch.num_rows
            except (OSError, pa.ArrowException) as error:
                self.close()
                raise UnreadableInputError(f"{file.name}: cannot be read: {short_error(error)}") from error
            _check_unchanged(file, roots)
            if rows:
                raise InputError(f"{file.name}: ends {rows} rows before its shard does")

    def close(self) -> None:
        """Close the file that is open, if any."""
        if self._file is not None:
            self._file.close()
        self._opened = self._file = None

    def _open(self, file: JobFile, columns: list[str], roots: Roots) -> "_OpenFile":
        if self._file is None or self._opened != (file, columns):
            self.close()
            self._file = _OpenFile(open_input(file.name, roots), columns, self._rows_at_once)
            self._opened = (file, columns)
        return self._file


class _OpenFile:
    """One open file, and how far it has been read."""

    def __init__(self, where: tuple[fs.FileSystem, str], columns: list[str], rows_at_once: int) -> None:
        filesystem, path = where
        self._source = filesystem.open_input_file(path)
        buffer_bytes = LOCAL_READ_BYTES if isinstance(filesystem, fs.LocalFileSystem) else REMOTE_READ_BYTES
        self._parquet = pq.ParquetFile(self._source, pre_buffer=False, buffer_size=buffer_bytes)
        self._columns = columns
        self._rows_at_once = rows_at_once
        metadata = self._parquet.metadata
        groups = range(metadata.num_row_groups)
        self._group_starts = list(accumulate((metadata.row_group(i).num_rows for i in groups), initial=0))
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None  # of the last batch, what has not been asked for yet
        self._position = self._group_starts[-1]  # the row that comes next

    def read(self, start: int, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield `rows` rows from row `start` of the file on; fewer where the file ends."""
        if not self._group_starts[self._group_of(start)] <= self._position <= start:
            self._start_at(self._group_of(start))
        while rows and (batch := self._rest or next(self._batches, None)) is not None:
            skipped = min(start - self._position, batch.num_rows)
            taken = batch.slice(skipped, rows)
            self._position += skipped + taken.num_rows
            rest = batch.slice(skipped + taken.num_rows)
            self._rest = rest if rest.num_rows else None
            start, rows = start + taken.num_rows, rows - taken.num_rows
            if taken.num_rows:
                yield taken

    def close(self) -> None:
        """Close the file."""
        self._batches, self._rest = iter(()), None
        self._source.close()

    def _group_of(self, row: int) -> int:
        return bisect_right(self._group_starts, row) - 1

    def _start_at(self, group: int) -> None:
        groups = range(group, len(self._group_starts) - 1)
        self._batches = self._parquet.iter_batches(self._rows_at_once, groups, self._columns, use_threads=False)
        self._rest, self._position = None, self._group_starts[group]


def _check_unchanged(file: JobFile, roots: Roots) -> None:
    now = identify(file.name, roots)
    if (now.size, now.modified) != (file.size, file.modified):
        raise InputError(
            f"{file.name}: has changed since the job was submitted ({file.size} bytes then, {now.size} now); "
            "submit it as a new job"
        )
