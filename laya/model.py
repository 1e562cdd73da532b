"""The forward pass, in plain PyTorch: a ModernBERT encoder, the decision head, and the scoring tail.

Owns the arithmetic and the parameter names, which equal the keys of a checkpoint. Does not own reading a checkpoint
(`checkpoint`), masks and rotation (`attention`), batches (`packing`, `collation`), or how fast it runs (`backends`).

The encoder is ModernBERT (Warner et al. 2024, arXiv:2412.13663): pre-norm, GeGLU, alternating full and sliding
attention. Dtypes are explicit, without autocast: the parameters that `in_compute_dtype` names decide the dtype of their
own matrix product, and all else, the residual stream above all, stays float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of PyTorch knows
from torch import Tensor, nn

from laya.attention import Masks, MaskSpec, attend, attention_masks, gather, rotary_table, rotate, split_heads

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


@dataclass(frozen=True)
class ModelInputs:
    """One padded batch of n sequences of L tokens with up to k options each, all on one device.

    input_ids (n, L) int64; lengths (n) int64, real tokens of each; marker_pos (n, k) int64, 0 where absent;
    marker_counts (n) int64; qtype (n) int64: choice 0, score 1, noul 2. `padded` is False only when every length is L:
    known on the host, it spares the mask without a device read.
    """

    input_ids: Tensor
    lengths: Tensor
    marker_pos: Tensor
    marker_counts: Tensor
    qtype: Tensor
    padded: bool = True


def in_compute_dtype(name: str) -> bool:
    """Whether the parameter `name` takes part in a matrix product that runs in the compute dtype."""
    return name.startswith(("encoder.layers.", "head.layers.")) and "norm" not in name


class Linear(nn.Linear):
    """A matrix product in its own weight's dtype, whatever comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.Wqkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias)
        self.Wo = Linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None) -> Tensor:
        qkv = self.Wqkv(x).view(*x.shape[:-1], 3, self.heads, -1)
        query, key = rotate(qkv[:, :, :2], table).unbind(2)
        out: Tensor = self.Wo(attend(query, key, qkv[:, :, 2], mask))
        return out


class GatedMLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.Wi = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.Wo = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.Wi(x).chunk(2, dim=-1)
        out: Tensor = self.Wo(F.gelu(value) * gate)
        return out


class EncoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.full = config.full_layers[index]
        # The embeddings are normalised already, so the first layer has no norm and the checkpoint no key for one.
        self.attn_norm = nn.Identity() if index == 0 else norm(config)
        self.attn = Attention(config)
        self.mlp_norm = norm(config)
        self.mlp = GatedMLP(config)

    def forward(self, hidden: Tensor, table: Tensor, mask: Tensor | None) -> Tensor:
        hidden = hidden + self.attn(self.attn_norm(hidden), table, mask)
        out: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return out


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
    """ModernBERT: (n, L) token ids to (n, L, d) float32, after the final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(EncoderLayer(config, index) for index in range(len(config.full_layers)))
        self.final_norm = norm(config)
        width = config.hidden_size // config.heads
        for kind, theta in (("full", config.full_theta), ("sliding", config.sliding_theta)):
            self.register_buffer(f"{kind}_table", rotary_table(config.max_len, width, theta), persistent=False)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the matrix products and of the masks."""
        return next(self.layers.parameters()).dtype  # layer 0 has no norm before its first product

    def forward(self, input_ids: Tensor, masks: Masks) -> Tensor:
        hidden = self.embeddings(input_ids)
        for layer in self.layers:
            table, mask = (self.full_table, masks.full) if layer.full else (self.sliding_table, masks.sliding)
            hidden = layer(hidden, table, mask)
        out: Tensor = self.final_norm(hidden)
        return out


class HeadAttention(nn.Module):
    """Full attention of a decision layer; queries only at `at` (n, q) when given, keys and values everywhere."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.decision_heads
        self.in_proj_weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(3 * width, width)))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None, at: Tensor | None) -> Tensor:
        x = x.to(self.in_proj_weight.dtype)
        if at is None:
            query, key, value = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        else:
            width = x.shape[-1]
            query = F.linear(gather(x, at), self.in_proj_weight[:width], self.in_proj_bias[:width])
            key, value = F.linear(x, self.in_proj_weight[width:], self.in_proj_bias[width:]).chunk(2, dim=-1)
        query, key, value = (split_heads(part, self.heads) for part in (query, key, value))
        out: Tensor = self.out_proj(attend(query, key, value, mask))
        return out


class HeadLayer(nn.Module):
    """A pre-norm transformer layer; with `at` (n, q), only those positions come out: (n, q, d)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.self_attn = HeadAttention(config)
        self.linear1 = Linear(width, 4 * width)
        self.linear2 = Linear(4 * width, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, hidden: Tensor, mask: Tensor | None, at: Tensor | None = None) -> Tensor:
        residual = hidden if at is None else gather(hidden, at)
        residual = residual + self.self_attn(self.norm1(hidden), mask, at)
        out: Tensor = residual + self.linear2(F.relu(self.linear1(self.norm2(residual))))
        return out


class Head(nn.Module):
    """The decision layers, without a final norm: (n, L, d) to (n, q, d) at the positions `at` (n, q)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HeadLayer(config) for _ in range(config.head_layers))

    def forward(self, hidden: Tensor, mask: Tensor | None, at: Tensor) -> Tensor:
        if not self.layers:
            return gather(hidden, at)
        for layer in self.layers[:-1]:
            hidden = layer(hidden, mask)
        # Nothing reads the last layer's other positions.
        out: Tensor = self.layers[-1](hidden, mask, at)
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

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Logits (n, k) float32, ABSENT_LOGIT where an option is absent, and action logits (n, act_outputs) float32."""
        spec = MaskSpec(self.config.reach, self.encoder.compute_dtype, inputs.padded)
        masks = attention_masks(inputs.lengths, inputs.input_ids.shape[1], spec)
        return self.decide(self.encoder(inputs.input_ids, masks), inputs, masks.full)

    def decide(self, encoded: Tensor, inputs: ModelInputs, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The head and the scoring tail over the encoder's output (n, L, d) float32; `mask` hides the padding."""
        hidden = encoded + self.type_emb(inputs.qtype)[:, None]
        first = torch.zeros_like(inputs.marker_pos[:, :1])
        hidden = self.head(hidden, mask, torch.cat((first, inputs.marker_pos), dim=1))
        return self.score(hidden[:, 0], hidden[:, 1:], inputs.marker_counts)

    def score(self, first: Tensor, options: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The scoring tail over the first token's (n, d) and the markers' (n, k, d) hidden states, in float32."""
        logits = self.scorer(options).squeeze(-1)
        absent = torch.arange(logits.shape[1], device=logits.device) >= counts[:, None]
        logits = logits.masked_fill(absent, ABSENT_LOGIT)
        act = self.act_head(torch.cat((first, act_features(logits, counts)), dim=-1))
        return logits, act


def parameter_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """The keys and shapes a checkpoint of this configuration must have."""
    with torch.device("meta"):
        model = DecisionModel(config)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}
