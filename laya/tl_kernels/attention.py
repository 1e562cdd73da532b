# mypy: disable-error-code="valid-type, name-defined, untyped-decorator"
# TileLang reads a program's buffer shapes from its annotations, which are calls and not types.
"""Softmax attention inside each of several packed sequences, full or within a reach, without a mask in memory.

One block owns a tile of queries of one head of one sequence and walks over the keys in reach of it, keeping a running
maximum and sum (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135).
"""

import math

import torch
from torch import Tensor

from laya.errors import BackendError
from laya.tl_kernels.arguments import HALVES, MOST_BLOCKS, architecture, dtype_name, expect, result
from laya.tl_kernels.kernel import Kernel, language, made_once
from laya.tl_kernels.tiles import SAFE, AttnTile, Tiles, tiles_for

LOWEST = -1e30  # below every score, and finite: a difference of two of it is 0, not NaN


@made_once
def attn_kernel(  # noqa: C901, PLR0915 - one program; its loops are over tiles
    heads: int,
    width: int,
    dtype: str = "bfloat16",
    reach: int | None = None,
    tile: AttnTile = SAFE.attn,
) -> Kernel:
    """A kernel for `heads` heads of `width`; the numbers of tokens and of sequences are free at run time.

    Arguments when called: qkv (T, 3 · heads · width), offsets (edges) int32, longest int, out (T, heads · width).
    Many small blocks on a multiprocessor beat a warp group of copies in each: sequences are a few tiles long, and a
    block spends most of its life waiting for its first one.
    """
    if width not in (32, 64, 128):
        raise ValueError(f"attn_kernel: a head must be 32, 64 or 128 wide, got {width}")
    if reach is not None and reach < 1:
        raise ValueError(f"attn_kernel: the reach must be None or a positive number of tokens, got {reach}")
    T = language()  # noqa: N806 - the name TileLang's own programs give it
    tokens, edges = T.dynamic("tokens"), T.dynamic("edges")
    queries, keys, inner = tile.queries, tile.keys, heads * width
    scale = width**-0.5 * math.log2(math.e)  # of a power of two instead of e
    by_rows = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def attn_program(  # noqa: C901
        qkv: T.Tensor((tokens, 3 * inner), dtype),
        offsets: T.Tensor((edges,), "int32"),
        longest: T.int32,
        out: T.Tensor((tokens, inner), dtype),
    ) -> None:
        with T.Kernel(heads, T.ceildiv(longest, queries), edges - 1, threads=tile.threads) as (head, block, sequence):
            if tile.resident:
                T.annotate_min_blocks_per_sm(tile.resident)
            query = T.alloc_shared((queries, width), dtype)
            key = T.alloc_shared((keys, width), dtype)
            value = T.alloc_shared((keys, width), dtype)
            score = T.alloc_fragment((queries, keys), "float32")
            weight = T.alloc_fragment((queries, keys), dtype)
            total = T.alloc_fragment((queries, width), "float32")
            top = T.alloc_fragment((queries,), "float32")
            former = T.alloc_fragment((queries,), "float32")
            shrink = T.alloc_fragment((queries,), "float32")
            part = T.alloc_fragment((queries,), "float32")
            norm = T.alloc_fragment((queries,), "float32")
            start = offsets[sequence]
            length = offsets[sequence + 1] - start
            row = block * queries
            if row < length:
                low = 0 if reach is None else T.max(row - reach, 0)
                high = length if reach is None else T.min(row + queries + reach, length)
                T.copy(qkv[start + row, head * width], query)
                T.clear(total)
                T.clear(norm)
                T.fill(top, LOWEST)
                for step in T.Pipelined(T.ceildiv(high - low, keys), num_stages=tile.stages):
                    column = low + step * keys
                    T.copy(qkv[start + column, inner + head * width], key)
                    T.clear(score)
                    T.gemm(query, key, score, transpose_B=True, policy=by_rows)
                    for i, j in T.Parallel(queries, keys):
                        inside = column + j < length
                        near = (column + j - row - i <= reach) & (row + i - column - j <= reach) if reach else True
                        score[i, j] = T.if_then_else(inside & near, score[i, j], -T.infinity("float32"))
                    T.copy(top, former)
                    T.reduce_max(score, top, dim=1, clear=False)
                    for i in T.Parallel(queries):
                        # Not a difference of products: fused, it would keep the rounding of LOWEST, which is huge.
                        shrink[i] = T.exp2((former[i] - top[i]) * scale)
                    for i, j in T.Parallel(queries, keys):
                        score[i, j] = T.exp2(score[i, j] * scale - top[i] * scale)
                    T.reduce_sum(score, part, dim=1)
                    for i in T.Parallel(queries):
                        norm[i] = norm[i] * shrink[i] + part[i]
                    for i, j in T.Parallel(queries, width):
                        total[i, j] *= shrink[i]
                    T.copy(score, weight)
                    # Past the end the last row again: its weight is 0, but 0 times a neighbour's NaN would be NaN.
                    for i, j in T.Parallel(keys, width):
                        source = start + T.min(column + i, length - 1)
                        value[i, j] = qkv[source, 2 * inner + head * width + j]
                    T.gemm(weight, value, total, policy=by_rows)
                for i, j in T.Parallel(queries, width):
                    total[i, j] /= norm[i]
                T.copy(total, query)  # through shared memory, so that the stores are whole lines
                for i, j in T.Parallel(queries, width):
                    if row + i < length:
                        out[start + row + i, head * width + j] = query[i, j]

    return Kernel(attn_program, fast_math=True, specialised=False)


