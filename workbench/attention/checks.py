"""Argument checks of verify_attention: shapes, dtypes and devices always, contents on CPU or on request."""

from itertools import pairwise

import torch

from workbench.attention.plan import DTYPES, VerifyCall, VerifyPlan
from workbench.attention.variants import MASK_LAYOUTS
from workbench.shapes import VerifyShape

_INDEX_DTYPES = (torch.int32, torch.int64)


def make_call(
    q: torch.Tensor,
    kv: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    tree_mask: torch.Tensor | None,
    draft_slots: torch.Tensor | None,
    mask_layout: str,
    sm_scale: float,
    latent: int,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> VerifyCall:
    """The checked call, missing outputs allocated. Raises ValueError that names what is wrong."""
    _check_query_and_pool(q, kv, latent)
    _check_indices(q, qo_indptr, kv_indptr, kv_indices, draft_slots)
    if tree_mask is not None:
        _check_mask(tree_mask, mask_layout, q)
    rows, heads, _ = q.shape
    if out is None:
        out = torch.empty((rows, heads, latent), dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    _check_output("out", out, (rows, heads, latent), q.dtype, q.device)
    _check_output("lse", lse, (rows, heads), torch.float32, q.device)
    return VerifyCall(
        q, kv, qo_indptr, kv_indptr, kv_indices, tree_mask, draft_slots, mask_layout, float(sm_scale), latent,
        out, lse,
    )  # fmt: skip


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _check_query_and_pool(q: torch.Tensor, kv: torch.Tensor, latent: int) -> None:
    _require(q.dim() == 3, f"q has shape {tuple(q.shape)}: expected [T, H, D]")
    _require(q.dtype in DTYPES.values(), f"q.dtype is {q.dtype}: expected one of {', '.join(DTYPES)}")
    _require(kv.dim() == 2, f"kv has shape {tuple(kv.shape)}: expected [pool, D], one layer of the pool")
    _require(kv.shape[1] == q.shape[2], f"kv has {kv.shape[1]} columns: expected {q.shape[2]}, as q has")
    _require(1 <= latent <= q.shape[2], f"latent={latent}: expected 1 to {q.shape[2]}, the width of q")
    _require(kv.dtype == q.dtype, f"kv.dtype is {kv.dtype}: expected {q.dtype}, as q has")
    for name, tensor in (("q", q), ("kv", kv)):
        stride = tensor.stride(-1)
        _require(
            stride == 1 or tensor.shape[-1] == 1,
            f"{name} has column stride {stride}: expected contiguous columns",
        )


def _check_indices(
    q: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    draft_slots: torch.Tensor | None,
) -> None:
    for name, indptr in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        _require(indptr.dtype == torch.int32, f"{name}.dtype is {indptr.dtype}: expected torch.int32")
        shape = tuple(indptr.shape)
        _require(
            indptr.dim() == 1 and shape[0] >= 2, f"{name} has shape {shape}: expected [bs+1] with bs >= 1"
        )
    _require(
        qo_indptr.shape == kv_indptr.shape,
        f"kv_indptr has {kv_indptr.shape[0]} entries: expected {qo_indptr.shape[0]}, as qo_indptr has",
    )
    slots = [("kv_indices", kv_indices)] + ([("draft_slots", draft_slots)] if draft_slots is not None else [])
    for name, tensor in slots:
        _require(
            tensor.dtype in _INDEX_DTYPES,
            f"{name}.dtype is {tensor.dtype}: expected torch.int32 or torch.int64",
        )
        _require(tensor.dim() == 1, f"{name} has shape {tuple(tensor.shape)}: expected one dimension")
    for name, tensor in [("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr), *slots]:
        _require(tensor.device == q.device, f"{name} is on {tensor.device}: expected {q.device}, as q is")
        _require(
            tensor.shape[0] <= 1 or tensor.stride(0) == 1,
            f"{name} has stride {tensor.stride(0)}: expected contiguous",
        )


def canonical_mask(mask: torch.Tensor | None, layout: str) -> torch.Tensor | None:
    """What launchers take: flat uint8 ("tree", "full"), int32 [T, words] ("packed"); views, no copies."""
    if mask is None:
        return None
    return mask.view(torch.int32) if layout == "packed" else mask.view(-1).view(torch.uint8)


def _check_mask(mask: torch.Tensor, layout: str, q: torch.Tensor) -> None:
    _require(
        layout in MASK_LAYOUTS[1:], f"mask_layout={layout!r}: choose one of {', '.join(MASK_LAYOUTS[1:])}"
    )
    _require(mask.device == q.device, f"tree_mask is on {mask.device}: expected {q.device}, as q is")
    _require(mask.is_contiguous(), f"tree_mask has strides {mask.stride()}: expected contiguous")
    if layout == "packed":
        _require(
            mask.dtype in (torch.uint32, torch.int32),
            f"tree_mask.dtype is {mask.dtype}: 'packed' expects torch.uint32",
        )
        _require(
            mask.dim() == 2 and mask.shape[0] >= q.shape[0],
            f"tree_mask has shape {tuple(mask.shape)}: 'packed' expects [{q.shape[0]}, ceil(max_q_len / 32)]",
        )
        return
    _require(
        mask.dtype in (torch.bool, torch.uint8),
        f"tree_mask.dtype is {mask.dtype}: {layout!r} expects bool or uint8",
    )


def _check_output(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    _require(tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}: expected {shape}")
    _require(tensor.dtype == dtype, f"{name}.dtype is {tensor.dtype}: expected {dtype}")
    _require(tensor.device == device, f"{name} is on {tensor.device}: expected {device}, as q is")
    _require(tensor.is_contiguous(), f"{name} has strides {tensor.stride()}: expected contiguous")


def check_plan(
    plan: VerifyPlan, call: VerifyCall, variant: str, nsplit: int | str, batch_invariant: bool
) -> None:
    """The call fits its plan's bucket and asks for nothing else; host-side values only."""
    shape = plan.shape
    _require(
        variant in ("auto", plan.variant), f"variant={variant!r}: the plan was made for {plan.variant!r}"
    )
    _require(nsplit in ("auto", plan.nsplit), f"nsplit={nsplit!r}: the plan was made for {plan.nsplit}")
    _require(
        plan.batch_invariant or not batch_invariant,
        "batch_invariant=True: the plan was made without it, pass it to make_plan",
    )
    _require(
        call.q.device.type == plan.device.type, f"q is on {call.q.device}: the plan is for {plan.device}"
    )
    _require(call.bs <= shape.bs, f"qo_indptr holds {call.bs} requests: the plan's bucket holds {shape.bs}")
    _require(
        call.q.shape[1] == shape.heads, f"q has {call.q.shape[1]} heads: the plan's bucket has {shape.heads}"
    )
    _require(call.latent == shape.latent, f"latent={call.latent}: the plan's bucket has {shape.latent}")
    _require(
        call.q.shape[2] == shape.width,
        f"q has {call.q.shape[2]} columns: the plan's bucket has {shape.width}",
    )
    _require(
        call.q.dtype == DTYPES[shape.dtype], f"q.dtype is {call.q.dtype}: the plan's bucket has {shape.dtype}"
    )
    if call.mask_layout == "packed" and call.tree_mask is not None:
        words = -(-shape.max_q_len // 32)
        have = call.tree_mask.shape[1]
        _require(
            have >= words, f"tree_mask has {have} words a row: max_q_len {shape.max_q_len} needs {words}"
        )


def lengths(call: VerifyCall) -> tuple[list[int], list[int]]:
    """Query and KV rows of every request, draft rows counted in both. Raises ValueError for a bad indptr."""
    q_lens = _row_counts("qo_indptr", call.qo_indptr)
    kv_lens = _row_counts("kv_indptr", call.kv_indptr)
    if call.draft_slots is not None:
        return q_lens, [kv + q for q, kv in zip(q_lens, kv_lens)]
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens)):
        _require(
            kv_len >= q_len,
            f"kv_indptr gives request {request} {kv_len} rows: expected >= q_len {q_len}, or draft_slots",
        )
    return q_lens, kv_lens


def _row_counts(name: str, indptr: torch.Tensor) -> list[int]:
    values = indptr.tolist()
    _require(values[0] == 0, f"{name}[0] is {values[0]}: expected 0")
    counts = [b - a for a, b in pairwise(values)]
    for i, count in enumerate(counts):
        _require(
            count >= 0,
            f"{name} falls from {values[i]} to {values[i + 1]} at entry {i + 1}: expected monotone",
        )
    return counts


def check_contents(call: VerifyCall, shape: VerifyShape) -> None:
    """Lengths inside the bucket, slots inside the pool, mask long enough; reads the tensors."""
    q_lens, kv_lens = lengths(call)
    _require(
        max(q_lens) <= shape.max_q_len,
        f"qo_indptr gives a q_len of {max(q_lens)}: the bucket holds {shape.max_q_len}",
    )
    _require(
        max(kv_lens) <= shape.max_kv_len,
        f"kv_indptr gives a kv_len of {max(kv_lens)}: the bucket holds {shape.max_kv_len}",
    )
    _require(sum(q_lens) <= call.q.shape[0], f"q has {call.q.shape[0]} rows: qo_indptr ends at {sum(q_lens)}")
    _check_slots("kv_indices", call.kv_indices, int(call.kv_indptr[-1]), call.kv.shape[0])
    if call.draft_slots is not None:
        _check_slots("draft_slots", call.draft_slots, sum(q_lens), call.kv.shape[0])
    if call.tree_mask is not None:
        _check_mask_size(call, q_lens, kv_lens)


def _check_slots(name: str, slots: torch.Tensor, count: int, pool: int) -> None:
    _require(slots.shape[0] >= count, f"{name} has {slots.shape[0]} entries: the indptr asks for {count}")
    if count:
        low, high = (int(v) for v in slots[:count].aminmax())
        bad = low if low < 0 else high
        _require(
            low >= 0 and high < pool, f"{name} holds slot {bad}: expected 0 to {pool - 1}, the rows of kv"
        )


def _check_mask_size(call: VerifyCall, q_lens: list[int], kv_lens: list[int]) -> None:
    assert call.tree_mask is not None
    if call.mask_layout == "packed":
        have, need, unit = call.tree_mask.shape[1], -(-max(q_lens) // 32), "words a row"
    else:
        columns = q_lens if call.mask_layout == "tree" else kv_lens
        have, need, unit = call.tree_mask.numel(), sum(q * c for q, c in zip(q_lens, columns)), "entries"
    _require(have >= need, f"tree_mask has {have} {unit}: mask_layout={call.mask_layout!r} needs {need}")
