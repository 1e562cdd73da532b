"""Times each kernel against the same work in torch on one CUDA device, at the large shape (d 1024, I 2624, 16 heads).

    python benchmarks/bench_kernels.py [--tokens 32768 2048] [--fp16] [--out kernels.jsonl]

Median milliseconds, the rate, and its share of the ceiling (a large copy, a large product) measured in the same run. A
kernel and its rivals take turns of calls in a row, as they come in a forward pass: a card that is held to its power
runs all of them slower than one call alone.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of PyTorch knows
from measuring import at_least_one, describe_run, publish, results_file
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from laya import tl_kernels
from laya.attention import rotary_table
from laya.operations import geglu
from laya.tl_kernels import reference
from laya.tl_kernels.arguments import capability
from laya.tl_kernels.tiles import tiles_for
from laya.tl_kernels.tune import medians_ms, recorded, recorded_medians_ms

WIDTH, INTERMEDIATE, HEADS, HEAD_WIDTH, REACH = 1024, 2624, 16, 64, 64
LONGEST = 1024  # tokens
HALF_BYTES, FLOAT_BYTES = 2, 4
EPS = 1e-5
COLUMNS = ["tokens", "kernel", "implementation", "ms", "tflop_per_s", "tb_per_s", "share"]


@dataclass(frozen=True)
class Case:
    """One kernel's work: how to do it here, in torch, and by what a reader would compare with."""

    kernel: str
    ours: Callable[[], object]
    torch: Callable[[], object]
    rivals: dict[str, Callable[[], object]] = field(default_factory=dict)
    flop: float = 0.0  # of matrix products; 0 for work bound by bandwidth
    moved_bytes: float = 0.0


def ceilings(dtype: torch.dtype) -> tuple[float, float]:
    """TFLOP/s of a large product and TB/s of a large copy (read and written bytes), on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(dtype) for _ in range(2))
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


def in_8_bits(x: Tensor, weight: Tensor) -> Callable[[], object]:
    """x times weight transposed as products of 8-bit floats, with a scale for each row and each column."""
    left, right = (tensor.to(torch.float8_e4m3fn) for tensor in (x, weight))
    scales = (torch.ones(len(x), 1, device="cuda"), torch.ones(1, len(weight), device="cuda"))
    return lambda: torch._scaled_mm(left, right.t(), *scales, out_dtype=torch.bfloat16)


def cases(tokens: int, dtype: torch.dtype) -> Iterator[Case]:
    """Every kernel at `tokens` tokens, random inputs."""

    def half(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device="cuda") * scale).to(dtype)

    def rivals(inputs: Tensor, weight: Tensor, name: str) -> dict[str, Callable[[], object]]:
        found: dict[str, Callable[[], object]] = {name: lambda: F.linear(inputs, weight)}
        if dtype is torch.bfloat16 and torch.cuda.get_device_capability() >= (8, 9):
            found["8 bits, product alone"] = in_8_bits(inputs, weight)
        return found

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
            rivals(inputs, weight, "cuBLAS"),
            flop=2.0 * tokens * weight.numel(),
        )
    gated = half(2 * INTERMEDIATE, WIDTH, scale=0.03)

    yield Case(
        "gemm_geglu",
        lambda: tl_kernels.gemm_geglu(x, gated),
        lambda: geglu(F.linear(x, gated)),
        rivals(x, gated, "cuBLAS, product alone"),
        flop=2.0 * tokens * gated.numel(),
    )
    hidden, weight = torch.randn(tokens, WIDTH, device="cuda"), torch.ones(WIDTH, device="cuda")
    yield Case(
        "add_ln",
        lambda: tl_kernels.add_ln(hidden, x, weight, None, EPS, dtype),
        lambda: reference.add_ln(hidden, x, weight, None, EPS, dtype),
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
        moved_bytes=2 * tokens * 2 * WIDTH * HALF_BYTES,
    )
    if (tile := tiles_for(capability(qkv.device)).qkv_of(tokens)) is not None:
        yield Case(
            "gemm_rope",
            lambda: tl_kernels.gemm_rope(x, weight, positions, table, longest, tile),
            lambda: reference.gemm_rope(x, weight, positions, table, longest),
            {
                "cuBLAS, then rope": lambda: tl_kernels.rope(
                    F.linear(x, weight).view_as(qkv), positions, table, longest
                ),
                "gemm, without the rotation": lambda: tl_kernels.gemm(x, weight),
            },
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
            {
                "varlen_attn": lambda window=window: varlen_attn(
                    *qkv.unbind(1), offsets, offsets, longest, longest, window_size=window
                )
            },
            flop=4.0 * seen * WIDTH,
        )


def measure(tokens: int, dtype: torch.dtype, matrix_tflop: float, copy_tb: float) -> Iterator[dict[str, Any]]:
    """Every case and implementation at `tokens` tokens; `share` is of the matrix ceiling for products, else of the
    copy's.
    """
    for case in cases(tokens, dtype):
        runs = {"TileLang": case.ours} | case.rivals
        times = dict(zip(runs, recorded_medians_ms([recorded(run) for run in runs.values()]), strict=True))
        # The reference is no rival, and its attention is slow enough to be measured by itself.
        times["torch"] = medians_ms([case.torch], rounds=3, calls=1)[0]
        for implementation, spent_ms in times.items():
            tflop = case.flop / spent_ms / 1e9 if case.flop else None
            tb = case.moved_bytes / spent_ms / 1e9 if case.moved_bytes else None
            yield {
                "kernel": case.kernel,
                "implementation": implementation,
                "dtype": str(dtype).removeprefix("torch."),
                "tokens": tokens,
                "ms": round(spent_ms, 4),
                "tflop_per_s": tflop and round(tflop, 1),
                "tb_per_s": tb and round(tb, 3),
                "share": round((tflop / matrix_tflop) if tflop else (tb or 0) / copy_tb, 3),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokens", type=at_least_one, nargs="+", default=[32_768, 2_048], help="of a batch (32768 2048)"
    )
    parser.add_argument("--fp16", action="store_true", help="measure fp16 instead of bf16")
    parser.add_argument("--commit", help="for the result, where there is no git")
    parser.add_argument("--out", type=results_file, help="append the JSON lines here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("these kernels run on a CUDA device, and torch finds none")
    dtype = torch.float16 if options.fp16 else torch.bfloat16
    matrix_tflop, copy_tb = ceilings(dtype)
    about = {"matrix_tflop_per_s": round(matrix_tflop, 1), "copy_tb_per_s": round(copy_tb, 3)}
    about |= describe_run(options.commit, torch.device("cuda"))
    lines = (line | about for tokens in options.tokens for line in measure(tokens, dtype, matrix_tflop, copy_tb))
    publish("Kernels", lines, COLUMNS, options.out)


if __name__ == "__main__":
    main()
