"""The forward pass, in plain PyTorch: a ModernBERT encoder, the decision head, and the scoring tail.

Owns the arithmetic and the parameter names, which equal the keys of a checkpoint. Does not own reading a checkpoint
(`checkpoint`), masks and rotation (`attention`), batches (`packing`, `collation`), or how fast it runs (`backends`).

The encoder is ModernBERT (Warner et al. 2024, arXiv:2412.13663): pre-norm, GeGLU, alternating full and sliding
attention. Dtypes are explicit, without autocast: the parameters that `parameters.in_compute_dtype` names decide the
dtype of their own matrix product, and all else, the residual stream above all, stays float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of PyTorch knows
from torch import Tensor, nn

from laya.attention import Attention, AttentionSpec, rotary_table, split_heads
from laya.inputs import ModelInputs
from laya.operations import Operations

ABSENT_LOGIT = -1e4
HEAD_WIDTH = 64  # of an attention head in the decision layers
ACT_FEATURES = 4
ACT_HIDDEN = 256
QUESTION_TYPES = 3


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a decision model. `full_layers[i]` says whether encoder layer i attends to every token."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    full_layers: tuple[bool, ...]
    full_theta: float = 160_000.0
    sliding_theta: float = 10_000.0
    reach: int = 64  # a sliding layer's query sees keys at a distance of at most this many tokens
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    head_layers: int = 2
    act_outputs: int = 2
    max_len: int = 512  # tokens; the longest sequence the position tables cover

    @property
    def decision_heads(self) -> int:
        """Attention heads of a decision layer."""
        return max(1, self.hidden_size // HEAD_WIDTH)

    @property
    def most_heads(self) -> int:
        """Attention heads of the layer that has the most."""
        return max(self.heads, self.decision_heads)


class Linear(nn.Linear):
    """A matrix product in its own weight's dtype, whatever comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class EncoderAttention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.Wqkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias)
        self.Wo = Linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)

    def forward(self, x: Tensor, attention: Attention, full: bool) -> Tensor:
        out: Tensor = self.Wo(attention.encode(x, self.Wqkv, full))
        return out


class GatedMLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.Wi = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.Wo = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, operations: Operations) -> Tensor:
        out: Tensor = self.Wo(operations.gated(x, self.Wi))
        return out


class EncoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.full = config.full_layers[index]
        if index > 0:  # the embeddings are normalised already, and the checkpoint has no key for another norm
            self.attn_norm = norm(config)
        self.attn = EncoderAttention(config)
        self.mlp_norm = norm(config)
        self.mlp = GatedMLP(config)


