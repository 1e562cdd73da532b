"""Where Inductor, torch's compiler, keeps compiled code: one variable of the process, which an earlier setting wins.

torch sets the variable itself when it compiles, and even when its compiler is imported. What this package imports of
it leaves the variable as it was, so that only what others chose or compiled counts as earlier.
"""

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled(folder: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Let Inductor keep its code in `folder`, for this process and the next, unless the variable is set.

    Raises OSError when the folder cannot be made.
    """
    if not environ.get(CACHE_VARIABLE):
        folder.mkdir(parents=True, exist_ok=True)
        environ[CACHE_VARIABLE] = str(folder)


@contextmanager
def leaving_cache_unset(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Import a part of torch's compiler within the block: the variable is not set by that."""
    unset = CACHE_VARIABLE not in environ
    yield
    if unset:
        environ.pop(CACHE_VARIABLE, None)


def import_flash_attention() -> None:
    """Import PyTorch's variable-length attention, which registers its operator and imports the compiler."""
    with leaving_cache_unset():
        from torch.nn.attention import varlen  # noqa: F401, PLC0415 - takes long
