"""Trains the demo's decision checkpoint on the CPU, from data/ into checkpoint/, in minutes.

    python examples/demo/train.py

Steps: a tokenizer of the training texts; an untrained checkpoint in the public format, which the engine loads to lay
out the sequences; training; temperatures and the action head from the validation rows; accuracy on held_out.parquet
into metrics.json. The data is made by prepare.py.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of PyTorch knows
from fitting import Recipe, fit, fit_act_head, fit_temperature, infer
from material import Pairs, Questions, make_pairs, read_questions, read_rows, vary_questions, wording_texts
from safetensors.torch import save_file
from scoring import LABEL_OF, read_answer, summarise
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn
from transformers import ModernBertConfig, PreTrainedTokenizerFast

import laya
from laya.configuration import read_model_config
from laya.model import DecisionModel

HERE = Path(__file__).parent
CHECKPOINT = HERE / "checkpoint"
SPECIAL = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}
TYPES = ("choice", "score", "noul")  # in the order of `temperature`
KEYS = {"choice": "choice:6-10", "score": "score:3-5", "noul": "noul:2"}  # the questions of questions.yaml
DROPPED_OUT = ("embeddings.norm", "mlp.Wo", "linear2")
SETTINGS = {
    "encoder": "demo (ModernBERT, trained from scratch)",
    "head_layers": 2,
    "act_costs": {"escalate": 0.5},
    "max_len": 256,
    "head_max_len": 160,
    "amp_dtype": "bf16",
}


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over lower-cased text: every byte has a token, so nothing is ever unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def encoder_config(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> ModernBertConfig:
    return ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.hidden_size // 64,
        local_attention=128,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
    )


def build_model(config: ModernBertConfig, recipe: Recipe) -> DecisionModel:
    """The engine's own forward pass with fresh weights, and dropout hooked on for training."""
    model = DecisionModel(read_model_config(config.to_dict(), SETTINGS, SETTINGS["max_len"]))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            residual = name.endswith(("Wo.weight", "out_proj.weight", "linear2.weight"))
            nn.init.trunc_normal_(parameter, std=0.02 if residual else 0.05)
    for name, module in model.named_modules():
        if name.endswith(DROPPED_OUT):
            module.register_forward_hook(lambda module, _, out: F.dropout(out, recipe.dropout, module.training))
    return model


def write_checkpoint(model: DecisionModel, temperatures: dict[str, float]) -> None:
    """model.safetensors and rl_agent_config.json; `temperatures` by "<type>:<options>", empty before calibration."""
    weights = {name: value.detach().contiguous().clone() for name, value in model.state_dict().items()}
    by_type = [next((t for key, t in temperatures.items() if key.startswith(kind)), 1.0) for kind in TYPES]
    weights["temperature"] = torch.tensor(by_type)
    save_file(weights, CHECKPOINT / "model.safetensors", metadata={"format": "pt"})
    (CHECKPOINT / "model.safetensors").chmod(0o644)  # safetensors leaves it to its owner alone
    settings = {**SETTINGS, "temperature": by_type, "temperature_by_options": temperatures}
    (CHECKPOINT / "rl_agent_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def calibrate(model: DecisionModel, questions: Questions, validation: Pairs) -> dict[str, float]:
    """One temperature per question, keyed as the format wants it; fits the action head on the same answers."""
    logits, features = infer(model, validation)
    labels = torch.from_numpy(validation.labels)
    fit_act_head(model, features, logits.argmax(-1) == labels)
    temperatures = {}
    for index, name in enumerate(validation.question_names):
        mine = torch.from_numpy(validation.encoded.question_index == index)
        key = KEYS[questions[name]["type"]]
        temperatures[key] = fit_temperature(logits[mine], labels[mine])
    return temperatures


def measure_held_out(questions: Questions) -> dict[str, dict[str, Any]]:
    """Load the finished checkpoint as anyone would and compare its answers with the held-out labels."""
    agent = laya.load(str(CHECKPOINT), device="cpu")
    rows = read_rows(HERE / "held_out.parquet")
    metrics = {}
    for name, question in questions.items():
        labelled = [row for row in rows if row[LABEL_OF[name]] is not None]
        replies = agent.predict_batch([row["text"] for row in labelled], {name: question})
        answers = [read_answer(reply["answers"][name]) for reply in replies]
        metrics[name] = summarise(zip((row[LABEL_OF[name]] for row in labelled), answers, strict=True)).as_dict()
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch; the weights differ slightly between counts")
    started, threads, recipe = time.monotonic(), parser.parse_args().threads, Recipe()
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(threads)
    rows, questions = read_rows(HERE / "data/train.parquet"), read_questions()
    wordings = vary_questions(questions, recipe.wordings, recipe.seed)
    # The questions weigh as much as a few thousand texts, so that their words are whole tokens and heads stay short.
    texts = [row["text"] for row in rows] + 40 * [text for wording in wordings for text in wording_texts(wording)]
    tokenizer = train_tokenizer(texts, recipe.vocab_size)
    tokenizer.save_pretrained(CHECKPOINT / "tokenizer")
    config = encoder_config(tokenizer, recipe)
    config.save_pretrained(CHECKPOINT / "encoder")
    model = build_model(config, recipe)
    write_checkpoint(model, {})
    agent = laya.load(str(CHECKPOINT), device="cpu")  # untrained: it lays the sequences out
    training = [make_pairs(agent, rows, wording, with_ordinary=True) for wording in wordings]
    validation = make_pairs(agent, read_rows(HERE / "data/validation.parquet"), questions)
    fit(model, training, validation, tokenizer.unk_token_id, recipe)
    write_checkpoint(model, calibrate(model, questions, validation))
    minutes = (time.monotonic() - started) / 60
    metrics = {"held_out": measure_held_out(questions), "training_minutes": round(minutes, 1), "threads": threads}
    metrics |= {"parameters": sum(parameter.numel() for parameter in model.parameters()), "recipe": asdict(recipe)}
    (HERE / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    for name, scores in metrics["held_out"].items():
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in scores.items()))


if __name__ == "__main__":
    main()
