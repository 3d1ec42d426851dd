"""Split-KV verify attention in Triton: one kernel over (row tile, split, request), a second reduces.

A row of a tile is one (node, head) of a request: all of them share the request's latent rows, so a KV tile is
read once for BLOCK_M rows, scored against the latent and the rope part, and its latent part is used again as
V. Splits divide the length each request really has, on the device: a short request in a long bucket gives
every split its share, and a split left without columns returns at once.

Accuracy: scores, softmax and accumulation are fp32; weights and partials are rounded to the input dtype,
which in bf16 adds about as much error as the rounding of the output does (tests hold all of it under 4e-3).
"""

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from workbench.attention import splits
from workbench.attention.plan import DTYPES, VerifyCall, VerifyPlan, partial_sizes
from workbench.attention.triton_tiles import (
    FULL,
    LN2,
    LOG2E,
    MASK_CODES,
    load_plain,
    load_slots,
    mask_start,
    narrow,
    prefetch_rows,
    request_bounds,
    requests_tile,
    softmax_step,
    tile_dot,
    visible_tile,
)
from workbench.shapes import DTYPE_BYTES, VerifyShape
from workbench.targets import HardwareTarget

INTERPRETED = triton.knobs.runtime.interpret
MANY_ROWS = 1024  # of a batch: fewer keep the GPU busy with 128 columns a program, more do so with 256
SHORT_TOKENS_PER_SM = 96  # measured: 64 short, 250 not
_LEAST = {"reduce_ahead": 1, "reduce_columns": 16, "reduce_warps": 1}
_SHORT = {(16, 64): {"num_stages": 2}, (64, 64): {"block_n": 32}}  # by the (block_m, block_n) of sm_90


