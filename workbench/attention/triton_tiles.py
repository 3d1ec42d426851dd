"""Device functions the Triton variants share: where a request lies, its slots, what a node sees.

All that depends on lengths is read on the device: one captured launch serves every step of its bucket.
"""

import triton
import triton.language as tl

CAUSAL, TREE, FULL, PACKED = (tl.constexpr(code) for code in range(4))
MASK_CODES = {"causal": 0, "tree": 1, "full": 2, "packed": 3}
LOG2E = 1.4426950408889634
LN2 = tl.constexpr(0.6931471805599453)


def requests_tile(bs: int) -> int:
    """Power-of-two tile over requests; one value up to 8, so that batch sizes share a compiled kernel."""
    return max(8, triton.next_power_of_2(bs))


@triton.jit
def request_bounds(qo_indptr, kv_indptr, request, HAS_DRAFT_SLOTS: tl.constexpr):
    """(q_start, q_len, kv_start, listed, total): `listed` rows in kv_indices, `total` with the drafts."""
    q_start = tl.load(qo_indptr + request)
    q_len = tl.load(qo_indptr + request + 1) - q_start
    kv_start = tl.load(kv_indptr + request)
    listed = tl.load(kv_indptr + request + 1) - kv_start
    total = listed
    if HAS_DRAFT_SLOTS:
        total += q_len
    return q_start, q_len, kv_start, listed, total


@triton.jit
def mask_start(
    qo_indptr,
    kv_indptr,
    request,
    MASK: tl.constexpr,
    HAS_DRAFT_SLOTS: tl.constexpr,
    REQUESTS_P2: tl.constexpr,
):
    """Entries of the flat mask that belong to the requests before this one, int64."""
    start = tl.full((), 0, tl.int64)
    if MASK == TREE or MASK == FULL:  # noqa: SIM109 (Triton compiles no `in`)
        before = tl.arange(0, REQUESTS_P2)
        is_before = before < request
        q_begin = tl.load(qo_indptr + before, mask=is_before, other=0)
        q_lens = (tl.load(qo_indptr + before + 1, mask=is_before, other=0) - q_begin).to(tl.int64)
        columns = q_lens
        if MASK == FULL:
            kv_begin = tl.load(kv_indptr + before, mask=is_before, other=0)
            columns = (tl.load(kv_indptr + before + 1, mask=is_before, other=0) - kv_begin).to(tl.int64)
            if HAS_DRAFT_SLOTS:
                columns += q_lens
        start = tl.sum(q_lens * columns, axis=0)
    return start


@triton.jit
def load_plain(kv_indices, kv_start, column, end):
    """Pool slots of listed columns before `end`, int32 (a pool has fewer than 2^31 rows); 0 from there on."""
    return tl.load(kv_indices + kv_start + column, mask=column < end, other=0).to(tl.int32)


@triton.jit
def load_slots(
    kv_indices, draft_slots, kv_start, q_start, listed, column, in_range, HAS_DRAFT_SLOTS: tl.constexpr
):
    """Pool slots of a request's columns, int64: kv_indices, then draft slots; 0 out of range."""
    if HAS_DRAFT_SLOTS:
        is_listed = column < listed
        slots = tl.load(kv_indices + kv_start + column, mask=in_range & is_listed, other=0).to(tl.int64)
        drafts = tl.load(
            draft_slots + q_start + (column - listed), mask=in_range & (column >= listed), other=0
        )
        slots += drafts.to(tl.int64)
    else:
        slots = tl.load(kv_indices + kv_start + column, mask=in_range, other=0).to(tl.int64)
    return slots


@triton.jit
def visible_tile(
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
    MASK: tl.constexpr,
):
    """[rows, columns] bool: may this node attend to this column? The mask alone decides among draft rows."""
    in_tile = row_ok[:, None] & column_ok[None, :]
    draft = column - (total - q_len)  # < 0: prefix
    if MASK == CAUSAL:
        visible = in_tile & (draft[None, :] <= node[:, None])
    elif MASK == FULL:
        cell = mask_begin + node.to(tl.int64)[:, None] * total + column[None, :]
        visible = in_tile & (tl.load(tree_mask + cell, mask=in_tile, other=0) != 0)
    else:
        is_draft = in_tile & (draft >= 0)[None, :]
        if MASK == TREE:
            cell = mask_begin + node.to(tl.int64)[:, None] * q_len + draft[None, :]
            bit = tl.load(tree_mask + cell, mask=is_draft, other=0)
        else:
            cell = (q_start + node).to(tl.int64)[:, None] * mask_words + (draft // 32)[None, :]
            bit = (tl.load(tree_mask + cell, mask=is_draft, other=0) >> (draft % 32)[None, :]) & 1
        visible = in_tile & ((draft < 0)[None, :] | (bit != 0))
    return visible


@triton.jit
def prefetch_rows(kv, slots, kv_stride, WIDTH: tl.constexpr, LINES_P2: tl.constexpr):
    """Ask L2 for the rows of the next block, 128 bytes a lane; rows past the end come as slot 0."""
    ELEMENTS: tl.constexpr = 128 // (kv.dtype.element_ty.primitive_bitwidth // 8)
    column = tl.minimum(tl.arange(0, LINES_P2) * ELEMENTS, WIDTH - 1)
    address = (kv + slots.to(tl.int64)[:, None] * kv_stride + column[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def tile_dot(a, b, acc, INTERPRETED: tl.constexpr):
    """acc + a @ b in fp32, fp32 inputs in IEEE precision.

    INTERPRETED: Triton 3.9's interpreter multiplies the raw 16-bit patterns of bf16 operands, which gives
    garbage without any error; widening first gives the exact products that a tensor core forms.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 to `dtype`, to nearest even as hardware does.

    INTERPRETED: Triton 3.9's interpreter cuts bf16 off instead of rounding, which triples the error; after
    rounding the bits by hand the cut is exact.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def softmax_step(scores, top, total):
    """Online softmax in base 2 -> (weights, top, total, factor of the old acc); safe when all is hidden."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
    factor = tl.exp2(top - shift)
    weights = tl.exp2(scores - shift[:, None])
    return weights, new_top, total * factor + tl.sum(weights, axis=1), factor
