import dataclasses

import pytest
import torch
from torch import nn
from transformers import ModernBertConfig, ModernBertModel

from laya.attention import MaskSpec, PaddedAttention, attention_masks
from laya.inputs import ModelInputs, inputs_of_rows, widen
from laya.model import ABSENT_LOGIT, DecisionModel, ModelConfig, act_features
from laya.operations import Operations
from laya.parameters import in_compute_dtype
from tests.checkpoints import random_weights

CONFIG = ModelConfig(
    vocab_size=100,
    hidden_size=128,
    intermediate_size=96,
    heads=4,
    full_layers=(True, False, False, True),
    reach=8,
    max_len=64,
)


def make_model(config: ModelConfig = CONFIG) -> DecisionModel:
    model = DecisionModel(config).eval()
    model.load_state_dict(random_weights(model, seed=3))
    return model


def make_rows(length: int = 40) -> list[torch.Tensor]:
    """Token ids of three sequences."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, CONFIG.vocab_size, (3, length), generator=generator)
    return [ids[0], ids[1, : length // 2], ids[2, :6]]


def make_inputs(rows: list[torch.Tensor], counts: tuple[int, ...] = (3, 1, 2)) -> ModelInputs:
    """The rows end to end, with markers on their first tokens."""
    lengths = torch.tensor([len(row) for row in rows])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    places = torch.tensor([[1, 3, 5], [2, 0, 0], [1, 4, 0]])[: len(rows)]
    return ModelInputs(
        input_ids=torch.cat(rows).int(),
        positions=torch.cat([torch.arange(len(row)) for row in rows]).int(),
        sequence=torch.arange(len(rows)).repeat_interleave(lengths).int(),
        offsets=offsets.int(),
        markers=offsets[:-1, None] + places % lengths[:, None],
        marker_counts=torch.tensor(counts[: len(rows)]),
        qtype=torch.tensor([0, 1, 2])[: len(rows)],
        longest=int(lengths.max()),
    )


@pytest.mark.parametrize("length", [8, 9, 10, 40])
def test_encoder_equals_transformers_modernbert(length: int) -> None:
    model, rows = make_model(), make_rows(length)
    reference = ModernBertModel(
        ModernBertConfig(
            vocab_size=CONFIG.vocab_size,
            hidden_size=CONFIG.hidden_size,
            intermediate_size=CONFIG.intermediate_size,
            num_hidden_layers=4,
            num_attention_heads=CONFIG.heads,
            local_attention=2 * CONFIG.reach,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
        )
    ).eval()
    weights = {k.removeprefix("encoder."): v for k, v in model.state_dict().items() if k.startswith("encoder.")}
    reference.load_state_dict(weights)
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    real = torch.arange(length) < torch.tensor([len(row) for row in rows])[:, None]
    inputs = make_inputs(rows)
    with torch.no_grad():
        ours = model.encoder(inputs.input_ids, PaddedAttention(inputs, model.attention_spec), Operations())
        theirs = reference(input_ids=padded, attention_mask=real.long()).last_hidden_state
    assert (ours - theirs[real]).abs().max() <= 1e-5


def test_decision_head_equals_torch_transformer_layers() -> None:
    model, inputs = make_model(), make_inputs(make_rows())
    width = CONFIG.hidden_size
    layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True)
    reference = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    reference.load_state_dict(model.head.state_dict())
    hidden = torch.randn(len(inputs.input_ids), width, generator=torch.Generator().manual_seed(1))
    rows = hidden.split(inputs.offsets.diff().tolist())
    with torch.no_grad():
        logits, _ = model.decide(hidden, inputs, PaddedAttention(inputs, model.attention_spec), Operations())
        expected = torch.cat([reference((row + model.type_emb.weight[i])[None])[0] for i, row in enumerate(rows)])
        scores = model.scorer(expected[inputs.markers]).squeeze(-1)
    present = logits != ABSENT_LOGIT
    assert present.sum(dim=1).tolist() == [3, 1, 2]
    torch.testing.assert_close(logits[present], scores[present], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [8, 40])
def test_neighbours_change_no_logit(length: int) -> None:
    model, rows = make_model(), make_rows(length)
    with torch.no_grad():
        logits, act = model(make_inputs(rows))
        for place, row in enumerate(rows):
            together = make_inputs(rows)
            alone, act_alone = model(
                inputs_of_rows(
                    row[None],
                    together.markers[place : place + 1] - together.offsets[place],
                    together.marker_counts[place : place + 1],
                    together.qtype[place : place + 1],
                )
            )
            torch.testing.assert_close(alone[0], logits[place], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(act_alone[0], act[place], rtol=1e-4, atol=1e-4)
    assert logits.isfinite().all()


@pytest.mark.parametrize(("tokens", "sequences", "markers"), [(67, 4, 3), (80, 7, 9)])
def test_a_wider_shape_changes_no_logit(tokens: int, sequences: int, markers: int) -> None:
    model, inputs = make_model(), make_inputs(make_rows())
    assert len(inputs.input_ids) == 66
    wide = widen(inputs, tokens, sequences, markers)
    assert (len(wide.input_ids), *wide.markers.shape) == (tokens, sequences, markers)
    with torch.no_grad():
        expected, act = model(inputs)
        logits, wide_act = model(wide)
    torch.testing.assert_close(logits[:3, :3], expected)
    torch.testing.assert_close(wide_act[:3], act)
    assert (logits[:3, 3:] == ABSENT_LOGIT).all()
    assert widen(inputs, 66, 3, 3) is inputs


def test_there_is_no_mask_where_none_is_needed() -> None:
    lengths = torch.tensor([9, 9])
    assert attention_masks(lengths, 9, MaskSpec(8, torch.float32, padded=False)) == (None, None)
    masks = attention_masks(lengths, 9, MaskSpec(8, torch.float32, padded=True))
    assert masks.full is masks.sliding
    assert masks.full is not None
    assert masks.full.shape == (2, 1, 1, 9)
    masks = attention_masks(lengths, 10, MaskSpec(8, torch.float32, padded=False))
    assert masks.full is None
    assert masks.sliding is not None
    assert masks.sliding.shape == (1, 1, 10, 10)
    assert masks.sliding[0, 0, 0].tolist() == [0.0] * 9 + [float("-inf")]


def test_every_parameter_gets_a_finite_gradient() -> None:
    model, inputs = make_model().train(), make_inputs(make_rows())
    logits, act = model(inputs)
    (logits[logits != ABSENT_LOGIT].square().mean() + act.square().mean()).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert without == []


def test_in_bf16_only_the_matrix_products_are_bf16() -> None:
    model, inputs = make_model(), make_inputs(make_rows())
    with torch.no_grad():
        expected, _ = model(inputs)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(torch.bfloat16 if in_compute_dtype(name) else torch.float32)
        seen = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.register_forward_hook(lambda _, inputs, out, name=name: seen.update({name: inputs[0].dtype}))
        logits, act = model(inputs)
    assert model.encoder.compute_dtype == torch.bfloat16
    assert set(seen.values()) == {torch.float32}
    assert logits.dtype == act.dtype == torch.float32
    assert (logits - expected).softmax(dim=-1).isfinite().all()
    assert (logits.softmax(-1) - expected.softmax(-1)).abs().max() < 0.1


def test_act_features_follow_their_definition() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [5.0, ABSENT_LOGIT, ABSENT_LOGIT]])
    features = act_features(logits, torch.tensor([3, 1]))
    p = logits[0].softmax(0)
    entropy = -(p * p.log()).sum() / torch.tensor(3.0).log()
    torch.testing.assert_close(features[0], torch.stack((p[0], p[0] - p[1], entropy, torch.tensor(3 / 255))))
    torch.testing.assert_close(features[1], torch.tensor([1.0, 1.0, 0.0, 2 / 255]))


def test_a_model_without_decision_layers_scores_the_encoder_output() -> None:
    model = make_model(dataclasses.replace(CONFIG, head_layers=0))
    with torch.no_grad():
        logits, _ = model(make_inputs(make_rows()))
    assert logits.shape == (3, 3)
