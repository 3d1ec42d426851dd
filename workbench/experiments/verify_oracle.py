"""The bench's own oracle: fp64 streaming softmax in torch, blockwise, so that long contexts fit too."""

from typing import TYPE_CHECKING

from workbench.experiments.verify_cases import SM_SCALE, VerifyInputs

if TYPE_CHECKING:
    import torch


def expected_output(inputs: VerifyInputs, mask: str) -> "tuple[torch.Tensor, torch.Tensor]":
    """fp64 (out [T, H, latent], lse [T, H]) of pool 0, by request and block; `mask` tree or causal."""
    import torch

    case, q = inputs.case, inputs.q[0]
    out = torch.empty(*q.shape[:2], case.latent, dtype=torch.float64, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float64, device=q.device)
    for request in range(case.bs):
        rows = slice(request * case.q_len, (request + 1) * case.q_len)
        slots = inputs.kv_indices[0][request * case.kv_len : (request + 1) * case.kv_len]
        out[rows], lse[rows] = _attend(inputs, q[rows], slots, _visible(inputs, mask, request))
    return out, lse


def _attend(
    inputs: VerifyInputs,
    q: "torch.Tensor",
    slots: "torch.Tensor",
    visible: "torch.Tensor",
    block: int = 16384,
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Streaming softmax in fp64 over blocks of rows. q [n, H, D], slots [kv_len], visible [n, n] bool."""
    import torch

    case = inputs.case
    q64 = q.double() * SM_SCALE
    top = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)  # [n, H]
    total, acc = torch.zeros_like(top), top.new_zeros(*q.shape[:2], case.latent)
    for start in range(0, case.kv_len, block):
        rows = inputs.kv[slots[start : start + block].long()].double()  # [b, D]
        columns = torch.arange(start, start + rows.shape[0], device=q.device) - case.ctx  # < 0: prefix
        hidden = (columns >= 0) & ~visible[:, columns.clamp(min=0)]  # [n, b]
        scores = torch.einsum("nhd,bd->nhb", q64, rows).masked_fill(hidden[:, None], -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1))
        weights, keep = (scores - new_top[..., None]).exp(), (top - new_top).exp()
        total = total * keep + weights.sum(-1)
        acc = acc * keep[..., None] + torch.einsum("nhb,bl->nhl", weights, rows[:, : case.latent])
        top = new_top
    return acc / total[..., None], top + total.log()


def _visible(inputs: VerifyInputs, mask: str, request: int) -> "torch.Tensor":
    """[q_len, q_len] bool: which draft rows each draft row sees."""
    import torch

    case = inputs.case
    if mask == "causal" or inputs.tree_mask is None:
        return torch.ones(case.q_len, case.q_len, dtype=torch.bool, device=inputs.kv.device).tril()
    return inputs.tree_mask.view(case.bs, case.q_len, case.q_len)[request]
