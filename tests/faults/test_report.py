"""The table of faults: added up, and put between the marks of a page."""

from pathlib import Path

from tests.faults.report import BEGIN, END, FaultReport


def test_a_fault_that_struck_twice_is_one_line_and_the_page_around_it_stays(tmp_path: Path) -> None:
    report = FaultReport()
    for wait in (2.0, None, 5.5):
        report.record("worker killed", times=1, rows=1000, lost=0, doubled=0, rescored=7, recover_s=wait)
    report.record("other", times=1, rows=1, lost=0, doubled=0, rescored=0, recover_s=None)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    report.write_into(page)
    report.write_into(page)
    assert page.read_text().splitlines() == [
        "before",
        BEGIN,
        "",
        "| fault | times | rows | lost | doubled | rescored | seconds to recover |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| worker killed | 3 | 3,000 | 0 | 0 | 21 | 5.5 |",
        "| other | 1 | 1 | 0 | 0 | 0 | – |",
        "",
        END,
        "after",
    ]
