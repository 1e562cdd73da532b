"""What 8-bit matrix products would do to the answers: bf16 and fp8 beside fp32, on texts of the demo. Needs no GPU.

    python benchmarks/check_fp8.py CHECKPOINT... [--rows 300]

fp8 as a GPU would run it: the encoder's products, all four of a layer or the two of its MLP, in float8_e4m3fn, each row
of the left operand and each output channel of the weight scaled to the format's largest value (448), sums in float32,
results rounded to bf16. All else is bf16. The products of 8-bit numbers are exact in float32, so emulating them gives
what a card gives but for the order of its sums. Of two options about as likely, each counts as it falls.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of PyTorch knows
import yaml
from measuring import at_least_one, describe_run, existing_folder, publish, results_file, told
from torch import Tensor, nn

import laya

DEMO = Path(__file__).parents[1] / "examples" / "demo"
COLUMNS = ["checkpoint", "precision", "answers", "same_answer", "mean_dp", "p99_dp", "max_dp"]
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def scaled_to_fp8(rows: Tensor) -> Tensor:
    """(n, k) rounded to 8 bits, each row by a scale of its own, and back to float32."""
    rows = rows.float()
    scale = rows.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


class Float8Product(nn.Module):
    """Stands for a linear layer whose operands are rounded to 8 bits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias, self.dtype = linear.bias, linear.weight.dtype
        self.weight = nn.Parameter(scaled_to_fp8(linear.weight.detach()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        product = F.linear(scaled_to_fp8(x.to(self.dtype)), self.weight).to(self.dtype)
        return product if self.bias is None else product + self.bias


def probabilities(agent: laya.Agent, texts: list[str], questions: dict[str, Any]) -> np.ndarray[Any, Any]:
    """(answers, options) of every text and question, 0 where an option is absent."""
    prepared = agent.prepare(questions)
    encoded = agent.encode(texts, prepared)
    found = np.zeros((len(encoded), int(encoded.option_counts.max())))
    for batch, logits in agent.forward_each(encoded, agent.pack(encoded)):
        part = agent.decode(prepared, encoded, batch, logits).probabilities
        found[batch.index, : part.shape[1]] = part
    return found


def round_products(model: Any, mlp_only: bool) -> None:
    """Replace the encoder's products by 8-bit ones."""
    for layer in model.encoder.layers:
        for module, names in ((layer.mlp, ("Wi", "Wo")), (layer.attn, () if mlp_only else ("Wqkv", "Wo"))):
            for name in names:
                setattr(module, name, Float8Product(getattr(module, name)))


def compare(checkpoint: Path, texts: list[str], questions: dict[str, Any]) -> Iterator[dict[str, Any]]:
    exact = probabilities(laya.load(checkpoint, device="cpu"), texts, questions)
    os.environ["LAYA_CPU_AMP"] = "bf16"
    for precision in ("bf16", "fp8", "fp8 in the MLP"):
        agent = laya.load(checkpoint, device="cpu")
        if precision != "bf16":
            round_products(agent.model, mlp_only=precision != "fp8")
        found = probabilities(agent, texts, questions)
        off = np.abs(found - exact).max(axis=1)
        yield {
            "checkpoint": checkpoint.name,
            "precision": precision,
            "answers": len(exact),
            "same_answer": round(float((found.argmax(axis=1) == exact.argmax(axis=1)).mean()), 4),
            "mean_dp": round(float(off.mean()), 5),
            "p99_dp": round(float(np.quantile(off, 0.99)), 5),
            "max_dp": round(float(off.max()), 5),
        }
    del os.environ["LAYA_CPU_AMP"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", type=existing_folder, help="folders")
    parser.add_argument("--rows", type=at_least_one, default=300, help="texts of the demo (300)")
    parser.add_argument("--out", type=results_file, help="append the JSON lines here")
    options = parser.parse_args()
    texts = pq.read_table(DEMO / "held_out.parquet", columns=["text"])["text"].to_pylist()
    texts = texts[:: max(1, len(texts) // options.rows)][: options.rows]
    questions = yaml.safe_load((DEMO / "questions.yaml").read_text(encoding="utf-8"))
    about = describe_run(None, torch.device("cpu"))
    lines = (line | about for path in options.checkpoints for line in compare(path.resolve(), texts, questions))
    with told(parser):
        publish("fp8 beside fp32", lines, COLUMNS, options.out)


if __name__ == "__main__":
    main()