def attn(
    qkv: Tensor,
    offsets: Tensor,
    longest: int,
    reach: int | None,
    out: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Attention of qkv (T, 3, H, W), bf16 or fp16, inside each of n packed sequences: (T, H · W), scaled by W**-0.5.

    `offsets` (n + 1) int32 are the sequences' cumulative edges on the device, 0 first and none beyond T; `longest` is
    the length of the longest in tokens (rows past it would not be written). With a `reach`, token i sees j only where
    |i - j| <= reach. Rows of `out` past the last sequence are left as they were. What one sequence holds, NaN included,
    never reaches another. `tiles` are the architecture's when None.

    ValueError for what does not fit together; BackendError away from CUDA, or for more than one launch takes.
    """
    found = architecture("attn", qkv.device)
    dtype = dtype_name("qkv", qkv, HALVES)
    expect("qkv", qkv, (None, 3, None, None), qkv.dtype, qkv.device)
    tokens, _, heads, width = qkv.shape
    check_sequences(offsets, longest, qkv)
    out = result(out, (tokens, heads * width), qkv.dtype, qkv.device)
    tiles = tiles or tiles_for(found)
    # A window that covers the longest sequence hides nothing.
    near = None if reach is not None and longest <= reach + 1 else reach
    tile = tiles.attn if near is None else tiles.attn_window
    if longest and offsets.shape[0] > 1:
        flat = qkv.view(tokens, 3 * heads * width)
        attn_kernel(heads, width, dtype, near, tile)(flat, offsets, longest, out, device=qkv.device)
    return out


def check_sequences(offsets: Tensor, longest: int, qkv: Tensor) -> None:
    """ValueError or BackendError unless they describe sequences of qkv (T, …) that one launch can take."""
    expect("offsets", offsets, (None,), torch.int32, qkv.device)
    if not 0 <= longest <= len(qkv):
        raise ValueError(f"longest: expected 0 to {len(qkv)}, the tokens of qkv, got {longest}")
    if offsets.shape[0] - 1 > MOST_BLOCKS:
        raise BackendError(f"attn: {offsets.shape[0] - 1} sequences are more than the {MOST_BLOCKS} of one launch")
