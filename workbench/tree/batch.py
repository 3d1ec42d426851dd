"""Draft trees of a whole batch in static buffers: the heap as one custom op on CPU, device kernels on CUDA."""

import math

import torch
from torch import Tensor

from workbench.tree.buffers import TreeBuffers
from workbench.tree.ddtree import DraftTree, ancestor_matrix, build_chain, build_ddtree, link_children

_OUTPUTS = (
    "token_ids", "depths", "parents", "log_probs", "num_nodes", "mask", "retrieve_index", "next_token",
    "next_sibling", "nan_slot",
)  # fmt: skip


def build_ddtree_batch(
    logits: Tensor,
    budget: int,
    out: TreeBuffers,
    *,
    root_tokens: Tensor | None = None,
    max_tokens: Tensor | None = None,
    min_log_prob: float | None = None,
) -> TreeBuffers:
    """Write the best trees for draft logits [bs, L, V] into `out`: static shapes, no host sync on CUDA.

    `root_tokens` [bs] int64 (None leaves column 0 of `out.token_ids`), `max_tokens` [bs] int32: tokens each request
    may still produce, `min_log_prob`: floor of a path's log-probability. A NaN or +inf logit raises ValueError on
    CPU; on CUDA the tree ends above that slot and `out.check()` names it.
    """
    _check_batch(logits, out, budget + 1)
    if logits.is_cuda:
        raise ValueError("the device builder is not there yet")
    torch.ops.workbench.build_ddtree(logits, budget, root_tokens, max_tokens, min_log_prob, *out.tensors())
    return out


def build_chain_batch(
    logits: Tensor, out: TreeBuffers, *, root_tokens: Tensor | None = None, max_tokens: Tensor | None = None
) -> TreeBuffers:
    """Write the chain of top tokens for draft logits [bs, L, V] into `out` (N >= L + 1, rows behind are padding)."""
    _check_batch(logits, out, logits.shape[1] + 1)
    if logits.is_cuda:
        raise ValueError("the device builder is not there yet")
    torch.ops.workbench.build_chain(logits, root_tokens, max_tokens, *out.tensors())
    return out


def _check_batch(logits: Tensor, out: TreeBuffers, rows: int) -> None:
    if logits.ndim != 3 or logits.shape[0] != out.bs:
        raise ValueError(
            f"draft logits have shape {tuple(logits.shape)}: expected [bs, L, V] with bs={out.bs}"
        )
    if rows > out.width:
        raise ValueError(
            f"a tree of {rows} rows does not fit buffers of {out.width}: use TreeBuffers(bs, {rows})"
        )
    if logits.device != out.device:
        raise ValueError(
            f"draft logits are on {logits.device}, buffers on {out.device}: put both on one device"
        )


@torch.library.custom_op("workbench::build_ddtree", mutates_args=_OUTPUTS, device_types="cpu")
def _build_ddtree_host(
    logits: Tensor, budget: int, root_tokens: Tensor | None, max_tokens: Tensor | None, min_log_prob: float | None,
    token_ids: Tensor, depths: Tensor, parents: Tensor, log_probs: Tensor, num_nodes: Tensor, mask: Tensor,
    retrieve_index: Tensor, next_token: Tensor, next_sibling: Tensor, nan_slot: Tensor,
) -> None:  # fmt: skip
    floor = -math.inf if min_log_prob is None else min_log_prob
    roots, limits = _per_request(root_tokens, max_tokens, token_ids)
    trees = [
        build_ddtree(logits[b], budget, roots[b], max_tokens=limits[b], min_log_prob=floor)
        for b in range(logits.shape[0])
    ]
    _write_trees(
        trees, token_ids, depths, parents, log_probs, num_nodes, mask, retrieve_index, next_token, next_sibling,
        nan_slot,
    )  # fmt: skip


@torch.library.custom_op("workbench::build_chain", mutates_args=_OUTPUTS, device_types="cpu")
def _build_chain_host(
    logits: Tensor, root_tokens: Tensor | None, max_tokens: Tensor | None,
    token_ids: Tensor, depths: Tensor, parents: Tensor, log_probs: Tensor, num_nodes: Tensor, mask: Tensor,
    retrieve_index: Tensor, next_token: Tensor, next_sibling: Tensor, nan_slot: Tensor,
) -> None:  # fmt: skip
    roots, limits = _per_request(root_tokens, max_tokens, token_ids)
    trees = [build_chain(logits[b], roots[b], max_tokens=limits[b]) for b in range(logits.shape[0])]
    _write_trees(
        trees, token_ids, depths, parents, log_probs, num_nodes, mask, retrieve_index, next_token, next_sibling,
        nan_slot,
    )  # fmt: skip


def _per_request(
    root_tokens: Tensor | None, max_tokens: Tensor | None, token_ids: Tensor
) -> tuple[list[int], list[int | None]]:
    roots = (token_ids[:, 0] if root_tokens is None else root_tokens).tolist()
    return roots, [None] * len(roots) if max_tokens is None else max_tokens.tolist()


def _write_trees(
    trees: list[DraftTree], token_ids: Tensor, depths: Tensor, parents: Tensor, log_probs: Tensor, num_nodes: Tensor,
    mask: Tensor, retrieve_index: Tensor, next_token: Tensor, next_sibling: Tensor, nan_slot: Tensor,
) -> None:  # fmt: skip
    """Copy trees of any sizes into fixed-width buffers; every element is written."""
    bs, width = token_ids.shape
    token_ids.zero_()
    depths.zero_()
    parents.fill_(-1)
    log_probs.fill_(-torch.inf)
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    nan_slot.fill_(-1)
    retrieve_index.copy_(torch.arange(bs * width).view(bs, width))
    mask.copy_(torch.eye(width, dtype=torch.bool))
    num_nodes.copy_(torch.tensor([len(tree) for tree in trees]))
    for b, tree in enumerate(trees):
        n = len(tree)
        links = tree.parents.tolist()
        children, siblings = link_children(links)
        token_ids[b, :n] = tree.token_ids
        depths[b, :n] = tree.depths
        parents[b, :n] = tree.parents
        log_probs[b, :n] = tree.log_probs
        mask[b, :n, :n] = torch.from_numpy(ancestor_matrix(links))
        next_token[b, :n] = torch.tensor(children)
        next_sibling[b, :n] = torch.tensor(siblings)
