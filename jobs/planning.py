"""From input names to shards: reads the footers of the files, refuses what cannot be scored, divides rows.

Reads no rows: `worker.parquet` does. Which files there are is `discovery`'s, what their columns may be `columns`'.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.columns import ColumnTypes, check_same_types, needed_types
from jobs.discovery import describe_other, find_files
from jobs.errors import InputError
from jobs.locations import Roots, open_input, short_error
from jobs.unique_ids import check_unique_ids
from schemas.job import InputFile, JobFile, JobPlan, JobSpec, ShardPlan

FOOTERS_AT_ONCE = 16  # each is a wait for a disk or a network
MAX_FILES_PER_SHARD = 256  # each takes a worker some milliseconds to open, or from an object store some hundreds


@dataclass(frozen=True)
class _Footer:
    """What planning keeps of a file's footer, which may be large: the columns that the job reads, and its rows."""

    types: ColumnTypes
    row_counts: list[int]  # of each row group


def plan_job(spec: JobSpec, rows_per_shard: int, roots: Roots) -> JobPlan:
    """Check every file's footer against what the job needs, and divide its rows.

    Files come in the order given, a folder's or glob's in the order of their names. `roots`: when not empty, every file
    must lie under one of them.

    Raises:
        InputError: naming the file and what is wrong with it.
    """
    files = find_files(spec.inputs, roots)
    with ThreadPoolExecutor(FOOTERS_AT_ONCE, "footers") as threads:
        footers = list(threads.map(lambda file: _read_footer(file, spec, roots), files))
    check_same_types([(file.name, footer.types) for file, footer in zip(files, footers, strict=True)])
    rows = [sum(footer.row_counts) for footer in footers]
    firsts = accumulate(rows, initial=0)
    planned = [JobFile(*astuple(file), *of_job) for file, *of_job in zip(files, rows, firsts, strict=False)]
    if spec.unique_ids and spec.row_id is not None:
        check_unique_ids(spec.row_id, planned, roots)
    return JobPlan(planned, divide_rows([footer.row_counts for footer in footers], rows_per_shard))


def _read_footer(file: InputFile, spec: JobSpec, roots: Roots) -> _Footer:
    filesystem, path = open_input(file.name, roots)
    try:
        with filesystem.open_input_file(path) as source:
            metadata = pq.read_metadata(source)
    except (OSError, pa.ArrowException) as error:
        what = describe_other(filesystem, path, file.name) or f"is not a readable Parquet file: {short_error(error)}"
        raise InputError(f"{file.name}: {what}") from error
    types = needed_types(file.name, metadata.schema.to_arrow_schema(), spec)
    return _Footer(types, [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)])


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
