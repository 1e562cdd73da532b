"""Which tile shapes a kernel is built with: a small table per architecture, and what may be measured instead of it.

Owns the table, its named alternatives, and where `tune` keeps which of them a card is fastest with. The sm_90 shapes
are those that measured fastest on an H200, at 64 to 65,536 tokens of the large shape, or within the spread of it; those
of sm_80 and sm_89 are chosen to fit shared memory (163 and 99 KiB a block), unmeasured.
"""

import hashlib
import json
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from laya.model import ModelConfig
from laya.tl_kernels.kernel import tilelang

BIG_TOKENS = 256  # from here what is for large batches is faster


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
    """The shapes of one architecture, `_small` ones for fewer than BIG_TOKENS. GEGLU's columns are counted in outputs,
    of which each takes two products.

    `qkv` is that of the product which rotates what it makes. None stands for the library's product, and what is fused
    done after it.
    """

    gemm: GemmTile
    gemm_small: GemmTile
    qkv: GemmTile | None
    qkv_small: GemmTile | None
    geglu: GemmTile | None
    geglu_small: GemmTile | None
    attn: AttnTile
    attn_window: AttnTile

    def gemm_of(self, tokens: int) -> GemmTile:
        return self.gemm if tokens >= BIG_TOKENS else self.gemm_small

    def qkv_of(self, tokens: int) -> GemmTile | None:
        return self.qkv if tokens >= BIG_TOKENS else self.qkv_small

    def geglu_of(self, tokens: int) -> GemmTile | None:
        return self.geglu if tokens >= BIG_TOKENS else self.geglu_small


SAFE_GEMM = GemmTile(64, 64, 32, 2, 128)
SAFE = Tiles(
    gemm=SAFE_GEMM,
    gemm_small=SAFE_GEMM,
    qkv=None,
    qkv_small=None,
    geglu=SAFE_GEMM,
    geglu_small=SAFE_GEMM,
    attn=AttnTile(64, 64, 1, 128),
    attn_window=AttnTile(64, 64, 1, 128),
)

TABLE: dict[tuple[int, int], Tiles] = {
    (9, 0): Tiles(
        gemm=GemmTile(128, 128, 64, 5, 384, turns=True),
        gemm_small=GemmTile(128, 128, 64, 4, 256, bulk=True),
        qkv=GemmTile(128, 128, 64, 5, 384, turns=True),
        qkv_small=None,
        geglu=GemmTile(128, 64, 64, 6, 384, turns=True),
        geglu_small=GemmTile(64, 64, 64, 4, 128, bulk=True),
        attn=AttnTile(64, 64, 1, 128),
        attn_window=AttnTile(64, 64, 1, 128, resident=4),
    ),
    (8, 0): Tiles(
        gemm=GemmTile(128, 128, 32, 4, 256),
        gemm_small=GemmTile(64, 128, 32, 4, 128),
        qkv=None,
        qkv_small=None,
        geglu=GemmTile(128, 64, 32, 4, 256),
        geglu_small=GemmTile(64, 64, 32, 4, 128),
        attn=AttnTile(64, 64, 1, 128),
        attn_window=AttnTile(64, 64, 1, 128),
    ),
    (8, 9): Tiles(
        gemm=GemmTile(128, 128, 32, 3, 256),
        gemm_small=GemmTile(64, 128, 32, 3, 128),
        qkv=None,
        qkv_small=None,
        geglu=GemmTile(128, 64, 32, 3, 256),
        geglu_small=GemmTile(64, 64, 32, 3, 128),
        attn=AttnTile(64, 64, 1, 128),
        attn_window=AttnTile(64, 64, 1, 128),
    ),
}


# By field of `Tiles`, what `tune` measures; the first is the table's own.
ALTERNATIVES: dict[tuple[int, int], dict[str, dict[str, GemmTile | AttnTile | None]]] = {
    (9, 0): {
        "qkv": {"turns": TABLE[9, 0].qkv, "library": None},
        "qkv_small": {"library": None, "turns": TABLE[9, 0].qkv},
        "geglu": {
            "turns": TABLE[9, 0].geglu,
            "blocks": GemmTile(128, 128, 64, 4, 256, bulk=True),
            "library": None,
        },
        "geglu_small": {
            "64 x 64": TABLE[9, 0].geglu_small,
            "128 x 64": GemmTile(128, 64, 64, 4, 256, bulk=True),
            "turns": TABLE[9, 0].geglu,
            "library": None,
        },
        "attn": {"64 x 64": TABLE[9, 0].attn, "128 x 64": AttnTile(128, 64, 1, 256)},
        "attn_window": {"4 resident": TABLE[9, 0].attn_window, "any resident": AttnTile(64, 64, 1, 128)},
    },
    (8, 0): {
        "qkv": {"library": None, "128 x 128": GemmTile(128, 128, 32, 4, 256)},
        "geglu": {"128 x 64": TABLE[8, 0].geglu, "128 x 128": GemmTile(128, 128, 32, 3, 256), "library": None},
        "geglu_small": {"64 x 64": TABLE[8, 0].geglu_small, "128 x 64": TABLE[8, 0].geglu, "library": None},
        "attn": {"64 x 64": TABLE[8, 0].attn, "128 x 64": AttnTile(128, 64, 1, 256)},
    },
    (8, 9): {
        "qkv": {"library": None, "128 x 128": GemmTile(128, 128, 32, 3, 256)},
        "geglu": {"128 x 64": TABLE[8, 9].geglu, "64 x 64": TABLE[8, 9].geglu_small, "library": None},
        "geglu_small": {"64 x 64": TABLE[8, 9].geglu_small, "128 x 64": TABLE[8, 9].geglu, "library": None},
        "attn": {"64 x 64": TABLE[8, 9].attn, "128 x 64": AttnTile(128, 64, 1, 256)},
    },
}


def tiles_for(capability: tuple[int, int]) -> Tiles:
    """The shapes for a compute capability; safe ones for a card that is not in the table."""
    return TABLE.get(capability, SAFE)


def tuned_tiles(capability: tuple[int, int], kept: Path) -> Tiles:
    """`tiles_for`, and over them what `tune` has kept in that file. A RuntimeWarning when it holds something else."""
    alternatives = ALTERNATIVES.get(capability, {})
    choices = {}
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found["made_with"] == made_with(capability):
            choices = {field: alternatives[field][name] for field, name in found["choices"].items()}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{kept} is not what laya.tl_kernels.tune writes, remove it or tune again: {error!r}"
        warnings.warn(reason, RuntimeWarning, stacklevel=2)
    return replace(tiles_for(capability), **choices)  # type: ignore[arg-type]  # a field's alternatives are of its kind


def kept_file(folder: Path, card: str, config: ModelConfig, dtype: str) -> Path:
    """Where under `folder` the choices lie for a card of that name and a model of those widths."""
    model = f"{config.hidden_size}-{config.intermediate_size}-{config.heads}-{config.reach}-{dtype}"
    return folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', card)}-{model}.json"


def made_with(capability: tuple[int, int]) -> str:
    """What a measurement stands and falls with: TileLang, torch with its library, and the shapes that were compared."""
    shapes = repr((TABLE.get(capability), ALTERNATIVES.get(capability)))
    digest = hashlib.sha256(shapes.encode()).hexdigest()[:12]
    return f"TileLang {tilelang().__version__}, torch {torch.__version__}, shapes {digest}"
