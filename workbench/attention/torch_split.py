"""Split-KV verify attention in torch ops, the default on CPU.

Each request's KV rows are cut into up to `nsplit` equal chunks; a chunk yields a normalised partial output
and its LSE, and a reduction weighs the partials, exactly as the GPU kernels do. The scores of a request are
one matmul. Requests are computed one by one, so a request's result never depends on the rest of the batch.
"""

import math
from itertools import pairwise
from typing import Any

import torch

from workbench.attention.plan import DTYPES, VerifyCall, VerifyPlan, partial_sizes
from workbench.shapes import VerifyShape
from workbench.targets import HardwareTarget

MIN_SPLIT_ROWS = 4096  # a chunk of fp32 scores and rows should stay in cache; below this splitting only costs


def supports(shape: VerifyShape, target: HardwareTarget) -> str | None:
    """Any bucket; the table keeps it on CPU because it reads lengths on the host."""
    return None


def default_tunables(shape: VerifyShape, target: HardwareTarget, batch_invariant: bool) -> dict[str, Any]:
    return {}


def choose_nsplit(
    shape: VerifyShape, target: HardwareTarget, tunables: dict[str, Any], batch_invariant: bool
) -> int:
    """One split until a chunk outgrows the cache; always one when batch invariant."""
    return 1 if batch_invariant else max(1, min(128, shape.max_kv_len // MIN_SPLIT_ROWS))


def workspaces(
    shape: VerifyShape, nsplit: int, tunables: dict[str, Any]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Partials of one request at a time, in the dtype it computes in."""
    one = VerifyShape(1, shape.heads, shape.max_q_len, shape.max_kv_len, latent=shape.latent, rope=shape.rope)
    return partial_sizes(one, nsplit, _compute_dtype(DTYPES[shape.dtype]))


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def launch(plan: VerifyPlan, call: VerifyCall) -> None:
    """Split, mask, reduce, request by request; rows behind the last request are padding."""
    qo, kv = call.qo_indptr.tolist(), call.kv_indptr.tolist()
    mask_start = 0
    for request, (begin, end) in enumerate(pairwise(qo)):
        slots = call.kv_indices[kv[request] : kv[request + 1]]
        drafts = None if call.draft_slots is None else call.draft_slots[begin:end]
        kv_len = len(slots) + (0 if drafts is None else end - begin)
        if begin == end:
            continue
        if kv_len == 0:
            _clear(call, begin, end)
            continue
        hidden = _hidden(call, begin, end, kv_len, mask_start)
        mask_start += (end - begin) * (kv_len if call.mask_layout == "full" else end - begin)
        _attend(plan, call, begin, end, _gather(call.kv, slots, drafts), hidden)
    _clear(call, qo[-1], call.q.shape[0])


def _clear(call: VerifyCall, begin: int, end: int) -> None:
    if begin < end:
        call.out[begin:end].zero_()
        call.lse[begin:end].fill_(-torch.inf)


def _gather(kv: torch.Tensor, slots: torch.Tensor, drafts: torch.Tensor | None) -> torch.Tensor:
    """[kv_len, D] in the compute dtype."""
    rows = kv.index_select(0, slots)
    if drafts is not None:
        rows = torch.cat([rows, kv.index_select(0, drafts)])
    return rows.to(_compute_dtype(kv.dtype))


def _blank_hidden_values(rows: torch.Tensor, columns: int, latent: int) -> torch.Tensor:
    """V [kv_len, latent]; among the last `columns` rows, which a mask may hide, NaN and inf become 0.

    A hidden row has weight 0 and may hold anything: 0 * NaN must not reach a row that does not see it. One
    that does still gets NaN from its score.
    """
    values = rows[:, :latent]
    maskable = values[len(rows) - columns :]
    if bool(maskable.isfinite().all()):
        return values
    return torch.cat([values[: len(rows) - columns], maskable.nan_to_num(0.0, 0.0, 0.0)])


def _hidden(call: VerifyCall, begin: int, end: int, kv_len: int, mask_start: int) -> torch.Tensor:
    """[q_len, columns] bool: what a node must not see; columns are the draft rows, or all rows for "full"."""
    q_len = end - begin
    if call.tree_mask is None:
        return torch.ones((q_len, q_len), dtype=torch.bool).triu_(1)
    if call.mask_layout == "packed":
        words = call.tree_mask[begin:end].unsqueeze(-1)  # [q_len, words, 1]
        bits = words.bitwise_right_shift(torch.arange(32, dtype=torch.int32)).bitwise_and_(1)
        return bits.view(q_len, -1)[:, :q_len] == 0
    columns = kv_len if call.mask_layout == "full" else q_len
    return call.tree_mask[mask_start : mask_start + q_len * columns].view(q_len, columns) == 0


def _attend(
    plan: VerifyPlan, call: VerifyCall, begin: int, end: int, rows: torch.Tensor, hidden: torch.Tensor
) -> None:
    """One request: scores of all rows, then a partial per chunk, then the reduction into out and lse."""
    q_len, kv_len, heads = end - begin, rows.shape[0], call.q.shape[1]
    q = call.q[begin:end].reshape(q_len * heads, -1).to(rows.dtype).contiguous()  # [R, D], R = q_len * heads
    scores = torch.mm(q, rows.T).mul_(call.sm_scale)  # [R, kv_len]
    scores.view(q_len, heads, kv_len)[..., kv_len - hidden.shape[1] :].masked_fill_(
        hidden[:, None], -torch.inf
    )
    values = _blank_hidden_values(rows, hidden.shape[1], call.latent)
    chunk = math.ceil(kv_len / plan.nsplit)
    out = plan.workspaces["partial_out"][0, :, : q_len * heads]  # [nsplit, R, latent]
    lse = plan.workspaces["partial_lse"][0, :, : q_len * heads]  # [nsplit, R]
    count = math.ceil(kv_len / chunk)
    for split in range(count):
        _attend_chunk(scores, values, split * chunk, chunk, out[split], lse[split])
    _reduce(out[:count], lse[:count], call.out[begin:end], call.lse[begin:end])


def _attend_chunk(
    scores: torch.Tensor, values: torch.Tensor, start: int, chunk: int, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Normalised partial [R, latent] and LSE [R] of one chunk; 0 and -inf for a row that sees none."""
    part = scores[:, start : start + chunk]
    top = part.amax(-1, keepdim=True)  # [R, 1]
    top.masked_fill_(top == -torch.inf, 0.0)  # exp(-inf - -inf) would be NaN
    weights = part.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    torch.mm(weights, values[start : start + chunk], out=out)
    out.div_(total.clamp_min(torch.finfo(total.dtype).tiny))
    lse.copy_((total.log_().add_(top)).squeeze(-1))


def _reduce(partial: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Weigh [count, R, latent] partials by their share of the softmax total, into a request's out and lse."""
    if len(partial) == 1:
        out.copy_(partial[0].view(out.shape))
        lse.copy_(partial_lse[0].view(lse.shape))
        return
    top = partial_lse.amax(0)  # [R]
    top.masked_fill_(top == -torch.inf, 0.0)
    weights = (partial_lse - top).exp_()  # [count, R]
    total = weights.sum(0)
    weights.div_(total.clamp_min(torch.finfo(total.dtype).tiny))
    out.copy_(torch.einsum("sr,srl->rl", weights, partial).view(out.shape))
    lse.copy_(total.log_().add_(top).view(lse.shape))
