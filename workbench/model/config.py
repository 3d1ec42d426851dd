"""Sizes of a target and of a drafter; byte counts follow from them."""

import math
from dataclasses import dataclass
from typing import Literal

from workbench.shapes import DTYPE_BYTES

Scoring = Literal["sigmoid", "softmax"]
Selection = Literal["noaux_tc", "greedy", "group_limited_greedy"]


@dataclass(frozen=True)
class Yarn:
    """Context extension by YaRN (arXiv 2309.00071), with DeepSeek's two mscale fields."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def rope_scale(self) -> float:
        """Factor on cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)

    @property
    def score_scale(self) -> float:
        """Factor on the attention scores."""
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts of a layer; `resident` < `routed` keeps fewer in memory and maps ids onto them."""

    routed: int
    per_token: int
    width: int
    shared: int = 1  # shared experts, each of `width`
    groups: int = 1
    groups_kept: int = 1
    scoring: Scoring = "sigmoid"
    selection: Selection = "noaux_tc"
    normalise: bool = True
    scaling: float = 1.0
    resident: int = 0

    @property
    def resident_experts(self) -> int:
        return self.resident or self.routed


@dataclass(frozen=True)
class TargetConfig:
    """A DeepSeek-V2/V3 style target: latent attention, dense first layers, then mixture of experts."""

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    latent: int  # kv_lora_rank
    rope: int  # qk_rope_head_dim
    nope: int  # qk_nope_head_dim
    v_head_dim: int
    intermediate_size: int
    first_dense: int
    moe: MoEConfig | None
    q_lora: int | None = None
    attention_bias: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    yarn: Yarn | None = None
    rope_interleave: bool = True
    tie_embeddings: bool = False
    max_position: int = 4096
    tap_layers: tuple[int, ...] = ()  # hidden states after these layers condition the drafter
    dtype: str = "bf16"
    shared_layers: int = 0  # > 0: only this many distinct MoE blocks are stored (said in the preset's name)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r}: choose one of {', '.join(DTYPE_BYTES)}")
        if self.rope % 2:
            raise ValueError(f"rope={self.rope} must be even: rotary dimensions come in pairs")
        if self.moe is None and self.first_dense < self.num_layers:
            raise ValueError(
                f"first_dense={self.first_dense} of {self.num_layers} layers but no experts: give moe="
            )
        bad = [i for i in self.tap_layers if not 0 <= i < self.num_layers]
        if bad:
            raise ValueError(f"tap layers {bad} do not exist: choose from 0..{self.num_layers - 1}")

    @property
    def width(self) -> int:
        """Columns of a pool row: latent + rope."""
        return self.latent + self.rope

    @property
    def sm_scale(self) -> float:
        scale = (self.nope + self.rope) ** -0.5
        return scale * self.yarn.score_scale if self.yarn else scale

    @property
    def moe_layers(self) -> int:
        return self.num_layers - min(self.first_dense, self.num_layers)

    @property
    def attention_params(self) -> int:
        """Matrices of one attention block."""
        heads_qk = self.num_heads * (self.nope + self.rope)
        query = (
            self.hidden_size * heads_qk
            if self.q_lora is None
            else self.q_lora * (self.hidden_size + heads_qk)
        )
        kv = self.hidden_size * self.width + self.latent * self.num_heads * (self.nope + self.v_head_dim)
        return query + kv + self.num_heads * self.v_head_dim * self.hidden_size

    @property
    def expert_params(self) -> int:
        """Matrices of one routed expert."""
        return 3 * self.hidden_size * self.moe.width if self.moe else 0

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)

    @property
    def dense_params(self) -> int:
        """Everything but the routed experts."""
        mlp = min(self.first_dense, self.num_layers) * 3 * self.hidden_size * self.intermediate_size
        shared = 0
        if self.moe:
            shared = self.moe_layers * (
                self.moe.shared * self.expert_params + self.moe.routed * self.hidden_size
            )
        return self.embedding_params + self.num_layers * self.attention_params + mlp + shared

    @property
    def routed_params(self) -> int:
        """Routed experts held in memory."""
        stored = min(self.shared_layers or self.moe_layers, self.moe_layers)
        return stored * self.moe.resident_experts * self.expert_params if self.moe else 0

    @property
    def params(self) -> int:
        """Parameters in matrices that are held in memory (norms left out)."""
        return self.dense_params + self.routed_params

    @property
    def weight_bytes(self) -> int:
        return self.params * DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Pool bytes of one token over all layers."""
        return self.num_layers * self.width * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash-style block drafter on a target's hidden states; embedding and head are the target's."""

    hidden_size: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int
    mask_token_id: int
    tap_layers: tuple[int, ...]
    vocab_size: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    yarn: Yarn | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    is_causal: bool | None = None  # None = causal exactly in sliding layers, as the published code has it
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # 0 = none, else cap * tanh(logits / cap)
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.block_size < 2:
            raise ValueError(
                f"block_size={self.block_size} must be at least 2: the bonus token and one draft"
            )

    def is_sliding(self, layer: int) -> bool:
        """Whether `layer` sees only the last `sliding_window` tokens."""
        kind = self.layer_types[layer] if self.layer_types else "full_attention"
        return kind == "sliding_attention" and self.sliding_window is not None

    @property
    def drafts(self) -> int:
        """L: draft slots of a block, the bonus token left out."""
        return self.block_size - 1

    @property
    def latent(self) -> int:
        """Value columns of a pool row as verify attention sees it."""
        return self.head_dim

    @property
    def width(self) -> int:
        """Columns of one kv head's pool row, [V | K]."""
        return 2 * self.head_dim

    @property
    def group_heads(self) -> int:
        """Query heads that share one kv head: the head count of every `attend` call."""
        return self.num_heads // self.kv_heads

    @property
    def sm_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def params(self) -> int:
        """Parameters in matrices (the target's embedding and head left out)."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.kv_heads)
        per_layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * per_layer + len(self.tap_layers) * self.hidden_size**2

    @property
    def weight_bytes(self) -> int:
        return self.params * DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        return self.num_layers * self.kv_heads * self.width * DTYPE_BYTES[self.dtype]
