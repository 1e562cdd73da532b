"""Whether each row of the inputs has an id, and no two the same: read before a job is queued, where that is asked."""

from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.discovery import partition_values
from jobs.errors import InputError, UnreadableInputError
from jobs.locations import Roots, open_input, short_error
from jobs.values import id_texts
from schemas.job import JobFile

FILES_AT_ONCE = 4
_READ_ROWS = 10_000


def check_unique_ids(column: str, files: list[JobFile], roots: Roots) -> None:
    """Raise InputError, naming rows, unless each row of the files has an id that no other has.

    Holds the ids of all files in memory, as text.
    """
    with ThreadPoolExecutor(FILES_AT_ONCE, "ids") as threads:
        chunks = list(threads.map(lambda file: _read_ids(column, file, roots), files))
    ids = pa.chunked_array(chunks, pa.large_string())
    problems = []
    if ids.null_count:
        problems.append(f"{ids.null_count:,} rows have no id, the first is {_place(files, _first(pc.is_null(ids)))}")
    counted = pc.value_counts(ids.drop_null())
    shared = counted.filter(pc.greater(counted.field("counts"), 1))
    if len(shared):
        example = shared.field("values")[0]
        here = pc.equal(ids, example).fill_null(False)
        first = _first(here)
        second = first + 1 + _first(here.slice(first + 1))
        problems.append(
            f"{len(shared):,} ids come more than once, as {example.as_py()!r} in {_place(files, first)} and "
            f"{_place(files, second)}"
        )
    if problems:
        raise InputError(f"row id column {column!r} is not unique: {'; '.join(problems)} (rows are counted from 0)")


def _read_ids(column: str, file: JobFile, roots: Roots) -> pa.Array:
    """Return the ids of a file as text; None where there is none, or none that can be read."""
    filesystem, path = open_input(file.name, roots)
    try:
        with filesystem.open_input_file(path) as source, pq.ParquetFile(source) as parquet:
            if column not in parquet.schema_arrow.names:
                return pa.repeat(pa.scalar(partition_values(file.name)[column], pa.large_string()), file.rows)
            texts = [
                text if isinstance(text, str) else None
                for batch in parquet.iter_batches(_READ_ROWS, columns=[column], use_threads=False)
                for text in id_texts(batch.column(column))
            ]
    except (OSError, pa.ArrowException) as error:
        raise UnreadableInputError(f"{file.name}: cannot be read: {short_error(error)}") from error
    return pa.array(texts, pa.large_string())


def _first(mask: pa.ChunkedArray) -> int:
    return int(pc.index(mask, True).as_py())


def _place(files: list[JobFile], row: int) -> str:
    file = files[bisect_right([file.first_row_number for file in files], row) - 1]
    return f"row {row - file.first_row_number:,} of {file.name}"
