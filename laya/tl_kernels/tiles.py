"""Which tile shapes a kernel is built with: a small named table per architecture, chosen by the number of tokens.

Owns nothing else. The sm_90 shapes are those that measured fastest on an H200 at 65,536 tokens of the large shape, or
within the spread of it; those of sm_80 and sm_89 are chosen to fit shared memory (163 and 99 KiB a block), unmeasured.
"""

from dataclasses import dataclass

BIG_TOKENS = 8192  # from here the large tiles fill the chip


@dataclass(frozen=True)
class GemmTile:
    """One block's share of a matrix product: rows x columns of the output, `depth` of the shared axis a step.

    `panel` is how many block columns are walked together, so that their operands stay in the L2 cache; `bulk` says that
    the result leaves by a bulk copy, which sm_90 has, and needs the fence that goes with it. `turns` says that blocks
    stay and their warp groups take tiles in turns (`product`), for sm_90 alone: with 384 threads, and no say for what
    stands after them.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    threads: int
    panel: int = 10
    bulk: bool = False
    turns: bool = False


@dataclass(frozen=True)
class AttnTile:
    """One block's share of attention: `queries` of one head of one sequence, walking over `keys` at a time.

    `resident` blocks have to fit a multiprocessor at once, which bounds the registers of a thread; 0 leaves it open.
    """

    queries: int
    keys: int
    stages: int
    threads: int
    resident: int = 0


@dataclass(frozen=True)
class Tiles:
    """The shapes of one architecture. GEGLU's columns are counted in outputs, of which each takes two products.

    `qkv` is that of the product which rotates what it makes; None where the library's product and a rotation after it
    are as fast.
    """

    gemm: GemmTile
    gemm_small: GemmTile
    qkv: GemmTile | None
    geglu: GemmTile
    geglu_small: GemmTile
    attn: AttnTile
    attn_window: AttnTile


SAFE = Tiles(
    gemm=GemmTile(64, 64, 32, 2, 128),
    gemm_small=GemmTile(64, 64, 32, 2, 128),
    qkv=None,
    geglu=GemmTile(64, 64, 32, 2, 128),
    geglu_small=GemmTile(64, 64, 32, 2, 128),
    attn=AttnTile(64, 64, 1, 128),
    attn_window=AttnTile(64, 64, 1, 128),
)

TABLE: dict[tuple[int, int], Tiles] = {
    (9, 0): Tiles(
        gemm=GemmTile(128, 128, 64, 5, 384, turns=True),
        gemm_small=GemmTile(128, 128, 64, 4, 256, bulk=True),
        qkv=GemmTile(128, 128, 64, 5, 384, turns=True),
        geglu=GemmTile(128, 64, 64, 6, 384, turns=True),
        geglu_small=GemmTile(64, 64, 64, 4, 128, bulk=True),
        attn=AttnTile(64, 64, 1, 128),
        attn_window=AttnTile(64, 64, 1, 128, resident=4),
    ),
    (8, 0): Tiles(
        gemm=GemmTile(128, 128, 32, 4, 256),
        gemm_small=GemmTile(64, 128, 32, 4, 128),
        qkv=None,
        geglu=GemmTile(128, 64, 32, 4, 256),
        geglu_small=GemmTile(64, 64, 32, 4, 128),
        attn=AttnTile(64, 64, 1, 128),
        attn_window=AttnTile(64, 64, 1, 128),
    ),
    (8, 9): Tiles(
        gemm=GemmTile(128, 128, 32, 3, 256),
        gemm_small=GemmTile(64, 128, 32, 3, 128),
        qkv=None,
        geglu=GemmTile(128, 64, 32, 3, 256),
        geglu_small=GemmTile(64, 64, 32, 3, 128),
        attn=AttnTile(64, 64, 1, 128),
        attn_window=AttnTile(64, 64, 1, 128),
    ),
}


def tiles_for(capability: tuple[int, int]) -> Tiles:
    """The shapes for a compute capability; safe ones for a card that is not in the table."""
    return TABLE.get(capability, SAFE)
