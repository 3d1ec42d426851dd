"""What a model forward is given and what it returns; widths are static, so it can be captured."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """Query rows of `bs` requests over a paged pool; prefix and this step's rows are addressed apart."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, committed length + depth
    out_slots: Tensor  # [T] int64, where the rows of this step are written
    qo_indptr: Tensor  # [bs+1] int32
    kv_indptr: Tensor  # [bs+1] int32, prefix only
    kv_indices: Tensor  # [capacity], prefix slots of all requests, one behind the other
    tree_mask: Tensor | None  # flat bool in the "tree" layout; None = causal among the rows of a request
    max_q_len: int
    max_kv_len: int  # prefix plus draft rows


@dataclass(frozen=True)
class TargetOutput:
    """Logits and the hidden states that the drafter is conditioned on."""

    logits: Tensor  # [T, V] fp32
    taps: Tensor  # [T, n_taps * hidden]


# (q [T, H, D], kv_layer [pool, D], batch, layer_index) -> [T, H, latent]; supplied by the decode loop
Attend = Callable[[Tensor, Tensor, ForwardBatch, int], Tensor]
