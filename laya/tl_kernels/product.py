# mypy: disable-error-code="valid-type, name-defined, untyped-decorator, no-untyped-def"
# TileLang reads a program's buffer shapes from its annotations, which are calls and not types.
"""The matrix product that kernels are made of, in two schedules; a kernel adds what is done to a tile that is summed.

Owns how tiles are shared among blocks and multiplied. In turns, for sm_90: blocks stay on their multiprocessors, and
of a block's three warp groups one copies operands while the other two take its tiles in turns, one finishing a tile
(what is fused, rounding, storing) as the other multiplies; CUTLASS calls that ping-pong. Else, a block for each tile.
"""

from typing import Any

from torch import Tensor

from laya.errors import BackendError
from laya.tl_kernels.arguments import MOST_BLOCKS, multiprocessors
from laya.tl_kernels.kernel import Kernel, language
from laya.tl_kernels.tiles import GemmTile

GROUP, WARP = 128, 32  # threads
COPYING, MULTIPLYING = 24, 240  # registers of a thread


def product(n: int, k: int, dtype: str, tile: GemmTile, finish: Any, pairs: bool = False) -> Any:
    """A macro `body(x, weight, extra, workers, out)` for x (T, k) times weight (n, k) transposed: out (T, n).

    With `pairs`, out is (T, n / 2), and each of its columns has two sums: with that row of weight, and with the row
    n / 2 below. `finish(total, rounded, row, column, extra)` is a macro that puts what is stored of a tile, (rows,
    columns), into `rounded`; `total` has its sums, (rows, columns) float32, or with `pairs` (rows, 2 columns), the
    first ones left. The tile begins at `row` and `column` of out, and may reach beyond, where nothing is stored;
    `extra` is handed through. `workers` is how many blocks share the tiles where they take turns.

    n, or with `pairs` its half, and k are multiples of 8, which the bulk copies' 16 bytes a row need; neither has to be
    a multiple of the tile.
    """
    if n % 8 or k % 8 or (pairs and n % 16):
        raise ValueError(f"a product's widths must be multiples of 8, got {n // 2 if pairs else n} and {k}")
    return (in_turns if tile.turns else tile_by_tile)(n, k, dtype, tile, finish, pairs)


