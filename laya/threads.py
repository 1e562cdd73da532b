"""The first import of torch: with as many threads as this process may use, which sleep while they wait.

OpenMP reads its variables once, when its library is loaded, so this module comes before any other that imports torch.
"""

import os
import sys
from collections.abc import Mapping, MutableMapping

from schemas.cpus import allowed_cpus, thread_variables, usable_cpus


def import_torch(environ: MutableMapping[str, str] = os.environ) -> None:
    """Load torch with the variables of `schemas.cpus.thread_variables`, and leave the environment as it was.

    Where torch is loaded already, only the number of its threads can change: it is lowered to the CPU quota unless it
    looks chosen by somebody.
    """
    if "torch" in sys.modules:
        _lower_threads(environ)
        return
    ours = thread_variables(environ)
    before = {name: environ.get(name) for name in ours}
    environ.update(ours)
    try:
        import torch  # noqa: PLC0415

        torch.get_num_threads()  # LLVM's library reads its variables at the first call
    finally:
        for name, value in before.items():
            if value is None:
                del environ[name]
            else:
                environ[name] = value


def _lower_threads(environ: Mapping[str, str]) -> None:
    import torch  # noqa: PLC0415

    usable, now = usable_cpus(), torch.get_num_threads()
    chosen = any(environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")) or now < len(allowed_cpus()) // 2
    if usable < now and not chosen:
        torch.set_num_threads(usable)


import_torch()
