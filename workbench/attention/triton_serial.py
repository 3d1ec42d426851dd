"""The baseline: one program per (q block, head, request) walks the whole prefix, then the draft rows; no
split.

This is how serving kernels that take a tree mask verify today (SGLang's extend attention, for one): the KV
rows of a request are read again by every head and every q block, and one program's latency grows with the
context. The block sizes per architecture are theirs too, for a query width above 256 columns.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from workbench.attention.plan import VerifyCall, VerifyPlan
from workbench.attention.triton_split import INTERPRETED, padded_width
from workbench.attention.triton_tiles import (
    FULL,
    LN2,
    LOG2E,
    MASK_CODES,
    load_slots,
    mask_start,
    narrow,
    request_bounds,
    requests_tile,
    softmax_step,
    tile_dot,
    visible_tile,
)
from workbench.shapes import DTYPE_BYTES, VerifyShape
from workbench.targets import HardwareTarget


@triton.jit(do_not_specialize=["mask_words", "heads"])
def _serial_kernel(
    q, kv, qo_indptr, kv_indptr, kv_indices, draft_slots, tree_mask, out, lse,
    q_stride_t, q_stride_h, kv_stride, mask_words, heads, scale_log2,
    LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_P2: tl.constexpr, ROPE_P2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, HAS_DRAFT_SLOTS: tl.constexpr,
    REQUESTS_P2: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """BLOCK_M nodes of one head against all columns of their request."""
    request, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_start, q_len, kv_start, listed, total = request_bounds(qo_indptr, kv_indptr, request, HAS_DRAFT_SLOTS)
    if block * BLOCK_M < q_len:
        node = block * BLOCK_M + tl.arange(0, BLOCK_M)
        row_ok = node < q_len
        latent, rope = tl.arange(0, LATENT_P2), tl.arange(0, ROPE_P2)
        latent_ok, rope_ok = latent[None, :] < LATENT, rope[None, :] < ROPE
        q_row = q + (q_start + node).to(tl.int64)[:, None] * q_stride_t + head.to(tl.int64) * q_stride_h
        q_latent = tl.load(q_row + latent[None, :], mask=row_ok[:, None] & latent_ok, other=0.0)
        if ROPE > 0:
            q_rope = tl.load(q_row + LATENT + rope[None, :], mask=row_ok[:, None] & rope_ok, other=0.0)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        sum_weights = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, LATENT_P2), tl.float32)
        mask_begin = mask_start(qo_indptr, kv_indptr, request, MASK, HAS_DRAFT_SLOTS, REQUESTS_P2)
        prefix_end = total - q_len
        for column_begin in tl.range(0, total, BLOCK_N):
            column = column_begin + tl.arange(0, BLOCK_N)
            column_ok = column < total
            slots = load_slots(
                kv_indices, draft_slots, kv_start, q_start, listed, column, column_ok, HAS_DRAFT_SLOTS
            )
            kv_row = kv + slots[:, None] * kv_stride
            k_latent = tl.load(kv_row + latent[None, :], mask=column_ok[:, None] & latent_ok, other=0.0)
            scores = tile_dot(q_latent, tl.trans(k_latent), None, INTERPRETED)
            if ROPE > 0:
                k_rope = tl.load(
                    kv_row + LATENT + rope[None, :], mask=column_ok[:, None] & rope_ok, other=0.0
                )
                scores = tile_dot(q_rope, tl.trans(k_rope), scores, INTERPRETED)
            scores = scores * scale_log2
            values = k_latent
            if (MASK == FULL) | (column_begin + BLOCK_N > prefix_end):
                visible = visible_tile(
                    tree_mask,
                    mask_begin,
                    mask_words,
                    q_start,
                    node,
                    row_ok,
                    column,
                    column_ok,
                    total,
                    q_len,
                    MASK,
                )
                scores = tl.where(visible, scores, float("-inf"))
                # A hidden row has weight 0 and may hold anything: 0 * NaN must not reach the rows it is
                # hidden from.
                values = tl.where(tl.abs(k_latent) < float("inf"), k_latent, 0.0).to(k_latent.dtype)
            weights, top, sum_weights, factor = softmax_step(scores, top, sum_weights)
            acc = tile_dot(
                narrow(weights, values.dtype, INTERPRETED), values, acc * factor[:, None], INTERPRETED
            )
        seen = sum_weights > 0
        acc = acc / tl.where(seen, sum_weights, 1.0)[:, None]
        row = (q_start + node).to(tl.int64) * heads + head
        out_cell = out + row[:, None] * LATENT + latent[None, :]
        tl.store(out_cell, narrow(acc, out.dtype.element_ty, INTERPRETED), mask=row_ok[:, None] & latent_ok)
        log2 = tl.where(seen, top + tl.log2(tl.where(seen, sum_weights, 1.0)), float("-inf"))
        tl.store(lse + row, log2 * LN2, mask=row_ok)


@triton.jit
def _clear_kernel(
    out, lse, qo_indptr, bs, heads, LATENT: tl.constexpr, LATENT_P2: tl.constexpr, HEADS_P2: tl.constexpr
):
    """Padding rows: out 0, lse -inf."""
    token = tl.program_id(0)
    if token >= tl.load(qo_indptr + bs):
        head, column = tl.arange(0, HEADS_P2), tl.arange(0, LATENT_P2)
        row = token.to(tl.int64) * heads + head
        zeros = tl.zeros((HEADS_P2, LATENT_P2), tl.float32).to(out.dtype.element_ty)
        is_there = (head < heads)[:, None] & (column < LATENT)[None, :]
        tl.store(out + row[:, None] * LATENT + column[None, :], zeros, mask=is_there)
        tl.store(lse + row, tl.full((HEADS_P2,), float("-inf"), tl.float32), mask=head < heads)


def supports(shape: VerifyShape, target: HardwareTarget) -> str | None:
    """Compiled on a GPU; on CPU only under Triton's interpreter."""
    if target.backend == "cpu" and not INTERPRETED:
        return "triton_serial runs interpreted on cpu: set TRITON_INTERPRET=1 before triton is imported"
    return None


