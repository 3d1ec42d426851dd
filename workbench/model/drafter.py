"""A DFlash-style drafter: one non-causal pass fills a whole block, conditioned on the target's hidden states.

Architecture as published with z-lab/dflash (arXiv 2602.06036): keys and values come from the projected target
states of the context, followed by the block itself; embedding and head are the target's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.model.batch import Attend, ForwardBatch
from workbench.model.config import DrafterConfig
from workbench.model.layers import GatedMLP, RMSNorm, Rotary, rotate
from workbench.model.target import Target

if TYPE_CHECKING:
    from workbench.kv.pool import KVPool


class BlockAttention(nn.Module):
    """Grouped-query attention; pool rows are [V | K] per kv head, so that verify attention reads them."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        c = config
        self.config = config
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps)

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., heads, head_dim] of x [..., hidden]."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.config.num_heads, self.config.head_dim)))
        return rotate(q, cos[..., None, :], sin[..., None, :], interleaved=False)

    def rows(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., kv_heads, 2 * head_dim] pool rows [V | K] of features x [..., hidden]."""
        shape = (self.config.kv_heads, self.config.head_dim)
        k = self.k_norm(self.k_proj(x).unflatten(-1, shape))
        k = rotate(k, cos[..., None, :], sin[..., None, :], interleaved=False)
        return torch.cat((self.v_proj(x).unflatten(-1, shape), k), dim=-1)

    def decode(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_layer: Tensor,
        batch: ForwardBatch,
        attend: Attend,
        index: int,
    ) -> Tensor:
        """x [bs * block, hidden]; one `attend` call per kv head, as layer `index * kv_heads + head`."""
        c = self.config
        kv_layer.index_copy_(0, batch.out_slots, self.rows(x, cos, sin).flatten(1).to(kv_layer.dtype))
        q = F.pad(self.query(x, cos, sin), (c.head_dim, 0)).to(kv_layer.dtype)  # [T, heads, 2 * head_dim]
        heads = kv_layer.unflatten(1, (c.kv_heads, c.width))
        outs = []
        for head in range(c.kv_heads):
            group = q[:, head * c.group_heads : (head + 1) * c.group_heads].contiguous()
            outs.append(attend(group, heads[:, head], batch, index * c.kv_heads + head).to(x.dtype))
        return self.o_proj(torch.cat(outs, dim=1).flatten(1))

    def forward(
        self, x: Tensor, context: Tensor, angles: tuple[Tensor, Tensor, Tensor, Tensor], visible: Tensor
    ) -> Tensor:
        """x [B, Q, hidden] over context features [B, S, hidden] and x; visible [B, 1, Q, S + Q] bool."""
        cos_x, sin_x, cos_c, sin_c = angles
        rows = torch.cat((self.rows(context, cos_c, sin_c), self.rows(x, cos_x, sin_x)), dim=1)
        v, k = rows.transpose(1, 2).chunk(2, dim=-1)  # [B, kv_heads, S + Q, head_dim]
        group = self.config.group_heads
        q = self.query(x, cos_x, sin_x).transpose(1, 2)
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.config.sm_scale)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DrafterLayer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)


class Drafter(nn.Module):
    """Attribute names follow the published checkpoints (`fc`, `hidden_norm`, `layers.0.self_attn.q_proj`)."""

    def __init__(self, config: DrafterConfig, target: Target) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.tap_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.yarn)
        self.target = [target]  # in a list: the target's weights are not the drafter's

    @property
    def embed_tokens(self) -> nn.Embedding:
        return self.target[0].embed_tokens

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def make_pool(self, size: int, max_bs: int) -> KVPool:
        """Context KV addressed by the target's slots 0..size, then scratch rows for `max_bs` blocks."""
        from workbench.kv.pool import KVPool

        c = self.config
        rows = size + max_bs * c.block_size
        return KVPool(c.num_layers, rows, c.kv_heads * c.width, self.dtype, self.device)

    def context(self, taps: Tensor) -> Tensor:
        """Context features [..., hidden] of target states [..., F]."""
        return self.hidden_norm(self.fc(taps.to(self.dtype)))

    @torch.no_grad()
    def write_context(self, taps: Tensor, positions: Tensor, slots: Tensor, pool: KVPool) -> None:
        """Project taps [T, F] and write every layer's rows at `slots` [T]."""
        features = self.context(taps)
        cos, sin = self.rotary(positions)
        for index, layer in enumerate(self.layers):
            rows = layer.self_attn.rows(features, cos, sin).flatten(1)
            kv_layer = pool.layer(index)
            kv_layer.index_copy_(0, slots, rows.to(kv_layer.dtype))

    @torch.no_grad()
    def draft(
        self,
        bonus: Tensor,
        start: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        pool: KVPool,
        attend: Attend,
    ) -> Tensor:
        """Logits [bs, L, V] fp32 of the L tokens behind `bonus` [bs], which sits at position `start` [bs]."""
        bs, block = len(bonus), self.config.block_size
        batch = self.block_batch(bonus, start, kv_indptr, kv_indices, pool)
        windowed = (
            self.window_batch(batch) if any(map(self.config.is_sliding, range(len(self.layers)))) else batch
        )
        x = self.embed(batch.token_ids)  # [bs * block, hidden]
        cos, sin = self.rotary(batch.positions)
        for index, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            seen = windowed if self.config.is_sliding(index) else batch
            x = x + layer.self_attn.decode(normed, cos, sin, pool.layer(index), seen, attend, index)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        drafts = self.norm(x).view(bs, block, -1)[:, 1:]
        return self.logits(drafts)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's embedding, [..., hidden]."""
        return self.embed_tokens(token_ids).to(self.dtype) * self.config.embedding_scale

    def logits(self, normed: Tensor) -> Tensor:
        """Through the target's head; fp32."""
        head = self.target[0].lm_head
        logits = head(normed.to(head.weight.dtype)).float() * self.config.logit_scale
        cap = self.config.logit_cap
        return torch.tanh(logits / cap) * cap if cap else logits

    def block_batch(
        self, bonus: Tensor, start: Tensor, kv_indptr: Tensor, kv_indices: Tensor, pool: KVPool
    ) -> ForwardBatch:
        """The block as draft rows, [bonus, MASK, ...] in the pool's last rows; each sees the whole block."""
        c, device = self.config, bonus.device
        bs, block = len(bonus), self.config.block_size
        token_ids = F.pad(bonus[:, None], (0, block - 1), value=c.mask_token_id).flatten()
        steps = torch.arange(block, device=device)
        rows = pool.layer(0).shape[0]
        return ForwardBatch(
            token_ids=token_ids,
            positions=(start[:, None] + steps).flatten(),
            out_slots=torch.arange(rows - bs * block, rows, device=device),
            qo_indptr=torch.arange(0, (bs + 1) * block, block, dtype=torch.int32, device=device),
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            tree_mask=self.block_mask(bs, bool(c.is_causal), device),
            max_q_len=block,
            max_kv_len=len(kv_indices) + block,
        )

    def block_mask(self, bs: int, causal: bool, device: torch.device) -> Tensor:
        """Flat "tree" mask of `bs` blocks: rows see the whole block, or only what is in front of them."""
        block = self.config.block_size
        visible = torch.ones(block, block, dtype=torch.bool, device=device)
        return (visible.tril() if causal else visible).expand(bs, block, block).flatten()

    def window_batch(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch as sliding-window layers see it: each prefix cut to its last `sliding_window` - 1 tokens.

        Exact for the block's first row; the published code moves the window on by one per row, so later rows
        see up to block_size - 1 tokens more here.
        """
        c, device = self.config, batch.kv_indptr.device
        assert c.sliding_window is not None
        reach = min(c.sliding_window - 1, len(batch.kv_indices))
        ends = batch.kv_indptr[1:].long()
        kept = (ends - batch.kv_indptr[:-1]).clamp(max=reach)  # [bs]
        indptr = F.pad(kept.cumsum(0), (1, 0))
        offsets = torch.arange(reach, device=device)
        inside = offsets < kept[:, None]  # [bs, reach]
        source = torch.where(inside, (ends - kept)[:, None] + offsets, 0)
        spare = len(kept) * reach  # entries behind a request's end land here
        place = torch.where(inside, indptr[:-1, None] + offsets, spare)
        indices = batch.kv_indices.new_zeros(spare + 1)
        indices.scatter_(0, place.flatten(), batch.kv_indices[source.flatten()])
        causal = c.is_causal is None or c.is_causal
        mask = self.block_mask(len(kept), causal, device)
        return replace(batch, kv_indptr=indptr.int(), kv_indices=indices, tree_mask=mask)