def norm(config: ModelConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


class Embeddings(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = norm(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.norm(self.tok_embeddings(input_ids))
        return out


class Encoder(nn.Module):
    """ModernBERT: (T) token ids to (T, d) float32, after the final norm."""

    layers: Sequence[EncoderLayer]
    full_table: Tensor
    sliding_table: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        layers = nn.ModuleList(EncoderLayer(config, index) for index in range(len(config.full_layers)))
        self.layers = layers  # type: ignore[assignment]  # a ModuleList does not say of what
        self.final_norm = norm(config)
        width = config.hidden_size // config.heads
        for kind, theta in (("full", config.full_theta), ("sliding", config.sliding_theta)):
            self.register_buffer(f"{kind}_table", rotary_table(config.max_len, width, theta), persistent=False)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the matrix products and of the masks."""
        return self.layers[0].attn.Wqkv.weight.dtype

    def forward(self, input_ids: Tensor, attention: Attention, operations: Operations) -> Tensor:
        dtype = self.compute_dtype
        hidden: Tensor = self.embeddings(input_ids)
        normed = hidden
        # A residual is added where the next norm reads it, so each layer ends with the norm of the one after it.
        norms = [*(layer.attn_norm for layer in self.layers[1:]), self.final_norm]
        for layer, next_norm in zip(self.layers, norms, strict=True):
            hidden, normed = operations.add_norm(
                hidden, layer.attn(normed, attention, layer.full), layer.mlp_norm, dtype
            )
            last = next_norm is self.final_norm
            update = layer.mlp(normed, operations)
            hidden, normed = operations.add_norm(hidden, update, next_norm, torch.float32 if last else dtype)
        return normed


class HeadAttention(nn.Module):
    """Full attention of a decision layer; queries only at `at` (n, q) when given, keys and values everywhere."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.decision_heads
        self.in_proj_weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(3 * width, width)))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = Linear(width, width)

    def forward(self, x: Tensor, attention: Attention, at: Tensor | None) -> Tensor:
        if at is None:
            mixed = attention.mix(
                F.linear(x, self.in_proj_weight, self.in_proj_bias).view(*x.shape[:-1], 3, self.heads, -1)
            )
        else:
            width = x.shape[-1]
            query = F.linear(x[at], self.in_proj_weight[:width], self.in_proj_bias[:width])
            key, value = F.linear(x, self.in_proj_weight[width:], self.in_proj_bias[width:]).chunk(2, dim=-1)
            mixed = attention.at(*(split_heads(part, self.heads) for part in (query, key, value)))
        out: Tensor = self.out_proj(mixed)
        return out


class HeadLayer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.self_attn = HeadAttention(config)
        self.linear1 = Linear(width, 4 * width)
        self.linear2 = Linear(4 * width, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear2(F.relu(self.linear1(x)))
        return out


class Head(nn.Module):
    """The decision layers, without a final norm: (T, d) float32 to (n, q, d) at the places `at` (n, q)."""

    layers: Sequence[HeadLayer]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        layers = nn.ModuleList(HeadLayer(config) for _ in range(config.head_layers))
        self.layers = layers  # type: ignore[assignment]  # a ModuleList does not say of what

    def forward(self, hidden: Tensor, at: Tensor, attention: Attention, operations: Operations) -> Tensor:
        if not self.layers:
            return hidden[at]
        dtype = self.layers[0].linear1.weight.dtype
        normed = self.layers[0].norm1(hidden).to(dtype)
        for layer, following in zip(self.layers[:-1], self.layers[1:], strict=True):
            hidden, normed = operations.add_norm(hidden, layer.self_attn(normed, attention, None), layer.norm2, dtype)
            hidden, normed = operations.add_norm(hidden, layer.feed_forward(normed), following.norm1, dtype)
        # Nothing reads the last layer's other positions.
        layer = self.layers[-1]
        hidden, normed = operations.add_norm(hidden[at], layer.self_attn(normed, attention, at), layer.norm2, dtype)
        out: Tensor = hidden + layer.feed_forward(normed)
        return out


def act_features(logits: Tensor, counts: Tensor) -> Tensor:
    """What the action head reads of the softmaxed logits (n, k) and the option counts (n): (n, 4) float32.

    The largest probability, its lead over the second (0 when there is none), entropy / ln k and k / 255, where
    k = max(options, 2).
    """
    probabilities = logits.softmax(dim=-1)
    top = F.pad(probabilities, (0, 1)).topk(2, dim=-1).values
    # Clamped inside the logarithm: an absent option has probability 0, where the gradient of p ln p is infinite.
    entropy = -(probabilities * probabilities.clamp_min(1e-30).log()).sum(dim=-1)
    options = counts.clamp(min=2).float()
    spread = entropy / options.log()
    return torch.stack((top[:, 0], top[:, 0] - top[:, 1], spread, options / 255), dim=-1)


class DecisionModel(nn.Module):
    """Token ids to option logits and action logits. `decode` applies the `temperature` carried here."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.encoder = Encoder(config)
        self.type_emb = nn.Embedding(QUESTION_TYPES, width)
        self.head = Head(config)
        self.scorer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
        self.act_head = nn.Sequential(
            nn.Linear(width + ACT_FEATURES, ACT_HIDDEN), nn.GELU(), nn.Linear(ACT_HIDDEN, config.act_outputs)
        )
        self.register_buffer("temperature", torch.ones(QUESTION_TYPES))

    def forward(self, inputs: ModelInputs, operations: Operations | None = None) -> tuple[Tensor, Tensor]:
        """Logits (n, k) float32, ABSENT_LOGIT where an option is absent, and action logits (n, act_outputs) float32."""
        operations = operations or Operations()
        attention = operations.attention(inputs, self.attention_spec)
        encoded = self.encoder(inputs.input_ids, attention, operations)
        return self.decide(encoded, inputs, attention, operations)

    @property
    def attention_spec(self) -> AttentionSpec:
        encoder = self.encoder
        return AttentionSpec(encoder.full_table, encoder.sliding_table, self.config.reach, encoder.compute_dtype)

    def decide(
        self, encoded: Tensor, inputs: ModelInputs, attention: Attention, operations: Operations
    ) -> tuple[Tensor, Tensor]:
        """The head and the scoring tail over the encoder's output (T, d) float32."""
        hidden = encoded + self.type_emb(inputs.qtype[inputs.sequence])
        first = inputs.offsets[:-1].long().clamp(max=encoded.shape[0] - 1)  # an empty sequence at the end has none
        at = torch.cat((first[:, None], inputs.markers), dim=1)
        hidden = self.head(hidden, at, attention, operations)
        return self.score(hidden[:, 0], hidden[:, 1:], inputs.marker_counts)

    def score(self, first: Tensor, options: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The scoring tail over the first token's (n, d) and the markers' (n, k, d) hidden states, in float32."""
        logits = self.scorer(options).squeeze(-1)
        absent = torch.arange(logits.shape[1], device=logits.device) >= counts[:, None]
        logits = logits.masked_fill(absent, ABSENT_LOGIT)
        act = self.act_head(torch.cat((first, act_features(logits, counts)), dim=-1))
        return logits, act
