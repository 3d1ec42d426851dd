"""Draft trees of a whole batch in static buffers: the heap as one custom op on CPU, kernels on CUDA."""

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from workbench.tree.buffers import TreeBuffers
from workbench.tree.ddtree import (
    DraftTree,
    Nodes,
    Ranked,
    ancestor_matrix,
    best_first,
    draft_depth,
    link_children,
    rank_tokens,
)
from workbench.tree.ddtree_torch import TRITON_MAX_BUDGET, build_chain_torch, build_ddtree_torch

Method = Literal["auto", "heap", "torch", "triton"]


def build_ddtree_batch(
    logits: Tensor,
    budget: int,
    out: TreeBuffers,
    *,
    root_tokens: Tensor | None = None,
    max_tokens: Tensor | None = None,
    min_log_prob: float | None = None,
    method: Method = "auto",
) -> TreeBuffers:
    """Write the best trees for draft logits [bs, L, V] into `out`; static shapes, no host sync on CUDA.

    `root_tokens` [bs] int64 (None leaves column 0 of `out.token_ids`), `max_tokens` [bs] int32: tokens each
    request may still produce, `min_log_prob`: floor of a path's log-probability. `method`: "heap" (one
    custom op on CPU), "triton", "torch" (any device); "auto" is the heap on CPU, Triton on CUDA. A NaN
    or +inf logit raises ValueError in the heap; elsewhere the tree ends above that slot and `out.check()`
    names it.
    """
    _check_batch(logits, out, budget + 1)
    chosen = _resolve(method, logits, ("heap", "torch", "triton"))
    if method == "auto" and chosen == "triton" and budget > TRITON_MAX_BUDGET:
        chosen = "torch"
    if chosen == "heap":
        outputs = out.tensors()
        torch.ops.workbench.build_ddtree(logits, budget, root_tokens, max_tokens, min_log_prob, outputs)
    elif chosen == "triton" and budget > 0 and logits.shape[1] > 0:
        from workbench.tree.ddtree_gpu import build_ddtree_triton

        build_ddtree_triton(logits, budget, out, root_tokens, max_tokens, min_log_prob)
    else:
        build_ddtree_torch(logits, budget, out, max_tokens, min_log_prob)
        _write_roots(out, root_tokens)
    return out


def build_chain_batch(
    logits: Tensor,
    out: TreeBuffers,
    *,
    root_tokens: Tensor | None = None,
    max_tokens: Tensor | None = None,
    method: Method = "auto",
) -> TreeBuffers:
    """Write the chain of top tokens for draft logits [bs, L, V] into `out`; rows behind L + 1 are padding."""
    _check_batch(logits, out, logits.shape[1] + 1)
    if _resolve(method, logits, ("heap", "torch")) == "heap":
        torch.ops.workbench.build_chain(logits, root_tokens, max_tokens, out.tensors())
    else:
        build_chain_torch(logits, out, max_tokens)
        _write_roots(out, root_tokens)
    return out


def _resolve(method: Method, logits: Tensor, known: tuple[str, ...]) -> str:
    if method == "auto":
        return "heap" if logits.device.type == "cpu" else known[-1]
    if method not in known:
        raise ValueError(f"method {method!r}: choose one of auto, {', '.join(known)}")
    if method == "heap" and logits.device.type != "cpu":
        raise ValueError(f"method 'heap' runs on the host, the logits are on {logits.device}: use 'auto'")
    return method


def _check_batch(logits: Tensor, out: TreeBuffers, rows: int) -> None:
    if logits.ndim != 3 or logits.shape[0] != out.bs:
        raise ValueError(
            f"draft logits have shape {tuple(logits.shape)}: expected [bs, L, V] with bs={out.bs}"
        )
    if rows > out.width:
        raise ValueError(f"a tree of {rows} rows does not fit width {out.width}: use TreeBuffers(bs, {rows})")
    if logits.device != out.device:
        raise ValueError(f"logits are on {logits.device}, buffers on {out.device}: put both on one device")


def _write_roots(out: TreeBuffers, root_tokens: Tensor | None) -> None:
    if root_tokens is not None:
        out.token_ids[:, 0] = root_tokens


@torch.library.custom_op("workbench::build_ddtree", mutates_args=("outputs",), device_types="cpu")
def _build_ddtree_host(
    logits: Tensor,
    budget: int,
    root_tokens: Tensor | None,
    max_tokens: Tensor | None,
    min_log_prob: float | None,
    outputs: list[Tensor],
) -> None:
    floor = -math.inf if min_log_prob is None else min_log_prob
    _write_batch(logits, budget, budget, floor, root_tokens, max_tokens, outputs)


@torch.library.custom_op("workbench::build_chain", mutates_args=("outputs",), device_types="cpu")
def _build_chain_host(
    logits: Tensor, root_tokens: Tensor | None, max_tokens: Tensor | None, outputs: list[Tensor]
) -> None:
    _write_batch(logits, 1, logits.shape[1], -math.inf, root_tokens, max_tokens, outputs)


def _write_batch(
    logits: Tensor,
    ranks: int,
    budget: int,
    floor: float,
    root_tokens: Tensor | None,
    max_tokens: Tensor | None,
    outputs: list[Tensor],
) -> None:
    """Rank all slots at once, run a heap per request, write every element but a root that was not given."""
    # a capture watches for host reads; inside this one op they are meant
    with torch._C.DisableTorchFunction():
        bs, slots, vocab = logits.shape
        limits = [None] * bs if max_tokens is None else max_tokens.tolist()
        ranked: list[Ranked] = [[] for _ in range(bs)]
        if slots and budget > 0:
            log_probs, tokens = rank_tokens(logits, min(ranks, vocab))
            ranked = [list(zip(*pair)) for pair in zip(log_probs.tolist(), tokens.tolist())]
        arrays = [out.numpy() for out in outputs]
        for b in range(bs):
            nodes = best_first(ranked[b][: draft_depth(slots, limits[b])], budget, floor)
            write_tree(nodes, b, arrays)
        if root_tokens is not None:
            outputs[0][:, 0] = root_tokens


def read_tree(out: TreeBuffers, b: int) -> DraftTree:
    """Request `b` as a host tree. Synchronises."""
    n = int(out.num_nodes[b])
    token_ids, depths, parents = (t[b, :n].cpu().long() for t in (out.token_ids, out.depths, out.parents))
    return DraftTree(token_ids, depths, parents, out.log_probs[b, :n].cpu().double())


def write_tree(nodes: Nodes, b: int, arrays: list[np.ndarray]) -> None:
    """Write one tree into row `b` of arrays in the order of `TreeBuffers.tensors`, all but the root's
    token."""
    token_ids, depths, parents, log_probs, num_nodes, mask, index, next_token, next_sibling, nan_slot = arrays
    ids, depth, parent, weight = nodes
    links = [-1, *parent]
    n, width = len(links), token_ids.shape[1]
    behind = width - n
    children, siblings = link_children(links)
    token_ids[b, 1:] = ids + [0] * behind
    depths[b] = [0, *depth] + [0] * behind
    parents[b] = links + [-1] * behind
    log_probs[b] = [0.0, *weight] + [-math.inf] * behind
    next_token[b] = children + [-1] * behind
    next_sibling[b] = siblings + [-1] * behind
    index[b] = range(b * width, (b + 1) * width)
    num_nodes[b], nan_slot[b] = n, -1
    mask[b] = ancestor_matrix(links + [-1] * behind)
