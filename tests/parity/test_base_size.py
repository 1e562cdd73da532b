"""Our engine against the public package at the size of a published encoder: 22 layers, 768 wide, 12 heads.

The weights are random; differences of the order of sums, which small models hide, add up over the layers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import laya
from tests.checkpoints import SENTENCES, CheckpointSpec, make_checkpoint
from tests.parity.conftest import QUESTIONS

BASE = {"hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12}
ASKED = {name: QUESTIONS[name] for name in ("department", "urgency", "holds")}
STATES = ["", SENTENCES[0], SENTENCES[4], {"body": SENTENCES[7]}, " ".join(SENTENCES) * 4]  # the last is cut
RELATIVE_TOLERANCE = 1e-3


def test_a_base_size_checkpoint_answers_as_the_public_package_does(
    tmp_path: Path, peer: Callable[..., dict[str, Any]]
) -> None:
    spec = CheckpointSpec(max_len=256, head_max_len=96, scale=0.03, encoder={**BASE, "local_attention": 128})
    checkpoint = make_checkpoint(tmp_path / "base", spec)
    theirs = peer(checkpoint, STATES, ASKED)
    agent = laya.load(checkpoint, device="cpu")
    prepared = agent.prepare(ASKED)
    encoded = agent.encode(STATES, prepared)
    assert encoded.state_tokens_dropped.max() > 0
    spread = 0.0
    for batch, found in agent.forward_each(encoded, agent.pack(encoded)):
        for row, index in enumerate(batch.index.tolist()):
            expected = np.array(theirs["logits"][index])
            ours = found.logits[row, : len(expected)]
            assert np.abs(ours - expected).max() <= RELATIVE_TOLERANCE * max(1.0, float(np.abs(expected).max()))
            spread = max(spread, float(np.ptp(expected)))
    assert spread > 0.1  # of uniform answers, any two would agree
    for reply, expected in zip(agent.predict_batch(STATES, ASKED), theirs["replies"], strict=True):
        for name, answer in reply["answers"].items():
            assert answer["type"] != "choice" or answer["choice"] == expected["answers"][name]["choice"]
