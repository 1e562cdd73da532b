"""Draw what `bench_engine.py` measured by the length of a row: full batches, and single rows, beside peer and ceiling.

    python benchmarks/plot_engine.py benchmarks/results/h200-engine.jsonl --out docs/performance.svg

Left, tokens per second of as many rows as a batch takes, and what the matrix products alone would allow at the rate
that the same run measured; right, milliseconds of one row.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes


def curves(lines: list[dict[str, Any]], rows: str, value: str) -> dict[str, list[tuple[int, float]]]:
    """Backend to its points (tokens of a row, `value`), short rows first, of one row or of the most: "one", "most"."""
    grid = [line for line in lines if line["workload"] == "grid"]
    most: dict[tuple[str, int], int] = {}
    for line in grid:
        place = line["backend"], line["row_tokens"]
        most[place] = max(most.get(place, 0), line["rows"])
    found: dict[str, list[tuple[int, float]]] = {}
    for line in grid:
        if line["rows"] == (1 if rows == "one" else most[line["backend"], line["row_tokens"]]):
            found.setdefault(line["backend"], []).append((line["row_tokens"], line[value]))
    return {backend: sorted(points) for backend, points in found.items()}


def draw_curves(axes: Axes, drawn: dict[str, list[tuple[int, float]]], title: str) -> None:
    for index, (backend, points) in enumerate(drawn.items()):
        axes.plot(*zip(*points, strict=True), color=f"C{index}", marker="o", markersize=4, label=backend)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("tokens of a row")
    axes.set_title(title, fontsize=10)


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "laya"}  # text as text, and the same file again
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4.2), layout="constrained")
    draw_curves(left, curves(lines, "most", "tokens_per_s"), "tokens per second, full batches")
    ceiling = next(line["tokens_per_s"] / line["matmul_share"] for line in lines if line.get("matmul_share"))
    left.axhline(ceiling, color="black", linewidth=1)
    left.text(0.02, ceiling, "matrix products alone", va="bottom", transform=left.get_yaxis_transform())
    left.set_ylim(0, ceiling * 1.1)
    left.yaxis.set_major_formatter("{x:,.0f}")
    draw_curves(right, curves(lines, "one", "ms"), "milliseconds, one row")
    right.set_ylim(0)
    figure.suptitle(f"{lines[0]['device']}, {lines[0]['dtype']}, torch {lines[0]['torch']}", fontsize=11)
    names, labels = left.get_legend_handles_labels()
    figure.legend(names, labels, fontsize=9, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=argparse.FileType(encoding="utf-8"), help="JSON lines of one bench_engine run")
    parser.add_argument("--out", type=Path, required=True, help="the picture: .svg or .png")
    options = parser.parse_args()
    if options.out.suffix not in (".svg", ".png") or not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: expected a .svg or .png in a folder that exists")
    try:
        lines = [json.loads(line) for line in options.results]
    except ValueError as error:
        parser.error(f"{options.results.name}: not JSON lines: {error}")
    if not any(line.get("workload") == "grid" for line in lines):
        parser.error(f"{options.results.name} has no line of bench_engine.py's grid")
    draw(lines, options.out)


if __name__ == "__main__":
    main()
