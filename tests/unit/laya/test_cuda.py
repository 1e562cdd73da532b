"""Eager on a CUDA device, beside the CPU in fp32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import laya
from laya.model import ABSENT_LOGIT

QUESTIONS: dict[str, Any] = {
    "topic": {"type": "choice", "instructions": "Which?", "criteria": {"a": "x", "b": None, "c": "z"}},
    "level": {"type": "score", "instructions": "How?", "criteria": ["low", "high"]},
    "holds": {"type": "noul", "instructions": "Is it?"},
}
STATES = [f"state {'word ' * (3 * index)}" for index in range(40)]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def all_answers(agent: laya.Agent, limits: laya.PackingLimits | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Logits (sequences, 3) and act probabilities, in the order of the sequences."""
    prepared = agent.prepare(QUESTIONS)
    encoded = agent.encode(STATES, prepared)
    logits, act = np.full((len(encoded), 3), ABSENT_LOGIT), np.zeros(len(encoded))
    for batch in agent.pack(encoded, limits):
        found = agent.forward(encoded, batch)
        logits[batch.index, : found.logits.shape[1]] = found.logits
        act[batch.index] = agent.decode(prepared, encoded, batch, found).act_probability
    return logits, act


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(("amp", "tolerance"), [("bf16", 0.15), ("fp16", 0.03)])
def test_mixed_precision_on_cuda_stays_near_the_cpu(
    checkpoint_path: Path, agent: laya.Agent, monkeypatch: pytest.MonkeyPatch, amp: str, tolerance: float
) -> None:
    monkeypatch.setenv("LAYA_CUDA_AMP", amp)
    cuda = laya.load(checkpoint_path, device="cuda")
    assert cuda.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[amp]
    (logits, act), (expected, expected_act) = all_answers(cuda), all_answers(agent)
    difference = np.abs(softmax(logits) - softmax(expected)).max()
    print(
        f"\n{amp}: largest difference of a probability {difference:.3f}, of act {np.abs(act - expected_act).max():.3f}"
    )
    assert difference < tolerance
    assert np.abs(act - expected_act).max() < tolerance


def test_fp32_on_cuda_agrees_with_the_cpu(checkpoint_path: Path, agent: laya.Agent) -> None:
    checkpoint = laya.Checkpoint(**{**vars(agent.checkpoint), "amp_dtype": "fp32"})
    cuda = laya.Agent(checkpoint, device="cuda")
    assert cuda.dtype == torch.float32
    logits, expected = all_answers(cuda)[0], all_answers(agent)[0]
    scale = np.abs(expected[expected > ABSENT_LOGIT]).max()
    assert np.abs(logits - expected).max() <= 1e-4 * scale


def test_packing_changes_no_answer_on_cuda(checkpoint_path: Path) -> None:
    cuda = laya.load(checkpoint_path, device="cuda")
    cuda.warmup()
    whole, one_by_one = all_answers(cuda)[0], all_answers(cuda, laya.PackingLimits(max_sequences=1))[0]
    assert np.abs(softmax(whole) - softmax(one_by_one)).max() < 0.1
