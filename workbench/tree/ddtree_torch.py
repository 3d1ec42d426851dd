"""DDTree for a batch in plain tensor operations: fixed shapes, no host sync, capturable on any device.

Depth by depth instead of a heap: the best prefixes of depth d extend the best of depth d - 1. With both
lists sorted, the pair (i-th prefix, j-th token) has (i + 1)(j + 1) - 1 pairs and i + 1 prefixes of depth d
- 1 before it, so it can be among the best B only if (i + 1)(j + 2) <= B. That leaves about B ln B
candidates a level, and every shape depends on the budget alone. Keys carry the candidate's index below the
weight, so equal weights are settled the same way everywhere.
"""

from functools import cache

import torch
from torch import Tensor

from workbench.tree.buffers import TreeBuffers

TRITON_MAX_BUDGET = 512  # above it the kernels' sorts spill registers and compile for minutes: this form runs
_LOW = (1 << 32) - 1


@cache
def pair_table(width: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(parent position, token rank) of every pair that can be among the best `width`, as int32 on `device`.

    First tokens are always offered, which keeps at least `width` pairs.
    """
    pairs = [(i, j) for i in range(width) for j in range(min(ranks, max(1, width // (i + 1) - 1)))]
    table = torch.tensor(pairs, dtype=torch.int32, device=device)
    return table[:, 0].contiguous(), table[:, 1].contiguous()


def pack_keys(values: Tensor, index: Tensor) -> Tensor:
    """int64 keys that order fp32 `values` descending-friendly, ties by smaller `index` first."""
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)  # -0.0 and 0.0 are one value
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (_LOW - index)


def top_keys(values: Tensor, k: int) -> Tensor:
    """Index of the k largest of fp32 `values` along the last dimension, ties by smaller index, [..., k]
    int64."""
    keys = pack_keys(values, torch.arange(values.shape[-1], device=values.device))
    return _LOW - (torch.topk(keys, k, dim=-1).values & _LOW)


def rank_slots(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """([bs, L, k] fp32 log-probabilities, [bs, L, k] int64 tokens, [bs] int32 first slot with NaN or +inf
    or -1)."""
    x = logits.float()
    lse = torch.logsumexp(x, -1, keepdim=True)
    tokens = top_keys(x, k)
    values = x.gather(-1, tokens)
    bad = torch.isnan(lse) | (lse == torch.inf)  # [bs, L, 1]
    log_probs = torch.where(bad | (values == -torch.inf), -torch.inf, values - lse)
    slots = torch.arange(logits.shape[1], device=x.device)
    first = torch.where(bad[..., 0], slots, logits.shape[1]).amin(-1)
    return log_probs, tokens, torch.where(first < logits.shape[1], first, -1)


def select_nodes(log_probs: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best `width` prefixes of slot log-probabilities [bs, L, k], sorted by weight.

    Returns (weight fp32, depth, rank in its slot, parent node), each [bs, width]; weight -inf where none
    exists.
    """
    bs, slots, k = log_probs.shape
    first, second = pair_table(width, k, log_probs.device)
    level = torch.nn.functional.pad(log_probs[:, 0], (0, width - k), value=-torch.inf)
    position = torch.arange(width, device=log_probs.device).expand(bs, width)
    weights, above, ranks = [level], [torch.zeros_like(position)], [position]
    for d in range(1, slots):
        candidates = level[:, first] + log_probs[:, d, second]  # [bs, pairs]
        best = top_keys(candidates, width)
        level = candidates.gather(1, best)
        weights.append(level)
        above.append(first[best].long())
        ranks.append(second[best].long())
    flat = torch.cat(
        weights, 1
    )  # [bs, L * width]; a shallower prefix stands before a deeper one of equal weight
    best = top_keys(flat, width)
    depth = best // width + 1
    parent_entry = (depth - 2) * width + torch.cat(above, 1).gather(1, best)
    node_of = torch.zeros_like(flat, dtype=torch.int64).scatter_(1, best, position + 1)
    parent = torch.where(depth > 1, node_of.gather(1, parent_entry.clamp(min=0)), 0)
    return flat.gather(1, best), depth, torch.cat(ranks, 1).gather(1, best), parent


def build_ddtree_torch(
    logits: Tensor, budget: int, out: TreeBuffers, max_tokens: Tensor | None, min_log_prob: float | None
) -> None:
    """Fill everything in `out` but the root's token from draft logits [bs, L, V]."""
    slots = logits.shape[1]
    nodes = budget if slots else 0
    fill_padding(out, max(nodes, 0))
    if nodes > 0:
        _select_into(logits, nodes, out, max_tokens, min_log_prob)
    link_nodes(out, slots)


def _select_into(
    logits: Tensor, budget: int, out: TreeBuffers, max_tokens: Tensor | None, min_log_prob: float | None
) -> None:
    bs, slots, vocab = logits.shape
    log_probs, tokens, nan_slot = rank_slots(logits, min(budget, vocab))
    if max_tokens is not None:
        depth = torch.arange(1, slots + 1, device=logits.device).view(1, -1, 1)
        log_probs = torch.where(depth < max_tokens.view(-1, 1, 1), log_probs, -torch.inf)
    weight, depth, rank, parent = select_nodes(log_probs, budget)
    if min_log_prob is not None:
        weight = torch.where(weight >= min_log_prob, weight, -torch.inf)
    entry = (depth - 1) * tokens.shape[-1] + rank.clamp(max=tokens.shape[-1] - 1)
    fill_nodes(out, weight, depth, parent, tokens.view(bs, -1).gather(1, entry))
    out.nan_slot.copy_(nan_slot)


def build_chain_torch(logits: Tensor, out: TreeBuffers, max_tokens: Tensor | None) -> None:
    """Fill everything in `out` but the root's token with the chain of top tokens of draft logits [bs, L,
    V]."""
    bs, slots, _ = logits.shape
    fill_padding(out, slots)
    if slots:
        log_probs, tokens, nan_slot = rank_slots(logits, 1)
        depth = torch.arange(1, slots + 1, device=logits.device).expand(bs, slots)
        weight = log_probs[..., 0].cumsum(1)
        if max_tokens is not None:
            weight = torch.where(depth < max_tokens.view(-1, 1), weight, -torch.inf)
        fill_nodes(out, weight, depth, depth - 1, tokens[..., 0])
        out.nan_slot.copy_(nan_slot)
    link_nodes(out, slots)


def fill_nodes(out: TreeBuffers, weight: Tensor, depth: Tensor, parent: Tensor, token: Tensor) -> None:
    """Write node columns 1.. from selections [bs, n] that are live where weight > -inf."""
    live = weight > -torch.inf
    span = slice(1, 1 + weight.shape[1])
    out.token_ids[:, span] = torch.where(live, token, 0)
    out.depths[:, span] = torch.where(live, depth, 0).int()
    out.parents[:, span] = torch.where(live, parent, -1).int()
    out.log_probs[:, span] = weight
    out.num_nodes.copy_(live.sum(1) + 1)


def fill_padding(out: TreeBuffers, nodes: int) -> None:
    """Write the root's constants and everything behind `nodes` selected columns."""
    for field, root, padding in ((out.depths, 0, 0), (out.parents, -1, -1), (out.log_probs, 0.0, -torch.inf)):
        field[:, 0] = root
        field[:, 1 + nodes :] = padding
    out.token_ids[:, 1 + nodes :] = 0
    out.num_nodes.fill_(1)
    out.nan_slot.fill_(-1)


def link_nodes(out: TreeBuffers, depth: int) -> None:
    """Fill mask and walk arrays from `out.parents`; `depth` is the deepest a node can be."""
    bs, n = out.parents.shape
    rows = torch.arange(n, device=out.device)
    parents = out.parents.long()
    edge = parents.unsqueeze(2) == rows  # [bs, N, N], child row, parent column
    closure = (edge | (rows.unsqueeze(1) == rows)).float()
    for _ in range(depth.bit_length()):  # squaring reaches 2, 4, 8, ... levels up
        closure = torch.bmm(closure, closure).clamp_(max=1.0)
    out.mask.copy_(closure > 0)
    out.retrieve_index.copy_(torch.arange(bs * n, device=out.device).view(bs, n))
    child = torch.where(edge, rows.unsqueeze(1), n).amin(1)  # smallest child row of each column
    out.next_token.copy_(torch.where(child < n, child, -1))
    same = (parents.unsqueeze(2) == parents.unsqueeze(1)) & (parents >= 0).unsqueeze(2)
    later = same & (rows > rows.unsqueeze(1))
    sibling = torch.where(later, rows, n).amin(2)
    out.next_sibling.copy_(torch.where(sibling < n, sibling, -1))
