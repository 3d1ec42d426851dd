"""Multi-head latent attention: absorbed over the pool at decode, expanded at prefill and in training."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.model.batch import Attend, ForwardBatch
from workbench.model.config import TargetConfig
from workbench.model.layers import RMSNorm, rotate


class LatentAttention(nn.Module):
    """Weights carry the names of the Hugging Face checkpoints."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        c, bias = config, config.attention_bias
        self.config = config
        self.head_size = c.nope + c.rope
        if c.q_lora is None:
            self.q_proj = nn.Linear(c.hidden_size, c.num_heads * self.head_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora, bias=bias)
            self.q_a_layernorm = RMSNorm(c.q_lora)
            self.q_b_proj = nn.Linear(c.q_lora, c.num_heads * self.head_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.width, bias=bias)
        self.kv_a_layernorm = RMSNorm(c.latent)
        self.kv_b_proj = nn.Linear(c.latent, c.num_heads * (c.nope + c.v_head_dim), bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.v_head_dim, c.hidden_size, bias=bias)

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(q_nope [..., H, nope], q_rope [..., H, rope]) of x [..., hidden]."""
        c = self.config
        flat = self.q_proj(x) if c.q_lora is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_rope = flat.unflatten(-1, (c.num_heads, self.head_size)).split((c.nope, c.rope), dim=-1)
        return q_nope, rotate(q_rope, cos[..., None, :], sin[..., None, :], interleaved=c.rope_interleave)

    def latent_rows(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What the pool keeps of x [..., hidden]: [..., latent + rope]."""
        c = self.config
        latent, rope = self.kv_a_proj_with_mqa(x).split((c.latent, c.rope), dim=-1)
        return torch.cat(
            (self.kv_a_layernorm(latent), rotate(rope, cos, sin, interleaved=c.rope_interleave)), dim=-1
        )

    def head_maps(self) -> tuple[Tensor, Tensor]:
        """kv_b_proj as (key map [H, nope, latent], value map [H, v, latent])."""
        c = self.config
        maps = self.kv_b_proj.weight.view(c.num_heads, c.nope + c.v_head_dim, c.latent)
        return maps[:, : c.nope], maps[:, c.nope :]

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
        """x [T, hidden] -> [T, hidden]; writes the rows of this step, then attends in the latent space."""
        kv_layer.index_copy_(0, batch.out_slots, self.latent_rows(x, cos, sin).to(kv_layer.dtype))
        q_nope, q_rope = self.query(x, cos, sin)
        key_map, value_map = self.head_maps()
        absorbed = torch.bmm(q_nope.transpose(0, 1), key_map).transpose(0, 1)  # [T, H, latent]
        q = torch.cat((absorbed, q_rope), dim=-1).to(kv_layer.dtype)
        out = attend(q, kv_layer, batch, index).to(x.dtype)  # [T, H, latent]
        values = torch.bmm(out.transpose(0, 1), value_map.transpose(1, 2)).transpose(0, 1)  # [T, H, v]
        return self.o_proj(values.flatten(1))

    def expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [..., H, S, nope + rope] and values [..., H, S, v] of latent rows [..., S, latent + rope]."""
        c = self.config
        latent, rope = rows.split((c.latent, c.rope), dim=-1)
        heads = self.kv_b_proj(latent).unflatten(-1, (c.num_heads, c.nope + c.v_head_dim)).transpose(-3, -2)
        k_nope, values = heads.split((c.nope, c.v_head_dim), dim=-1)
        k_rope = rope.unsqueeze(-3).expand(*k_nope.shape[:-1], c.rope)
        return torch.cat((k_nope, k_rope), dim=-1), values

    def attend_expanded(
        self, x: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, visible: Tensor | None
    ) -> Tensor:
        """x [..., T, hidden] over rows [..., S, width]; `visible` [T, S] bool, None = causal with S == T."""
        q = torch.cat(self.query(x, cos, sin), dim=-1).transpose(-3, -2)  # [..., H, T, nope + rope]
        keys, values = self.expand(rows)
        out = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=visible, is_causal=visible is None, scale=self.config.sm_scale
        )
        return self.o_proj(out.transpose(-3, -2).flatten(-2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Whole sequences without a pool, x [B, T, hidden]: training and scoring."""
        return self.attend_expanded(x, cos, sin, self.latent_rows(x, cos, sin), None)

    def prefill(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, slots: Tensor, start: int
    ) -> Tensor:
        """x [T, hidden] at positions start..start+T-1; `slots` [start + T] holds the prefix too."""
        kv_layer.index_copy_(0, slots[start:], self.latent_rows(x, cos, sin).to(kv_layer.dtype))
        visible = None
        if start:
            span = torch.arange(len(slots), device=x.device)
            visible = span[None, :] <= span[start:, None]
        rows = kv_layer[slots].to(x.dtype)
        return self.attend_expanded(x[None], cos, sin, rows[None], visible)[0]
