"""The oracle: one request at a time, a dense visibility matrix, fp64 softmax. Slow and obvious on purpose."""

from itertools import pairwise
from typing import Any

import torch

from workbench.attention.plan import VerifyCall, VerifyPlan
from workbench.shapes import VerifyShape
from workbench.targets import HardwareTarget


def attend(call: VerifyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, H, latent] and lse [T, H], both fp64; padding rows 0 and -inf."""
    tokens, heads, _ = call.q.shape
    out = torch.zeros((tokens, heads, call.latent), dtype=torch.float64, device=call.q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64, device=call.q.device)
    qo, kv = call.qo_indptr.tolist(), call.kv_indptr.tolist()
    for request in range(call.bs):
        begin, end = qo[request], qo[request + 1]
        slots = call.kv_indices[kv[request] : kv[request + 1]].long()
        if call.draft_slots is not None:
            slots = torch.cat([slots, call.draft_slots[begin:end].long()])
        visible = visibility(call, request, len(slots))  # [q_len, kv_len]
        rows = call.kv[slots].double()  # [kv_len, D]
        for i in range(begin, end):
            seen = rows[visible[i - begin]]  # the rows this node may attend to, and no other
            if len(seen):
                scores = call.sm_scale * call.q[i].double() @ seen.T  # [H, seen]
                lse[i] = scores.logsumexp(-1)
                out[i] = scores.softmax(-1) @ seen[:, : call.latent]
    return out, lse


def visibility(call: VerifyCall, request: int, kv_len: int) -> torch.Tensor:
    """[q_len, kv_len] bool: which row of its request each node may attend to, in every mask layout."""
    qo, kv = call.qo_indptr.tolist(), call.kv_indptr.tolist()
    lens = [b - a for a, b in pairwise(qo)]
    q_len = lens[request]
    visible = torch.ones((q_len, kv_len), dtype=torch.bool, device=call.q.device)
    draft = visible[:, kv_len - q_len :]
    if call.tree_mask is None:
        draft.copy_(torch.ones_like(draft).tril())
    elif call.mask_layout == "tree":
        offset = sum(n * n for n in lens[:request])
        draft.copy_(call.tree_mask.view(-1)[offset : offset + q_len * q_len].view(q_len, q_len).bool())
    elif call.mask_layout == "packed":
        words = call.tree_mask[qo[request] : qo[request + 1]].long()  # [q_len, words]
        for node in range(q_len):
            draft[:, node] = (words[:, node // 32] >> (node % 32)) & 1 == 1
    else:
        extra = lens if call.draft_slots is not None else [0] * len(lens)
        totals = [b - a + n for a, b, n in zip(kv, kv[1:], extra)]
        offset = sum(n * total for n, total in zip(lens[:request], totals))
        visible.copy_(call.tree_mask.view(-1)[offset : offset + q_len * kv_len].view(q_len, kv_len).bool())
    return visible


def supports(shape: VerifyShape, target: HardwareTarget) -> str | None:
    return None


def default_tunables(shape: VerifyShape, target: HardwareTarget, batch_invariant: bool) -> dict[str, Any]:
    return {}


def choose_nsplit(
    shape: VerifyShape, target: HardwareTarget, tunables: dict[str, Any], batch_invariant: bool
) -> int:
    return 1


def workspaces(shape: VerifyShape, nsplit: int, tunables: dict[str, Any]) -> dict[str, Any]:
    return {}


def launch(plan: VerifyPlan, call: VerifyCall) -> None:
    """Round the fp64 result into the caller's buffers."""
    out, lse = attend(call)
    call.out.copy_(out)
    call.lse.copy_(lse)
