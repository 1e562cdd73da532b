"""Run as a script in a process of its own: what the public package makes of many loads, as JSON.

    PYTHONPATH=.cache/peer python peer_loads.py REQUEST ANSWERS

REQUEST has states, questions, and loads: {name: {"checkpoint": folder, "options": of laya.load, "environment": …}};
each load may have states and questions of its own. ANSWERS has for each load its replies, or the names of its error's
classes, and whether it warned.
"""

import json
import os
import sys
import warnings
from pathlib import Path


def main(request_file: str, answers_file: str) -> None:
    import laya  # noqa: PLC0415 - the public package: PYTHONPATH comes before ours

    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    found = {"package": laya.__file__}
    for name, load in request["loads"].items():
        os.environ.update(load["environment"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                agent = laya.load(load["checkpoint"], device="cpu", **load["options"])
                asked = request | load
                found[name] = {"replies": agent.predict_batch(asked["states"], asked["questions"])}
            except Exception as error:  # noqa: BLE001 - any class: it is what is asked about
                found[name] = {"error": [kind.__name__ for kind in type(error).__mro__], "said": str(error)}
        found[name]["warned"] = any(issubclass(w.category, UserWarning | RuntimeWarning) for w in caught)
        for variable in load["environment"]:
            del os.environ[variable]
    Path(answers_file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:3])
