"""What the models call to attend: one plan per bucket and model, with outputs that a graph can hold."""

from typing import Any

import torch
from torch import Tensor

from workbench.attention import make_plan, verify_attention
from workbench.model.batch import ForwardBatch
from workbench.shapes import VerifyShape

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


class PlannedAttention:
    """Verify attention of one model in one bucket; `ring` outputs stay apart (kv heads, joined later)."""

    def __init__(
        self,
        shape: VerifyShape,
        *,
        variant: str,
        nsplit: int | str,
        sm_scale: float,
        dtype: torch.dtype,
        device: torch.device,
        ring: int = 1,
    ) -> None:
        self.plan = make_plan(shape, variant=variant, nsplit=nsplit, device=device)
        rows, self.sm_scale, self.latent = shape.bs * shape.max_q_len, sm_scale, shape.latent
        self.outs = [
            torch.zeros(rows, shape.heads, shape.latent, dtype=dtype, device=device) for _ in range(ring)
        ]
        self.lses = [torch.zeros(rows, shape.heads, dtype=torch.float32, device=device) for _ in range(ring)]

    def __call__(self, q: Tensor, kv_layer: Tensor, batch: ForwardBatch, index: int) -> Tensor:
        """q [T, H, D], kv_layer [pool, D] -> [T, H, latent]."""
        slot = index % len(self.outs)
        out, _ = verify_attention(
            q,
            kv_layer,
            batch.qo_indptr,
            batch.kv_indptr,
            batch.kv_indices,
            batch.tree_mask,
            draft_slots=batch.out_slots,
            sm_scale=self.sm_scale,
            latent=self.latent,
            out=self.outs[slot],
            lse=self.lses[slot],
            plan=self.plan,
        )
        return out


def plan_target(
    config: Any, bs: int, width: int, max_context: int, dtype: torch.dtype, **options: Any
) -> PlannedAttention:
    """Attention of the target's verify pass."""
    layout = options.pop("mask_layout", "tree")
    shape = VerifyShape(
        bs,
        config.num_heads,
        width,
        max_context + width,
        DTYPE_NAMES[dtype],
        config.latent,
        config.rope,
        "int32",
        layout,
    )
    return PlannedAttention(shape, sm_scale=config.sm_scale, dtype=dtype, **options)


def plan_drafter(
    config: Any, bs: int, max_context: int, dtype: torch.dtype, **options: Any
) -> PlannedAttention:
    """Attention of the drafter's block: one call per kv head, rows [V | K]."""
    shape = VerifyShape(
        bs,
        config.group_heads,
        config.block_size,
        max_context + config.block_size,
        DTYPE_NAMES[dtype],
        config.latent,
        config.width - config.latent,
    )
    return PlannedAttention(shape, sm_scale=config.sm_scale, dtype=dtype, ring=config.kv_heads, **options)
