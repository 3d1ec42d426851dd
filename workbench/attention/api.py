"""verify_attention: check, plan when none is given, launch. On CPU each call is one torch op."""

from dataclasses import replace

import torch

from workbench.attention import checks
from workbench.attention.plan import DTYPES, VerifyCall, VerifyPlan, find_plan, make_plan
from workbench.shapes import VerifyShape

__all__ = ["VerifyPlan", "make_plan", "shape_of", "verify_attention"]

# Defined through Library instead of custom_op: the same op in a trace or a tape at less overhead per call.
_library = torch.library.Library("workbench", "FRAGMENT")
_library.define(
    "verify_attention(Tensor q, Tensor kv, Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices,"
    " Tensor? tree_mask, Tensor? draft_slots, str mask_layout, float sm_scale, int plan,"
    " Tensor(a!) out, Tensor(b!) lse) -> ()"
)


def verify_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    tree_mask: torch.Tensor | None = None,
    *,
    draft_slots: torch.Tensor | None = None,
    mask_layout: str = "tree",
    sm_scale: float,
    latent: int = 512,
    variant: str = "auto",
    nsplit: int | str = "auto",
    batch_invariant: bool = False,
    validate: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    plan: VerifyPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend the tree rows of every request to its KV rows; values are the first `latent` columns of a row.

    q [T, H, D], kv [pool, D], qo_indptr and kv_indptr [bs+1] int32, kv_indices slots -> out [T, H, latent] in
    q.dtype, lse [T, H] fp32 (natural log). Without `draft_slots` the last q_len entries of a request's
    kv_indices are its draft rows; with it kv_indices hold the prefix only. tree_mask: None = causal among the
    draft rows; "tree" and "full" flat bool|uint8; "packed" uint32 [T, words]. Rows that see nothing and
    padding rows get out 0, lse -inf. With plan, out and lse the call can be captured. Raises ValueError
    that names the argument before any launch.
    """
    layout = "causal" if tree_mask is None else mask_layout
    call = checks.make_call(
        q, kv, qo_indptr, kv_indptr, kv_indices, tree_mask, draft_slots, layout, sm_scale, latent, out, lse
    )
    if plan is None:
        plan = make_plan(
            shape_of(call), variant=variant, nsplit=nsplit, device=q.device, batch_invariant=batch_invariant
        )
    else:
        checks.check_plan(plan, call, variant, nsplit, batch_invariant)
    if q.device.type == "cpu":
        torch.ops.workbench.verify_attention(
            q, kv, qo_indptr, kv_indptr, kv_indices, tree_mask, draft_slots, layout, sm_scale,
            plan.handle, call.out, call.lse,
        )  # fmt: skip
    else:
        if validate:
            checks.check_contents(call, plan.shape)
        plan.launch(plan, replace(call, tree_mask=checks.canonical_mask(tree_mask, layout)))
    return call.out, call.lse


def _verify_attention_cpu(
    q: torch.Tensor,
    kv: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    tree_mask: torch.Tensor | None,
    draft_slots: torch.Tensor | None,
    mask_layout: str,
    sm_scale: float,
    handle: int,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """The op's body: also what a tape replays, so lengths are read and contents checked on every step."""
    plan = find_plan(handle)
    mask = checks.canonical_mask(tree_mask, mask_layout)
    call = VerifyCall(
        q, kv, qo_indptr, kv_indptr, kv_indices, mask, draft_slots, mask_layout, sm_scale,
        plan.shape.latent, out, lse,
    )  # fmt: skip
    checks.check_contents(call, plan.shape)
    plan.launch(plan, call)


_library.impl("verify_attention", _verify_attention_cpu, "CPU")


def shape_of(call: VerifyCall) -> VerifyShape:
    """The tightest bucket around one call; reads the lengths, so it syncs with a GPU."""
    q_lens, kv_lens = checks.lengths(call)
    dtype = next(name for name, torch_dtype in DTYPES.items() if torch_dtype == call.q.dtype)
    return VerifyShape(
        bs=call.bs,
        heads=call.q.shape[1],
        max_q_len=max(q_lens),
        max_kv_len=max(kv_lens),
        dtype=dtype,
        latent=call.latent,
        rope=call.q.shape[2] - call.latent,
        index_dtype="int64" if call.kv_indices.dtype == torch.int64 else "int32",
        mask_layout=call.mask_layout,
    )
