"""Run as a script in a process of its own: what the public package answers, as JSON.

    PYTHONPATH=.cache/peer python peer.py REQUEST ANSWERS

REQUEST has checkpoint, states, questions and batch_size; ANSWERS has the replies and, for each (state, question)
pair in order, its logits, action probabilities, token ids and markers.
"""

import json
import sys
from pathlib import Path


def main(request_file: str, answers_file: str) -> None:
    import laya  # noqa: PLC0415 - the public package: PYTHONPATH comes before ours

    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    agent = laya.load(request["checkpoint"], device="cpu", backend="eager")
    kept = {
        "version": laya.__version__,
        "package": laya.__file__,
        "logits": [],
        "act": [],
        "token_ids": [],
        "markers": [],
    }
    run_forward, run_encode = agent._forward, agent._encode_state

    def forward(batch):
        logits, act = run_forward(batch)
        present = batch["marker_mask"].numpy()
        kept["logits"] += [[float(x) for x in row[mask]] for row, mask in zip(logits, present, strict=True)]
        kept["act"] += [[float(x) for x in row] for row in act]
        return logits, act

    def encode(*args, **kwargs):
        sequences = run_encode(*args, **kwargs)
        kept["token_ids"] += [list(map(int, sequence["ids"])) for sequence in sequences]
        kept["markers"] += [list(map(int, sequence["markers"])) for sequence in sequences]
        return sequences

    agent._forward, agent._encode_state = forward, encode
    kept["replies"] = agent.predict_batch(request["states"], request["questions"], batch_size=request["batch_size"])
    Path(answers_file).write_text(json.dumps(kept), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:3])
