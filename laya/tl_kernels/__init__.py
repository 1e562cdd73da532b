"""The model's heavy operations as TileLang kernels, over packed tokens: sequences laid end to end, without padding.

Owns one file per kernel: a factory `x_kernel(...)` that builds it for static widths, and a wrapper `x(...)` that
checks its arguments and launches it. `reference` has the wrappers' names in plain torch. Importing this package does
not import TileLang; calling a factory does. Does not own which layers call what (`backends`).
"""

from laya.tl_kernels.attention import attn, attn_kernel
from laya.tl_kernels.geglu import gemm_geglu, gemm_geglu_kernel
from laya.tl_kernels.linear import gemm, gemm_kernel
from laya.tl_kernels.norm import add_ln, add_ln_kernel
from laya.tl_kernels.rotary import gemm_rope, gemm_rope_kernel, rope, rope_kernel

__all__ = [
    "add_ln",
    "add_ln_kernel",
    "attn",
    "attn_kernel",
    "gemm",
    "gemm_geglu",
    "gemm_geglu_kernel",
    "gemm_kernel",
    "gemm_rope",
    "gemm_rope_kernel",
    "rope",
    "rope_kernel",
]