def default_tunables(shape: VerifyShape, target: HardwareTarget, batch_invariant: bool) -> dict[str, Any]:
    """SGLang's blocks for wide heads: (32, 64) on sm_90, (16, 64) on sm_100, (32, 32) elsewhere."""
    block_m, block_n = {9: (32, 64), 10: (16, 64)}.get(target.compute_capability[0], (32, 32))
    if target.backend == "cuda" and DTYPE_BYTES[shape.dtype] == 4:
        block_m, block_n = 16, 16
    return {"block_m": block_m, "block_n": block_n, "num_warps": 8, "num_stages": 1}


def choose_nsplit(
    shape: VerifyShape, target: HardwareTarget, tunables: dict[str, Any], batch_invariant: bool
) -> int:
    return 1


def workspaces(
    shape: VerifyShape, nsplit: int, tunables: dict[str, Any]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {}


def launch(plan: VerifyPlan, call: VerifyCall) -> None:
    """One launch over (request, head, q block) and one that clears padding rows."""
    shape, tune, mask = plan.shape, plan.tunables, call.tree_mask
    tokens = call.q.shape[0]
    if tokens == 0:
        return
    if shape.rows:
        packed = call.mask_layout == "packed" and mask is not None
        _serial_kernel[(call.bs, shape.heads, triton.cdiv(shape.max_q_len, tune["block_m"]))](
            call.q, call.kv, call.qo_indptr, call.kv_indptr, call.kv_indices,
            call.kv_indices if call.draft_slots is None else call.draft_slots,
            call.kv_indptr if mask is None else mask,
            call.out, call.lse, call.q.stride(0), call.q.stride(1), call.kv.stride(0),
            mask.shape[1] if packed and mask is not None else 0, shape.heads, call.sm_scale * LOG2E,
            LATENT=shape.latent, ROPE=shape.rope, LATENT_P2=padded_width(shape.latent),
            ROPE_P2=padded_width(shape.rope), BLOCK_M=tune["block_m"], BLOCK_N=tune["block_n"],
            MASK=MASK_CODES[call.mask_layout], HAS_DRAFT_SLOTS=call.draft_slots is not None,
            REQUESTS_P2=requests_tile(call.bs), INTERPRETED=INTERPRETED,
            num_warps=tune["num_warps"], num_stages=tune["num_stages"],
        )  # fmt: skip
    _clear_kernel[(tokens,)](
        call.out, call.lse, call.qo_indptr, call.bs, shape.heads, LATENT=shape.latent,
        LATENT_P2=padded_width(shape.latent), HEADS_P2=triton.next_power_of_2(shape.heads),
    )  # fmt: skip


KERNELS = (_serial_kernel,)