@triton.jit(do_not_specialize=["mask_words", "heads", "nsplit", "max_rows"])
def _split_kernel(
    q, kv, qo_indptr, kv_indptr, kv_indices, draft_slots, tree_mask, partial_out, partial_lse,
    q_stride_t, q_stride_h, kv_stride, mask_words, heads, nsplit, max_rows, scale_log2,
    LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_P2: tl.constexpr, ROPE_P2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, HAS_DRAFT_SLOTS: tl.constexpr,
    REQUESTS_P2: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
    PREFETCH_LINES: tl.constexpr, KEEP_IN_LOOP: tl.constexpr,
):  # fmt: skip
    """One tile of (node, head) rows, one split of the request's columns -> normalised partial and LSE."""
    tile, split, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    q_start, q_len, kv_start, listed, total = request_bounds(qo_indptr, kv_indptr, request, HAS_DRAFT_SLOTS)
    chunk = tl.cdiv(tl.cdiv(total, BLOCK_N), nsplit) * BLOCK_N
    begin = split * chunk
    end = tl.minimum(begin + chunk, total)
    if (tile * BLOCK_M < q_len * heads) & (begin < end):
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row_ok = row < q_len * heads
        node, head = row // heads, row % heads
        latent, rope = tl.arange(0, LATENT_P2), tl.arange(0, ROPE_P2)
        q_row = (
            q + (q_start + node).to(tl.int64)[:, None] * q_stride_t + head.to(tl.int64)[:, None] * q_stride_h
        )
        latent_ok = latent[None, :] < LATENT
        q_latent = tl.load(q_row + latent[None, :], mask=row_ok[:, None] & latent_ok, other=0.0)
        rope_ok = rope[None, :] < ROPE
        if ROPE > 0:
            q_rope = tl.load(q_row + LATENT + rope[None, :], mask=row_ok[:, None] & rope_ok, other=0.0)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        sum_weights = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, LATENT_P2), tl.float32)

        # Whole blocks of prefix columns: no mask, no bounds. Slots are loaded a block ahead, else each block
        # would wait for two dependent trips to memory. The load stands behind the scores on purpose: before
        # them ptxas spills inside this loop. The prefetch has its own slots, two blocks ahead: fed into
        # `slots` they keep Triton from copying KV tiles asynchronously.
        plain_end = begin
        if MASK != FULL:
            plain_end = begin + tl.maximum(tl.minimum(end, total - q_len) - begin, 0) // BLOCK_N * BLOCK_N
        offset = tl.arange(0, BLOCK_N)
        slots = load_plain(kv_indices, kv_start, begin + offset, plain_end)
        if PREFETCH_LINES > 0:
            next_slots = load_plain(kv_indices, kv_start, begin + BLOCK_N + offset, plain_end)
        for column_begin in tl.range(begin, plain_end, BLOCK_N, disable_licm=KEEP_IN_LOOP):
            kv_row = kv + slots.to(tl.int64)[:, None] * kv_stride
            if LATENT == LATENT_P2:
                k_latent = tl.load(kv_row + latent[None, :])
            else:
                k_latent = tl.load(kv_row + latent[None, :], mask=latent_ok, other=0.0)
            if PREFETCH_LINES > 0:
                prefetch_rows(kv, next_slots, kv_stride, LATENT + ROPE, PREFETCH_LINES)
            scores = tile_dot(q_latent, tl.trans(k_latent), None, INTERPRETED)
            if ROPE > 0:
                if ROPE == ROPE_P2:
                    k_rope = tl.load(kv_row + LATENT + rope[None, :])
                else:
                    k_rope = tl.load(kv_row + LATENT + rope[None, :], mask=rope_ok, other=0.0)
                scores = tile_dot(q_rope, tl.trans(k_rope), scores, INTERPRETED)
            slots = load_plain(kv_indices, kv_start, column_begin + BLOCK_N + offset, plain_end)
            if PREFETCH_LINES > 0:
                next_slots = load_plain(kv_indices, kv_start, column_begin + 2 * BLOCK_N + offset, plain_end)
            weights, top, sum_weights, factor = softmax_step(scores * scale_log2, top, sum_weights)
            narrowed = narrow(weights, k_latent.dtype, INTERPRETED)
            acc = tile_dot(narrowed, k_latent, acc * factor[:, None], INTERPRETED)

        # The rest: the columns around the draft rows, or all of them under a full mask.
        mask_begin = mask_start(qo_indptr, kv_indptr, request, MASK, HAS_DRAFT_SLOTS, REQUESTS_P2)
        for column_begin in tl.range(plain_end, end, BLOCK_N, num_stages=1):
            column = column_begin + offset
            column_ok = column < end
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
            slots_here = load_slots(
                kv_indices, draft_slots, kv_start, q_start, listed, column, column_ok, HAS_DRAFT_SLOTS
            )
            kv_row = kv + slots_here[:, None] * kv_stride
            k_latent = tl.load(kv_row + latent[None, :], mask=column_ok[:, None] & latent_ok, other=0.0)
            scores = tile_dot(q_latent, tl.trans(k_latent), None, INTERPRETED)
            if ROPE > 0:
                k_rope = tl.load(
                    kv_row + LATENT + rope[None, :], mask=column_ok[:, None] & rope_ok, other=0.0
                )
                scores = tile_dot(q_rope, tl.trans(k_rope), scores, INTERPRETED)
            scores = tl.where(visible, scores * scale_log2, float("-inf"))
            weights, top, sum_weights, factor = softmax_step(scores, top, sum_weights)
            # A hidden row has weight 0 and may hold anything: 0 * NaN must not reach those it is hidden from.
            values = tl.where(tl.abs(k_latent) < float("inf"), k_latent, 0.0).to(k_latent.dtype)
            acc = tile_dot(
                narrow(weights, k_latent.dtype, INTERPRETED), values, acc * factor[:, None], INTERPRETED
            )

        partial = (request * nsplit + split).to(tl.int64) * max_rows + row
        seen = sum_weights > 0
        acc = acc / tl.where(seen, sum_weights, 1.0)[:, None]  # nothing seen: acc is 0
        out_cell = partial_out + partial[:, None] * LATENT + latent[None, :]
        tl.store(
            out_cell, narrow(acc, partial_out.dtype.element_ty, INTERPRETED), mask=row_ok[:, None] & latent_ok
        )
        tl.store(
            partial_lse + partial, tl.where(seen, top + tl.log2(sum_weights), float("-inf")), mask=row_ok
        )


