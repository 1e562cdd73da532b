"""Times each kernel against the same work in torch on one CUDA device, at the large shape (d 1024, I 2624, 16 heads).

    python benchmarks/bench_kernels.py --tokens 65536 16384 --out kernels.jsonl

Prints a table and writes one JSON line a measurement: median milliseconds, the rate, and its share of the ceiling
(a large copy, a large bf16 product) measured in the same run. A kernel and the library's way take turns of calls in a
row, as they come in a forward pass: a card that is held to its power runs all of them slower than one call alone.
"""

import argparse
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of PyTorch knows
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from laya import tl_kernels
from laya.attention import rotary_table
from laya.tl_kernels import reference
from laya.tl_kernels.arguments import capability
from laya.tl_kernels.tiles import tiles_for
from laya.tl_kernels.tune import medians_ms

WIDTH, INTERMEDIATE, HEADS, HEAD_WIDTH, REACH = 1024, 2624, 16, 64, 64
LONGEST = 1024  # tokens
HALF_BYTES, FLOAT_BYTES = 2, 4
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """One kernel's work: how to do it here, in torch, and through the library a reader would compare with."""

    kernel: str
    ours: Callable[[], object]
    torch: Callable[[], object]
    library: tuple[str, Callable[[], object]] | None
    flop: float = 0.0  # of matrix products; 0 for work bound by bandwidth
    moved_bytes: float = 0.0


@dataclass(frozen=True)
class Measurement:
    """One line of output. `share` is of the matrix ceiling for products, of the copy ceiling for the rest."""

    kernel: str
    implementation: str
    tokens: int
    median_ms: float
    tflop_per_s: float | None
    tb_per_s: float | None
    share: float
    device: str
    torch: str
    tilelang: str