def in_turns(  # noqa: C901, PLR0915 - one program; its loops are over tiles
    n: int, k: int, dtype: str, tile: GemmTile, finish: Any, pairs: bool
) -> Any:
    """`product` for sm_90."""
    T = language()  # noqa: N806 - the name TileLang's own programs give it
    rows, columns, depth, stages = tile.rows, tile.columns, tile.depth, tile.stages
    width = 2 * columns if pairs else columns
    across, steps = -(-(n // 2 if pairs else n) // columns), -(-k // depth)

    @T.macro
    def fill(x, weight, left, right, full, slot, row, column, at):  # noqa: PLR0913, PLR0917 - TileLang buffers
        T.tma_copy(x[row : row + rows, at : at + depth], left[slot, :, :], barrier=full[slot])
        T.tma_copy(weight[column : column + columns, at : at + depth], right[slot, 0:columns, :], barrier=full[slot])
        if pairs:
            below = n // 2 + column
            T.tma_copy(
                weight[below : below + columns, at : at + depth], right[slot, columns:width, :], barrier=full[slot]
            )
        if T.shuffle_elect(WARP):
            T.barrier_arrive(full[slot])

    @T.macro
    def release(empty, slot):
        if T.shuffle_elect(WARP):
            T.barrier_arrive(empty[slot])

    @T.macro
    def multiply(me, left, right, full, empty, turn, extra, out, worker, workers, tiles):  # noqa: PLR0913, PLR0917
        total = T.alloc_fragment((rows, width), "float32")
        rounded = T.alloc_shared((rows, columns), dtype)
        for pair in T.serial(T.ceildiv(tiles - worker - me * workers, 2 * workers)):
            order = 2 * pair + me  # of this tile among the block's
            tile = worker + order * workers
            row, column = tile // across * rows, tile % across * columns
            # A barrier's parity tells a phase from the next, not from the one after that: no group may run ahead.
            T.barrier_wait(turn[me], (pair + 1 - me) % 2)
            for step in T.serial(steps):
                count = order * steps + step
                slot = count % stages
                T.barrier_wait(full[slot], count // stages % 2)
                T.wgmma_gemm(
                    *(left[slot, :, :], right[slot, :, :], total),
                    transpose_B=True,
                    policy=T.GemmWarpPolicy.FullRow,
                    clear_accum=step == 0,
                )
                T.wait_wgmma(1)  # for the step before
                if step > 0:
                    release(empty, (count - 1) % stages)
            T.barrier_arrive(turn[1 - me])
            T.wait_wgmma(0)
            release(empty, (order * steps + steps - 1) % stages)
            finish(total, rounded, row, column, extra)
            T.fence_proxy_async()  # each thread's own stores, before one of them starts the bulk copy
            T.copy(rounded, out[row : row + rows, column : column + columns])

    @T.macro
    def body(x, weight, extra, workers, out):
        with T.Kernel(workers, threads=3 * GROUP) as worker:
            left = T.alloc_shared((stages, rows, depth), dtype)
            right = T.alloc_shared((stages, width, depth), dtype)
            full = T.alloc_barrier([1] * stages)
            empty = T.alloc_barrier([GROUP // WARP] * stages)
            turn = T.alloc_barrier([GROUP] * 2)
            tiles = T.ceildiv(x.shape[0], rows) * across
            thread = T.get_thread_binding()
            if thread < GROUP:
                T.set_max_nreg(COPYING, 0)
                if thread < WARP:
                    for order in T.serial(T.ceildiv(tiles - worker, workers)):
                        tile = worker + order * workers
                        row, column = tile // across * rows, tile % across * columns
                        for step in T.serial(steps):
                            count = order * steps + step
                            slot = count % stages
                            T.barrier_wait(empty[slot], count // stages % 2 ^ 1)
                            fill(x, weight, left, right, full, slot, row, column, step * depth)
            elif thread < 2 * GROUP:
                T.set_max_nreg(MULTIPLYING, 1)
                multiply(0, left, right, full, empty, turn, extra, out, worker, workers, tiles)
            else:
                T.set_max_nreg(MULTIPLYING, 1)
                multiply(1, left, right, full, empty, turn, extra, out, worker, workers, tiles)

    return body


def tile_by_tile(n: int, k: int, dtype: str, tile: GemmTile, finish: Any, pairs: bool) -> Any:
    """`product` for any card."""
    T = language()  # noqa: N806 - the name TileLang's own programs give it
    rows, columns, depth = tile.rows, tile.columns, tile.depth
    width = 2 * columns if pairs else columns
    across = -(-(n // 2 if pairs else n) // columns)

    @T.macro
    def body(x, weight, extra, _workers, out):
        with T.Kernel(across, T.ceildiv(x.shape[0], rows), threads=tile.threads) as (block_column, block_row):
            left = T.alloc_shared((rows, depth), dtype)
            right = T.alloc_shared((width, depth), dtype)
            rounded = T.alloc_shared((rows, columns), dtype)
            total = T.alloc_fragment((rows, width), "float32")
            row, column = block_row * rows, block_column * columns
            T.use_swizzle(tile.panel)
            T.clear(total)
            for step in T.Pipelined(T.ceildiv(k, depth), num_stages=tile.stages):
                at = step * depth
                T.copy(x[row : row + rows, at : at + depth], left)
                T.copy(weight[column : column + columns, at : at + depth], right[0:columns, :])
                if pairs:
                    below = n // 2 + column
                    T.copy(weight[below : below + columns, at : at + depth], right[columns:width, :])
                # Whole rows to a warp, so that both sums of a column are in one thread.
                T.gemm(left, right, total, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            finish(total, rounded, row, column, extra)
            if tile.bulk:
                T.fence_proxy_async()  # each thread's own stores, before one of them starts the bulk copy
            T.copy(rounded, out[row : row + rows, column : column + columns], disable_tma=not tile.bulk)

    return body


def launch(name: str, kernel: Kernel, tile: GemmTile, operands: list[Tensor], out: Tensor) -> Tensor:
    """Run a kernel whose arguments are the operands, x first, the number of workers, and `out`; returns `out`.

    BackendError for more tokens than one launch takes.
    """
    tokens, device = len(operands[0]), out.device
    most = MOST_BLOCKS * tile.rows
    if tokens > most and not tile.turns:
        raise BackendError(f"{name}: {tokens} tokens are more than the {most} of one launch")
    if tokens:
        kernel(*operands, multiprocessors(device), out, device=device)
    return out
