"""The target: paged absorbed forward for decode, expanded prefill, a pool-free pass for training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.model.batch import Attend, ForwardBatch, TargetOutput
from workbench.model.config import TargetConfig
from workbench.model.layers import GatedMLP, RMSNorm, Rotary
from workbench.model.mla import LatentAttention
from workbench.model.moe import MoE

if TYPE_CHECKING:
    from workbench.kv.pool import KVPool

PREFILL_CHUNK = 1024


class TargetLayer(nn.Module):
    def __init__(self, config: TargetConfig, index: int) -> None:
        super().__init__()
        self.self_attn = LatentAttention(config)
        if config.moe is not None and index >= config.first_dense:
            self.mlp: nn.Module = MoE(config.moe, config.hidden_size)
        else:
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)


class Target(nn.Module):
    """DeepSeek-V2/V3 family. Attribute names follow the checkpoints (`layers.3.self_attn.kv_b_proj`)."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TargetLayer(config, i) for i in range(config.num_layers))
        self.share_experts()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = Rotary(config.rope, config.rope_theta, config.yarn)

    def share_experts(self) -> None:
        """With `shared_layers`, let every MoE layer read the experts of one of the first few."""
        distinct = self.config.shared_layers
        blocks = [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoE)]
        for index, block in enumerate(blocks):
            if distinct and index >= distinct:
                block.experts = blocks[index % distinct].experts

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def set_tap_layers(self, layers: tuple[int, ...]) -> None:
        """Hand the hidden states after `layers` to the drafter from now on."""
        self.config = replace(self.config, tap_layers=layers)

    def make_pool(self, size: int) -> KVPool:
        """A pool of `size` rows per layer behind the dummy row 0."""
        from workbench.kv.pool import KVPool

        return KVPool(self.config.num_layers, size, self.config.width, self.dtype, self.device)

    def head(self, x: Tensor) -> Tensor:
        """Logits [..., V] fp32 of final hidden states x [..., hidden]."""
        return self.lm_head(self.norm(x)).float()

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, pool: KVPool, attend: Attend) -> TargetOutput:
        """One verify pass over T static rows; each row is written at `batch.out_slots` before it attends."""
        x = self.embed_tokens(batch.token_ids)  # [T, hidden]
        cos, sin = self.rotary(batch.positions)
        taps = []
        for index, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            x = x + layer.self_attn.decode(normed, cos, sin, pool.layer(index), batch, attend, index)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if index in self.config.tap_layers:
                taps.append(x)
        return TargetOutput(self.head(x), self.join_taps(taps, x))

    def join_taps(self, taps: list[Tensor], x: Tensor) -> Tensor:
        return torch.cat(taps, dim=-1) if taps else x.new_empty(*x.shape[:-1], 0)

    @torch.no_grad()
    def prefill(
        self,
        token_ids: Tensor,
        pool: KVPool,
        slots: Tensor,
        start: int = 0,
        prefix_slots: Tensor | None = None,
    ) -> TargetOutput:
        """Write token_ids [T] at `slots` [T] behind `start` tokens at `prefix_slots`; last token's logits.

        Raises ValueError when the prefix slots do not number `start`.
        """
        known = slots[:0] if prefix_slots is None else prefix_slots
        if len(known) != start or len(slots) != len(token_ids) or len(token_ids) == 0:
            raise ValueError(
                f"prefill of {len(token_ids)} tokens at start={start} got {len(slots)} slots and "
                f"{len(known)} prefix slots: give one slot per token and `start` prefix slots"
            )
        all_slots = torch.cat((known, slots))
        taps, x = [], None
        for begin in range(start, len(all_slots), PREFILL_CHUNK):
            end = min(begin + PREFILL_CHUNK, len(all_slots))
            x, tapped = self.prefill_chunk(
                token_ids[begin - start : end - start], pool, all_slots[:end], begin
            )
            taps.append(tapped)
        assert x is not None
        return TargetOutput(self.head(x[-1:]), torch.cat(taps))

    def prefill_chunk(
        self, token_ids: Tensor, pool: KVPool, slots: Tensor, start: int
    ) -> tuple[Tensor, Tensor]:
        x = self.embed_tokens(token_ids)
        cos, sin = self.rotary(torch.arange(start, len(slots), device=x.device))
        taps = []
        for index, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            x = x + layer.self_attn.prefill(normed, cos, sin, pool.layer(index), slots, start)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if index in self.config.tap_layers:
                taps.append(x)
        return x, self.join_taps(taps, x)

    def score(self, token_ids: Tensor, dropout: float = 0.0) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Whole sequences [B, T] without a pool: (hidden [B, T, hidden], taps [B, T, F], expert loads)."""
        x = self.embed_tokens(token_ids)
        cos, sin = self.rotary(torch.arange(token_ids.shape[1], device=token_ids.device))
        taps, loads = [], []
        for index, layer in enumerate(self.layers):
            x = x + F.dropout(layer.self_attn(layer.input_layernorm(x), cos, sin), dropout)
            normed = layer.post_attention_layernorm(x)
            if isinstance(layer.mlp, MoE):
                out, load = layer.mlp.forward_dense(normed)
                loads.append(load)
            else:
                out = layer.mlp(normed)
            x = x + F.dropout(out, dropout)
            if index in self.config.tap_layers:
                taps.append(x)
        return x, self.join_taps(taps, x), loads
