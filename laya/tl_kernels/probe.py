# mypy: disable-error-code="valid-type, name-defined, untyped-decorator"
# TileLang reads a program's buffer shapes from its annotations, which are calls and not types.
"""What TileLang's targets other than CUDA make of these kernels: `python -m laya.tl_kernels.probe`. Needs no GPU.

Every row of the three tables is an attempt made here and now, beside the answer that TileLang 0.1.14 was recorded with.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from laya.tl_kernels import add_ln_kernel, attn_kernel, gemm_geglu_kernel, gemm_kernel, rope_kernel
from laya.tl_kernels.kernel import language, tilelang

RECORDED_VERSION = "0.1.14"
WIDTH = 140  # columns of the terminal; messages fold
RECORDED_FILL = "CPU fill only supports local and global buffers, but got dst scope local.fragment"


@dataclass(frozen=True)
class Attempt:
    """One program on one target: what it uses that may not be there, what 0.1.14 said, and what came of it now."""

    name: str
    construct: str
    recorded: str
    found: str

    @property
    def same(self) -> bool:
        """Whether the recorded words are in what was found, quotation marks aside."""
        return self.recorded.casefold() in self.found.replace("`", "").casefold()


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what the compilers write to the process's standard error and output."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [(stream, os.dup(stream)) for stream in (1, 2)]
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream, _ in saved:
            os.dup2(nothing, stream)
        yield
    finally:
        for stream, copy in saved:
            os.dup2(copy, stream)
            os.close(copy)
        os.close(nothing)


def answer(program: Any, target: str, check: Callable[[Any], bool] | None = None) -> str:
    """What compiling `program` for `target` came to, in one line; `check` runs what was compiled."""
    try:
        with quiet():
            compiled = tilelang().compile(program, target=target)
            right = check(compiled) if check else None
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises is the answer
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = [line for line in lines if "error:" in line] or lines or [type(error).__name__]
        blamed = [line.partition("|")[2].strip() for line in lines if "T.alloc_" in line]
        return f"{told[0]} at {blamed[0]}" if blamed else told[0]
    return "compiles" if right is None else "runs, and is right" if right else "runs, and is wrong"


def targets() -> list[Attempt]:
    """An elementwise program on each target that might have meant the CPU."""
    program, check = elementwise()
    return [
        Attempt("cpu", "", "Target cpu is not supported", answer(program, "cpu")),
        Attempt("llvm", "", "Cannot find global function target.build.llvm", answer(program, "llvm")),
        Attempt("c", "", "runs", answer(program, "c", check)),
    ]


def kernels() -> list[Attempt]:
    """Each kernel on the C target, at the sizes of the multilingual checkpoint."""
    rows: list[tuple[str, Any, str, str]] = [
        ("gemm_kernel", gemm_kernel(768, 768), "T.alloc_fragment accumulator", RECORDED_FILL),
        ("gemm_geglu_kernel", gemm_geglu_kernel(1152, 768), "T.alloc_fragment accumulator", RECORDED_FILL),
        ("add_ln_kernel", add_ln_kernel(768), "T.reduce_sum over fragments", "CPU reduce only supports local src"),
        ("rope_kernel", rope_kernel(12, 64), "bf16 tensors", "Cannot convert type bfloat16 to C type"),
        ("attn_kernel", attn_kernel(12, 64), "fragments", "alloc_fragment"),
    ]
    return [
        Attempt(name, construct, recorded, answer(kernel.prim_func, "c")) for name, kernel, construct, recorded in rows
    ]


def accepted() -> list[Attempt]:
    """What the C target was recorded to accept."""
    rows = (
        ("elementwise float32", "T.Parallel", elementwise),
        ("pipelined loop", "T.Pipelined", pipelined),
        ("matrix product", "T.gemm, T.alloc_local accumulator", local_product),
        ("elementwise bfloat16", "bf16 tensors", bfloat16),
    )
    found = [(name, construct, answer(program, "c", check)) for name, construct, (program, check) in made(rows)]
    recorded = {"elementwise bfloat16": "Cannot convert type bfloat16 to C type"}
    return [Attempt(name, construct, recorded.get(name, "runs"), told) for name, construct, told in found]


Check = Callable[[Any], bool]


def made(
    rows: tuple[tuple[str, str, Callable[[], tuple[Any, Check]]], ...],
) -> Iterator[tuple[str, str, tuple[Any, Check]]]:
    """The rows, their programs built."""
    for name, construct, build in rows:
        yield name, construct, build()


def doubles(dtype: torch.dtype) -> Check:
    """Whether a compiled program doubles 64 values."""

    def check(compiled: Any) -> bool:
        x = torch.randn(64).to(dtype)
        y = torch.full_like(x, float("nan"))
        compiled(x, y)
        return torch.equal(y, 2 * x)

    return check


def elementwise(dtype: str = "float32") -> tuple[Any, Check]:
    """y = 2 x over 64 values, in a parallel loop."""
    T = language()  # noqa: N806 - the name TileLang's own programs give it

    @T.prim_func
    def program(x: T.Tensor((64,), dtype), y: T.Tensor((64,), dtype)) -> None:
        with T.Kernel(1, threads=1) as _:
            for i in T.Parallel(64):
                y[i] = x[i] + x[i]

    return program, doubles(getattr(torch, dtype))


def bfloat16() -> tuple[Any, Check]:
    """The same in bf16."""
    return elementwise("bfloat16")


def pipelined() -> tuple[Any, Check]:
    """y = 2 x over 64 values, in a pipelined loop of 4 steps."""
    T = language()  # noqa: N806 - the name TileLang's own programs give it

    @T.prim_func
    def program(x: T.Tensor((64,), "float32"), y: T.Tensor((64,), "float32")) -> None:
        with T.Kernel(1, threads=1) as _:
            for step in T.Pipelined(4, num_stages=2):
                for i in T.Parallel(16):
                    y[step * 16 + i] = x[step * 16 + i] + x[step * 16 + i]

    return program, doubles(torch.float32)


def local_product() -> tuple[Any, Check]:
    """A 16 x 16 matrix product that sums in thread-local memory."""
    T = language()  # noqa: N806 - the name TileLang's own programs give it

    @T.prim_func
    def program(
        a: T.Tensor((16, 16), "float32"), b: T.Tensor((16, 16), "float32"), out: T.Tensor((16, 16), "float32")
    ) -> None:
        with T.Kernel(1, threads=1) as _:
            total = T.alloc_local((16, 16), "float32")
            T.clear(total)
            T.gemm(a, b, total)
            for i in T.serial(16):
                for j in T.serial(16):
                    out[i, j] = total[i, j]

    def check(compiled: Any) -> bool:
        a, b = torch.randn(2, 16, 16)
        out = torch.full((16, 16), float("nan"))
        compiled(a, b, out)
        return torch.allclose(out, a @ b, atol=1e-4)

    return program, check


def main() -> None:
    """Make every attempt and print the tables."""
    console = Console(width=WIDTH, markup=False, emoji=False)
    version = tilelang().__version__
    for title, attempts in (
        ("Targets for the CPU", targets()),
        ('The kernels on target="c"', kernels()),
        ('What target="c" accepts', accepted()),
    ):
        table = Table(title=f"{title} (TileLang {version})", show_lines=True)
        for column in ("what", "construct", f"{RECORDED_VERSION} said", f"{version} says", ""):
            table.add_column(column, overflow="fold")
        for one in attempts:
            table.add_row(one.name, one.construct, one.recorded, one.found, "same" if one.same else "differs")
        console.print(table)


if __name__ == "__main__":
    main()
