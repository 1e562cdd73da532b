"""What the faults cost: one line for each fault, drawn for the terminal and for `docs/reliability.md`.

Owns the table alone; `counting` counts the rows.
"""

from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

COLUMNS = ("fault", "times", "rows", "lost", "doubled", "rescored", "seconds to recover")
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"


@dataclass(frozen=True)
class FaultRecord:
    """What one fault did to the rows of the jobs that it struck.

    `recover_s` is the longest wait from the end of the fault (for a killed worker: from the kill) to the first sign
    that work goes on: an answer saved, or the worker's successor warm. None: there was nothing to wait for.
    """

    fault: str
    times: int  # how often it struck
    rows: int  # rows of the jobs that it struck
    lost: int  # rows with a question that has neither answer nor error
    doubled: int  # (row, question) pairs with two answers, or counted twice in the batches
    rescored: int  # sequences scored again, or scored in vain
    recover_s: float | None

    def cells(self) -> tuple[str, ...]:
        recovered = "–" if self.recover_s is None else f"{self.recover_s:.1f}"
        counts = (self.times, self.rows, self.lost, self.doubled, self.rescored)
        return (self.fault, *(f"{count:,}" for count in counts), recovered)


@dataclass
class FaultReport:
    """The records of a session, in the order in which they came."""

    records: list[FaultRecord] = field(default_factory=list)

    def record(
        self, fault: str, *, times: int, rows: int, lost: int, doubled: int, rescored: int, recover_s: float | None
    ) -> None:
        """Note what a fault cost. A fault that struck before is added to: counts are summed, the longest wait stays."""
        new = FaultRecord(fault, times, rows, lost, doubled, rescored, recover_s)
        for i, old in enumerate(self.records):
            if old.fault == fault:
                waits = [wait for wait in (old.recover_s, recover_s) if wait is not None]
                new = FaultRecord(
                    fault,
                    old.times + times,
                    old.rows + rows,
                    old.lost + lost,
                    old.doubled + doubled,
                    old.rescored + rescored,
                    max(waits, default=None),
                )
                self.records[i] = new
                return
        self.records.append(new)

    def draw(self) -> Table:
        """The table for a terminal."""
        table = Table(*COLUMNS, title="Faults", title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        for record in self.records:
            table.add_row(*record.cells())
        return table

    def markdown(self) -> str:
        """The same table as Markdown."""
        lines = [COLUMNS, ("---", *("---:" for _ in COLUMNS[1:])), *(record.cells() for record in self.records)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def write_into(self, page: Path) -> None:
        """Replace the table between the page's two marks."""
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{BEGIN}\n\n{self.markdown()}\n\n{END}{after}", encoding="utf-8")