@triton.jit(do_not_specialize=["bs", "heads", "nsplit", "max_rows"])
def _reduce_kernel(
    partial_out, partial_lse, qo_indptr, kv_indptr, out, lse, bs, heads, nsplit, max_rows,
    LATENT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS_P2: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_DRAFT_SLOTS: tl.constexpr, REQUESTS_P2: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Weigh the partials of one (token, head) by their share of the total; padding rows get 0 and -inf.

    A thread adds up its own columns over all splits, AHEAD loads at a time: a tile of splits x columns would
    be summed through shared memory, with 10-way bank conflicts (ncu) that took more time than the loads.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    requests = tl.arange(0, REQUESTS_P2)
    ends = tl.load(qo_indptr + 1 + requests, mask=requests < bs, other=2147483647)
    request = tl.sum((ends <= token).to(tl.int32), axis=0)
    acc = tl.zeros((COLUMNS,), tl.float32)
    total_lse = float("-inf")
    if request < bs:
        q_start, _, _, _, total = request_bounds(qo_indptr, kv_indptr, request, HAS_DRAFT_SLOTS)
        chunk = tl.maximum(tl.cdiv(tl.cdiv(total, BLOCK_N), nsplit) * BLOCK_N, BLOCK_N)
        active = tl.cdiv(total, chunk)  # splits that had columns; the others wrote nothing
        if PDL:
            tl.extra.cuda.gdc_wait()
        first = (request * nsplit).to(tl.int64) * max_rows + (token - q_start) * heads + head
        split = tl.arange(0, SPLITS_P2)
        log2s = tl.load(partial_lse + first + split * max_rows, mask=split < active, other=float("-inf"))
        top = tl.max(log2s, axis=0)
        shift = tl.where(top == float("-inf"), 0.0, top)
        sum_weights = tl.sum(tl.exp2(log2s - shift), axis=0)
        for split_begin in range(0, active, AHEAD):
            for ahead in tl.static_range(AHEAD):
                part_row = first + tl.minimum(split_begin + ahead, active - 1) * max_rows
                part_log2 = tl.load(partial_lse + part_row)
                part = tl.load(partial_out + part_row * LATENT + column, mask=column < LATENT, other=0.0)
                weight = tl.where(split_begin + ahead < active, tl.exp2(part_log2 - shift), 0.0)
                acc += part.to(tl.float32) * weight
        if sum_weights > 0:
            acc = acc / sum_weights
            total_lse = (top + tl.log2(sum_weights)) * LN2
    cell = (token.to(tl.int64) * heads + head) * LATENT + column
    tl.store(out + cell, narrow(acc, out.dtype.element_ty, INTERPRETED), mask=column < LATENT)
    if tl.program_id(2) == 0:
        tl.store(lse + token.to(tl.int64) * heads + head, total_lse)


def supports(shape: VerifyShape, target: HardwareTarget) -> str | None:
    """Compiled on a GPU; on CPU only under Triton's interpreter."""
    if target.backend == "cpu" and not INTERPRETED:
        return "triton_split runs interpreted on cpu: set TRITON_INTERPRET=1 before triton is imported"
    return None


def default_tunables(shape: VerifyShape, target: HardwareTarget, batch_invariant: bool) -> dict[str, Any]:
    """The tile of this arch and row count, see `splits.tile`, and the choices around it.

    Measured on an H200 (tests/attention/triton_h200.json): programs with little to do want a short pipeline,
    and the prefetch costs 5 to 13 us at 8 heads and saves 2 % only with 64 heads x 16 nodes.
    """
    tile = splits.tile(shape, target, batch_invariant)
    tokens_per_sm = shape.bs * -(-shape.rows // tile["block_m"]) * shape.max_kv_len / max(1, target.sm_count)
    if target.compute_capability[0] == 9 and not batch_invariant and tokens_per_sm < SHORT_TOKENS_PER_SM:
        tile |= _SHORT.get((tile["block_m"], tile["block_n"]), {})
    return tile | {
        "prefetch": False,
        "partial_dtype": shape.dtype,
        "reduce_columns": 128 if shape.bs * shape.rows < MANY_ROWS else 256,
        "reduce_warps": 1,
        "reduce_ahead": 1 if target.backend == "cpu" else 8,  # interpreted, nothing is in flight
        "pdl": False,
    }


def choose_nsplit(
    shape: VerifyShape, target: HardwareTarget, tunables: dict[str, Any], batch_invariant: bool
) -> int:
    """What fills the SMs once, see `splits.choose`."""
    return splits.choose(shape, target, tunables["block_m"], tunables["block_n"], batch_invariant)


def workspaces(
    shape: VerifyShape, nsplit: int, tunables: dict[str, Any]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Partials in `partial_dtype`: half precision halves their traffic and keeps bf16 within 2e-3 of fp64."""
    _check_tunables(tunables)
    return partial_sizes(shape, nsplit, DTYPES[tunables["partial_dtype"]])


def _check_tunables(tunables: dict[str, Any]) -> None:
    """What Triton would refuse inside a launch, or never end on."""
    for name, least in _LEAST.items():
        value, is_ahead = tunables[name], name == "reduce_ahead"
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not is_count or not (is_ahead or value & (value - 1) == 0):
            kind = "an integer" if is_ahead else "a power of two"
            raise ValueError(f"{name}={value!r}: triton_split takes {kind} of at least {least}")
    if tunables["partial_dtype"] not in DTYPES:
        raise ValueError(
            f"partial_dtype={tunables['partial_dtype']!r}: triton_split takes {', '.join(DTYPES)}"
        )


def launch(plan: VerifyPlan, call: VerifyCall) -> None:
    """Both kernels, on the current stream; the grids come from the bucket's maxima and the rows of q."""
    if call.q.shape[0] == 0:
        return
    with np.errstate(divide="ignore") if INTERPRETED else nullcontext():
        # A row that sees nothing has weight 0: its log2 is -inf, as meant; NumPy, which interprets, warns.
        if plan.shape.rows and plan.shape.max_kv_len:
            _launch_split(plan, call)
        _launch_reduce(plan, call)


def _launch_split(plan: VerifyPlan, call: VerifyCall) -> None:
    shape, tune, drafts = plan.shape, plan.tunables, call.draft_slots
    mask, packed = call.tree_mask, call.mask_layout == "packed"
    row_bytes = shape.width * DTYPE_BYTES[shape.dtype]
    lines = triton.next_power_of_2(triton.cdiv(row_bytes, 128)) if tune["prefetch"] and not INTERPRETED else 0
    _split_kernel[(triton.cdiv(shape.rows, tune["block_m"]), plan.nsplit, call.bs)](
        call.q, call.kv, call.qo_indptr, call.kv_indptr, call.kv_indices,
        call.kv_indices if drafts is None else drafts,  # never read without HAS_DRAFT_SLOTS
        call.kv_indptr if mask is None else mask,  # never read by a causal kernel
        plan.workspaces["partial_out"], plan.workspaces["partial_lse"],
        call.q.stride(0), call.q.stride(1), call.kv.stride(0),
        mask.shape[1] if packed and mask is not None else 0,
        shape.heads, plan.nsplit, max(shape.rows, 1), call.sm_scale * LOG2E,
        LATENT=shape.latent, ROPE=shape.rope, LATENT_P2=padded_width(shape.latent),
        ROPE_P2=padded_width(shape.rope), BLOCK_M=tune["block_m"], BLOCK_N=tune["block_n"],
        MASK=MASK_CODES[call.mask_layout], HAS_DRAFT_SLOTS=drafts is not None,
        REQUESTS_P2=requests_tile(call.bs), INTERPRETED=INTERPRETED, PDL=tune["pdl"],
        PREFETCH_LINES=lines, # wgmma descriptors of q are loop invariants: hoisted, they spill
        KEEP_IN_LOOP=tune["block_m"] >= 64 and plan.target.compute_capability[0] == 9,
        num_warps=tune["num_warps"], num_stages=tune["num_stages"],
    )  # fmt: skip


def _launch_reduce(plan: VerifyPlan, call: VerifyCall) -> None:
    shape, tune = plan.shape, plan.tunables
    columns = min(tune["reduce_columns"], padded_width(shape.latent))
    splits_p2 = triton.next_power_of_2(plan.nsplit)
    options = {"launch_pdl": True} if tune["pdl"] else {}
    _reduce_kernel[(call.q.shape[0], shape.heads, triton.cdiv(shape.latent, columns))](
        plan.workspaces["partial_out"], plan.workspaces["partial_lse"], call.qo_indptr, call.kv_indptr,
        call.out, call.lse, call.bs, shape.heads, plan.nsplit, max(shape.rows, 1),
        LATENT=shape.latent, COLUMNS=columns, BLOCK_N=tune["block_n"], SPLITS_P2=splits_p2,
        AHEAD=tune["reduce_ahead"], HAS_DRAFT_SLOTS=call.draft_slots is not None,
        REQUESTS_P2=requests_tile(call.bs), PDL=tune["pdl"], INTERPRETED=INTERPRETED,
        num_warps=tune["reduce_warps"], **options,
    )  # fmt: skip


def padded_width(width: int) -> int:
    """Columns of a tile that holds `width`; tl.dot takes 16 at least."""
    return max(16, triton.next_power_of_2(width))


KERNELS = (_split_kernel, _reduce_kernel)
