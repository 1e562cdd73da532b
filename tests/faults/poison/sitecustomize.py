"""On the PYTHONPATH of a test's workers: makes the eager backend one that certain texts can break.

The environment's FAULT_BACKEND names a JSON file: `marks`, which token ids do what, `delay_s` for each batch, and
`most`, how many sequences there is memory for. The product knows nothing of it: the backend is replaced in the engine's
table when that is imported.
"""

import ctypes
import importlib.abc
import importlib.util
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

TABLE = "laya.backends.selection"


class TableFinder(importlib.abc.MetaPathFinder):
    """Lets the table of backends be imported as ever, and then changes it."""

    def find_spec(self, name, path=None, target=None):
        if name != TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            replace_eager(module)

        spec.loader.exec_module = exec_module
        return spec


def replace_eager(table):
    build_eager = table.FACTORIES["eager"]
    asked = json.loads(Path(os.environ["FAULT_BACKEND"]).read_text(encoding="utf-8"))
    broken = []  # once the device is lost, each pass of this process fails

    def build(context):
        backend = build_eager(context)
        forward = backend.forward

        def faulty(inputs):
            time.sleep(asked["delay_s"])
            ids, edges = inputs.input_ids.tolist(), inputs.offsets.tolist()
            rows = [" ".join(map(str, ids[start:end])) for start, end in itertools.pairwise(edges)]
            if len(rows) > (asked["most"] or len(rows)):
                raise sys.modules["torch"].OutOfMemoryError("no room")
            for deed, ids in asked["marks"].items():
                if any(" ".join(map(str, ids)) in row for row in rows):
                    DEEDS[deed](broken)
            if broken:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return forward(inputs)

        backend.forward = faulty
        return backend

    table.FACTORIES["eager"] = build


def kill(_):
    os.kill(os.getpid(), signal.SIGKILL)


def crash(_):
    ctypes.string_at(0)


def hang(_):
    ctypes.PyDLL(None).sleep(3600)  # in C, and with Python's lock held: no other thread of this process runs


def wait(_):
    time.sleep(3600)  # as for a device that never answers: the other threads of this process run on


def swell(_):
    held = []
    while True:
        held.append(b"x" * 20_000_000)
        time.sleep(0.05)  # its parent must see it before the machine is full


def exhaust(_):
    raise MemoryError("cannot allocate 1 TiB")


def fail(_):
    raise RuntimeError("this text cannot be scored")


def lose_device(broken):
    torch = sys.modules["torch"]
    broken.append(True)
    torch.cuda.empty_cache = lambda: torch.zeros(1).view(2)  # raises, as everything does on a device that is lost


DEEDS = {
    "kill": kill,
    "crash": crash,
    "hang": hang,
    "wait": wait,
    "swell": swell,
    "exhaust": exhaust,
    "fail": fail,
    "lose_device": lose_device,
}

if "FAULT_BACKEND" in os.environ:
    sys.meta_path.insert(0, TableFinder())
