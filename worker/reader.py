"""From a shard's rows in Parquet to windows of states. Owns how many rows are held at once."""

from collections.abc import Iterator

from jobs.columns import needed_columns
from jobs.locations import Roots
from schemas.job import Claim
from worker.parquet import ForwardReader
from worker.states import Window, add_folders, add_rows, read_id

READ_ROWS = 16  # decoded at once: a file of a kilobyte may hold rows of a hundred megabytes, and few are enough
WINDOW_BYTES = 32 * 2**20  # a window that holds more takes no further rows; three windows are in memory at once


def read_windows(
    claim: Claim, roots: Roots, rows_per_window: int, reader: ForwardReader | None = None
) -> Iterator[Window]:
    """Read a shard's rows, some at a time: at most `rows_per_window`, and fewer of large ones.

    `reader`: the one that read the worker's shard before, which may stand where this one begins.

    Raises:
        InputError: the file is gone, has changed since the job was submitted, or lies outside the roots.
    """
    spec, window, held_bytes = claim.spec, Window([], [], [], [], []), 0
    columns = needed_columns(spec)
    reader = reader or ForwardReader(min(READ_ROWS, rows_per_window))
    for file, first_row_number, rows in reader.read(claim.plan, columns, roots):
        if held_bytes > WINDOW_BYTES or len(window) + rows.num_rows > rows_per_window:
            yield window
            window, held_bytes = Window([], [], [], [], []), 0
        held_bytes += add_rows(window, spec, add_folders(rows, columns, file.name), first_row_number)
    if len(window):
        yield window


def read_row_id(claim: Claim, roots: Roots) -> str | None:
    """Return the caller's id of the claim's first row; its state, which may be what kills, is not read."""
    if claim.spec.row_id is None:
        return None
    columns = [claim.spec.row_id]
    for file, _, rows in ForwardReader(1).read(claim.plan, columns, roots):
        return read_id(add_folders(rows, columns, file.name).column(0))
    return None
