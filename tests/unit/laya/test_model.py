import dataclasses

import pytest
import torch
from torch import nn
from transformers import ModernBertConfig, ModernBertModel

from laya.attention import MaskSpec, attention_masks
from laya.model import ABSENT_LOGIT, DecisionModel, ModelConfig, ModelInputs, act_features, in_compute_dtype
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


def make_inputs(length: int = 40, counts: tuple[int, ...] = (3, 1, 2)) -> ModelInputs:
    generator = torch.Generator().manual_seed(5)
    return ModelInputs(
        input_ids=torch.randint(0, CONFIG.vocab_size, (3, length), generator=generator),
        lengths=torch.tensor([length, length // 2, 6]),
        marker_pos=torch.tensor([[1, 3, 5], [2, 0, 0], [1, 4, 0]]),
        marker_counts=torch.tensor(counts),
        qtype=torch.tensor([0, 1, 2]),
    )


@pytest.mark.parametrize("length", [8, 9, 10, 40])
def test_encoder_equals_transformers_modernbert(length: int) -> None:
    model, inputs = make_model(), make_inputs(length)
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
    real = torch.arange(length) < inputs.lengths[:, None]
    with torch.no_grad():
        masks = attention_masks(inputs.lengths, length, MaskSpec(CONFIG.reach, torch.float32, padded=True))
        ours = model.encoder(inputs.input_ids, masks)
        theirs = reference(input_ids=inputs.input_ids, attention_mask=real.long()).last_hidden_state
    assert (ours - theirs)[real].abs().max() <= 1e-5


def test_decision_head_equals_torch_transformer_layers() -> None:
    model, inputs = make_model(), make_inputs()
    width = CONFIG.hidden_size
    layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True)
    reference = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    reference.load_state_dict(model.head.state_dict())
    hidden = torch.randn(3, 40, width, generator=torch.Generator().manual_seed(1))
    padding = torch.arange(40) >= inputs.lengths[:, None]
    masks = attention_masks(inputs.lengths, 40, MaskSpec(CONFIG.reach, torch.float32, padded=True))
    with torch.no_grad():
        logits, _ = model.decide(hidden, inputs, masks.full)
        expected = reference(hidden + model.type_emb(inputs.qtype)[:, None], src_key_padding_mask=padding)
        scores = model.scorer(expected.gather(1, inputs.marker_pos[..., None].expand(-1, -1, width))).squeeze(-1)
    present = logits != ABSENT_LOGIT
    assert present.sum(dim=1).tolist() == [3, 1, 2]
    torch.testing.assert_close(logits[present], scores[present], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [8, 40])
def test_padding_changes_no_logit(length: int) -> None:
    model, inputs = make_model(), make_inputs(length)
    with torch.no_grad():
        logits, act = model(inputs)
        for row in range(3):
            one = {
                field.name: getattr(inputs, field.name)[row : row + 1]
                for field in dataclasses.fields(inputs)
                if field.name != "padded"
            }
            one["input_ids"] = one["input_ids"][:, : int(inputs.lengths[row])]
            alone, act_alone = model(ModelInputs(**one, padded=False))
            torch.testing.assert_close(alone[0], logits[row], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(act_alone[0], act[row], rtol=1e-4, atol=1e-4)
    assert logits.isfinite().all()


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
    model, inputs = make_model().train(), make_inputs()
    logits, act = model(inputs)
    (logits[logits != ABSENT_LOGIT].square().mean() + act.square().mean()).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert without == []


def test_in_bf16_only_the_matrix_products_are_bf16() -> None:
    model, inputs = make_model(), make_inputs()
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
        logits, _ = model(make_inputs())
    assert logits.shape == (3, 3)
