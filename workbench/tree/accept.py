"""Which drafted nodes the target keeps: the longest path that the target itself would have produced.

Greedy compares with the target's argmax. Sampling draws the target's own token at every visited row and
walks with the draws, so each emitted token is the target's draw given its ancestors and the drafter's
probabilities never enter.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from workbench.tree.buffers import AcceptBuffers, TreeBuffers
from workbench.tree.ddtree import DraftTree
from workbench.tree.sampling import draw_tokens

Method = Literal["auto", "torch", "triton"]


def accept_greedy(tree: DraftTree, target_tokens: Tensor) -> tuple[list[int], int]:
    """(accepted rows, root included, bonus token) for the target's argmax per row [n]."""
    wanted = target_tokens.tolist()
    if len(wanted) != len(tree):
        raise ValueError(
            f"target_tokens has {len(wanted)} rows, the tree {len(tree)}: pass one token per node"
        )
    return _walk(tree, lambda row: wanted[row])


def accept_sampled(
    tree: DraftTree, target_probs: Tensor, generator: torch.Generator | None = None
) -> tuple[list[int], int]:
    """(accepted rows, root included, bonus token), drawing from target_probs [n, V] at each visited row."""
    if target_probs.shape[0] != len(tree):
        raise ValueError(
            f"target_probs has {target_probs.shape[0]} rows, the tree {len(tree)}: pass one per node"
        )
    return _walk(tree, lambda row: int(torch.multinomial(target_probs[row], 1, generator=generator)))


def _walk(tree: DraftTree, token_at: Callable[[int], int]) -> tuple[list[int], int]:
    children = {
        (parent, token): row
        for row, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist()))
    }
    accepted = [0]
    while True:
        token = token_at(accepted[-1])
        child = children.get((accepted[-1], token))
        if child is None:
            return accepted, token
        accepted.append(child)


def accept_greedy_batch(
    tree: TreeBuffers, target_tokens: Tensor, out: AcceptBuffers, *, method: Method = "auto"
) -> None:
    """Fill `out` from the target's token per row [bs, N] int64; no host sync, no data-dependent shape.

    A path deeper than `out.max_accept` is cut there. `method`: "triton" (one kernel, "auto" on CUDA) or
    "torch".
    """
    bs, n = tree.token_ids.shape
    if target_tokens.shape != (bs, n):
        raise ValueError(
            f"target_tokens has shape {tuple(target_tokens.shape)}: expected [bs, N] = [{bs}, {n}]"
        )
    if method not in ("auto", "torch", "triton"):
        raise ValueError(f"method {method!r}: choose one of auto, torch, triton")
    if method == "triton" or (method == "auto" and tree.device.type == "cuda"):
        from workbench.tree.accept_gpu import accept_greedy_triton

        accept_greedy_triton(tree, target_tokens.contiguous(), out)
    else:
        write_path(tree, matched_rows(tree, target_tokens), target_tokens, out)


def matched_rows(tree: TreeBuffers, target_tokens: Tensor) -> Tensor:
    """[bs, N] bool: rows whose token and whose ancestors' tokens are the target's at their parents.

    Siblings differ in token, so these rows are one path from the root.
    """
    parents = tree.parents.long().clamp(min=0)
    right = target_tokens.gather(1, parents) == tree.token_ids
    right[:, 0] = True
    wrong_ancestor = (tree.mask & ~right.unsqueeze(1)).any(-1)
    return ~wrong_ancestor & (torch.arange(tree.width, device=tree.device) < tree.num_nodes.unsqueeze(1))


def write_path(tree: TreeBuffers, accepted: Tensor, target_tokens: Tensor, out: AcceptBuffers) -> None:
    """Fill `out` from the accepted rows [bs, N] bool, one path from the root; the bonus follows its last
    row."""
    rows = torch.arange(tree.width, device=tree.device)
    depth = torch.arange(out.max_accept, device=tree.device)
    hit = accepted.unsqueeze(1) & (
        tree.depths.unsqueeze(1) == depth.view(1, -1, 1)
    )  # [bs, L+1, N], one node a depth
    index = torch.where(hit, rows, -1).amax(-1)  # [bs, L+1]
    length = (index >= 0).sum(-1)
    last = index.amax(-1, keepdim=True)
    bonus = target_tokens.gather(1, last)  # [bs, 1]
    drafts = tree.token_ids.gather(1, index.clamp(min=0)).roll(
        -1, 1
    )  # draft of depth d is the d-th token emitted
    at_end = length.unsqueeze(1) - 1
    out.tokens.copy_(torch.where(depth < at_end, drafts, torch.where(depth == at_end, bonus, -1)))
    out.node_index.copy_(index)
    out.accept_length.copy_(length)
    out.bonus.copy_(bonus[:, 0])


def accept_sampled_batch(
    tree: TreeBuffers,
    target_logits: Tensor,
    out: AcceptBuffers,
    *,
    temperature: float | Tensor,
    top_k: int | None = None,
    top_p: float | None = None,
    noise: Tensor,
) -> None:
    """Fill `out` by drawing one target token per row of target_logits [bs*N, V] and walking with the draws.

    `noise` holds uniform numbers in [0, 1), one per row ([bs*N] or [bs, N]), refilled before each step.
    `temperature` is a number or [bs]; for temperature 0 use `accept_greedy_batch`.
    """
    bs, n = tree.token_ids.shape
    if target_logits.shape[0] != bs * n or noise.numel() != bs * n:
        raise ValueError(
            f"target_logits has {target_logits.shape[0]} rows, noise {noise.numel()}: need bs*N = {bs * n}"
        )
    if isinstance(temperature, Tensor):
        temperature = temperature.view(bs, 1).expand(bs, n).reshape(bs * n, 1)
    draws = draw_tokens(target_logits, noise.view(-1), temperature=temperature, top_k=top_k, top_p=top_p)
    accept_greedy_batch(tree, draws.view(bs, n), out)
