"""Draw what `bench_engine.py` measured: tokens per second by the length of a row, beside the peer and the ceiling.

    python benchmarks/plot_engine.py benchmarks/results/h200-engine.jsonl --out docs/performance.svg

A line for each backend and number of rows; level lines for the bulk workload of the public package and for what the
matrix products alone would allow, at the rate that the same run measured.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

STYLES = {1: ":", 8: "-.", 64: "--", 512: "-"}  # by rows


def curves(lines: Iterable[dict[str, Any]]) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """(backend, rows) to its points (tokens of a row, tokens per second), short rows first."""
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for line in lines:
        if line["workload"] == "grid":
            found.setdefault((line["backend"], line["rows"]), []).append((line["row_tokens"], line["tokens_per_s"]))
    return {key: sorted(points) for key, points in found.items()}


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "laya"}  # text as text, and the same file again
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    drawn = curves(lines)
    colours = {backend: f"C{i}" for i, backend in enumerate(dict.fromkeys(backend for backend, _ in drawn))}
    for (backend, rows), points in drawn.items():
        label = f"{backend}, {rows} row{'s' if rows > 1 else ''}"
        axes.plot(
            *zip(*points, strict=True),
            STYLES.get(rows, "-"),
            color=colours[backend],
            marker="o",
            markersize=4,
            label=label,
        )
    peer = max((line["tokens_per_s"] for line in lines if line["backend"].startswith("public package")), default=None)
    if peer is not None:
        axes.axhline(peer, color="0.4", linewidth=1)
        axes.text(0.01, peer, "public package, bulk workload", va="bottom", transform=axes.get_yaxis_transform())
    ceiling = next(line["tokens_per_s"] / line["matmul_share"] for line in lines if line.get("matmul_share"))
    axes.axhline(ceiling, color="black", linewidth=1)
    axes.text(0.01, ceiling, "matrix products alone", va="bottom", transform=axes.get_yaxis_transform())
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, ceiling * 1.1)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens of a row")
    axes.set_ylabel("tokens per second")
    axes.set_title(f"{lines[0]['device']}, {lines[0]['dtype']}, torch {lines[0]['torch']}")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="the picture: .svg or .png")
    options = parser.parse_args()
    lines = [json.loads(line) for path in options.results for line in path.read_text(encoding="utf-8").splitlines()]
    draw(lines, options.out)


if __name__ == "__main__":
    main()