def ceilings() -> tuple[float, float]:
    """TFLOP/s of a large bf16 product and TB/s of a large copy (read and written bytes), on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    source = torch.randint(256, (2**31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    product, copy = medians_ms([lambda: a @ b, lambda: target.copy_(source)])
    return 2 * 8192**3 / product / 1e9, 2 * 2**31 / copy / 1e9


def lengths(tokens: int) -> list[int]:
    """Sequence lengths with a long tail, as rows of short texts have (median 134, most below 500): `tokens` in all."""
    found: list[int] = []
    while (left := tokens - sum(found)) > 0:
        found.append(min(left, int(torch.exp(torch.randn(()) * 0.6 + 4.9).clamp(16, LONGEST))))
    return found


def cases(tokens: int) -> Iterator[Case]:
    """Every kernel at `tokens` tokens, bf16, random inputs."""

    def half(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device="cuda") * scale).bfloat16()

    x, wide = half(tokens, WIDTH), half(tokens, INTERMEDIATE)
    for name, inputs, weight in (
        ("gemm QKV", x, half(3 * WIDTH, WIDTH, scale=0.03)),
        ("gemm Wo", x, half(WIDTH, WIDTH, scale=0.03)),
        ("gemm MLP out", wide, half(WIDTH, INTERMEDIATE, scale=0.02)),
    ):
        yield Case(
            name,
            lambda i=inputs, w=weight: tl_kernels.gemm(i, w),
            lambda i=inputs, w=weight: reference.gemm(i, w),
            ("cuBLAS", lambda i=inputs, w=weight: F.linear(i, w)),
            flop=2.0 * tokens * weight.numel(),
        )
    gated = half(2 * INTERMEDIATE, WIDTH, scale=0.03)

    def eager_geglu() -> Tensor:
        value, gate = F.linear(x, gated).chunk(2, dim=-1)
        return F.gelu(value) * gate

    yield Case(
        "gemm_geglu",
        lambda: tl_kernels.gemm_geglu(x, gated),
        eager_geglu,
        ("cuBLAS, product alone", lambda: F.linear(x, gated)),
        flop=2.0 * tokens * gated.numel(),
    )
    hidden, weight = torch.randn(tokens, WIDTH, device="cuda"), torch.ones(WIDTH, device="cuda")
    yield Case(
        "add_ln",
        lambda: tl_kernels.add_ln(hidden, x, weight, None, EPS, torch.bfloat16),
        lambda: reference.add_ln(hidden, x, weight, None, EPS, torch.bfloat16),
        None,
        moved_bytes=tokens * WIDTH * (2 * FLOAT_BYTES + 2 * HALF_BYTES),
    )
    yield from attention_cases(half(tokens, 3, HEADS, HEAD_WIDTH), x, half(3 * WIDTH, WIDTH, scale=0.03))


def attention_cases(qkv: Tensor, x: Tensor, weight: Tensor) -> Iterator[Case]:
    """Rotary positions and attention over qkv (T, 3, 16, 64), which x (T, 1024) and weight (3072, 1024) might make."""
    tokens = len(qkv)
    rows = lengths(tokens)
    offsets = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    positions = torch.cat([torch.arange(row) for row in rows]).int().cuda()
    table = rotary_table(LONGEST, HEAD_WIDTH, 10_000.0).cuda()
    longest = max(rows)
    yield Case(
        "rope",
        lambda: tl_kernels.rope(qkv, positions, table, longest),
        lambda: reference.rope(qkv, positions, table, longest),
        None,
        moved_bytes=2 * tokens * 2 * WIDTH * HALF_BYTES,
    )
    if (tile := tiles_for(capability(qkv.device)).qkv) is not None:
        yield Case(
            "gemm_rope",
            lambda: tl_kernels.gemm_rope(x, weight, positions, table, longest, tile),
            lambda: reference.gemm_rope(x, weight, positions, table, longest),
            ("cuBLAS, then rope", lambda: tl_kernels.rope(F.linear(x, weight).view_as(qkv), positions, table, longest)),
            flop=2.0 * tokens * weight.numel(),
        )
    for reach in (None, REACH):
        seen = sum(
            row * row if reach is None else sum(min(i + reach, row - 1) - max(i - reach, 0) + 1 for i in range(row))
            for row in rows
        )
        window = (-1, -1) if reach is None else (reach, reach)
        yield Case(
            f"attn, {'full' if reach is None else f'reach {reach}'}",
            lambda reach=reach: tl_kernels.attn(qkv, offsets, longest, reach),
            lambda reach=reach: reference.attn(qkv, offsets, longest, reach),
            (
                "varlen_attn",
                lambda window=window: varlen_attn(
                    *qkv.unbind(1), offsets, offsets, longest, longest, window_size=window
                ),
            ),
            flop=4.0 * seen * WIDTH,
        )


def measure(tokens: int, matrix_tflop: float, copy_tb: float) -> Iterator[Measurement]:
    """Every case and implementation at `tokens` tokens."""
    import tilelang  # noqa: PLC0415 - for its version alone

    for case in cases(tokens):
        runs = {"TileLang": case.ours} | dict([case.library] if case.library else [])
        times = dict(zip(runs, medians_ms([*runs.values()]), strict=True))
        # The reference is no rival, and its attention is slow enough to be measured by itself.
        times["torch"] = medians_ms([case.torch], rounds=3, calls=1)[0]
        for implementation, spent_ms in times.items():
            tflop = case.flop / spent_ms / 1e9 if case.flop else None
            tb = case.moved_bytes / spent_ms / 1e9 if case.moved_bytes else None
            yield Measurement(
                case.kernel,
                implementation,
                tokens,
                round(spent_ms, 4),
                tflop,
                tb,
                (tflop / matrix_tflop) if tflop else (tb or 0) / copy_tb,
                torch.cuda.get_device_name(),
                torch.__version__,
                tilelang.__version__,
            )


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description="Time the TileLang kernels against torch.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[65_536, 16_384])
    parser.add_argument("--out", type=Path, default=Path("kernels.jsonl"), help="where the JSON lines go")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("these kernels run on a CUDA device, and torch finds none")
    matrix_tflop, copy_tb = ceilings()
    table = Table(title=f"{torch.cuda.get_device_name()}: {matrix_tflop:.0f} TFLOP/s, {copy_tb:.2f} TB/s")
    for column in ("tokens", "kernel", "implementation", "ms", "rate", "share"):
        table.add_column(column, justify="left" if column in ("kernel", "implementation") else "right")
    with arguments.out.open("w", encoding="utf-8") as lines:
        for tokens in arguments.tokens:
            for one in measure(tokens, matrix_tflop, copy_tb):
                rate = f"{one.tflop_per_s:.0f} TFLOP/s" if one.tflop_per_s else f"{one.tb_per_s:.2f} TB/s"
                cells = (str(tokens), one.kernel, one.implementation, f"{one.median_ms:.3f}", rate, f"{one.share:.0%}")
                table.add_row(*cells)
                record = asdict(one) | {"matrix_tflop_per_s": matrix_tflop, "copy_tb_per_s": copy_tb}
                lines.write(json.dumps(record | {"python": platform.python_version()}) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
