"""The conventional split's middle: top-k leaves the device, the host runs the heap, the tree goes back."""

import torch
from torch import Tensor

from workbench.decode.buffers import StepBuffers
from workbench.decode.step import StepSettings
from workbench.tree.batch import build_chain_batch, build_ddtree_batch
from workbench.tree.buffers import TreeBuffers
from workbench.tree.ddtree import DraftTree, ancestor_matrix, best_first, draft_depth, link_children

UPLOADED = ("token_ids", "depths", "parents", "log_probs", "num_nodes", "mask", "next_token", "next_sibling")


def build_on_host(b: StepBuffers, settings: StepSettings) -> None:
    """Build this batch's trees on the host from b.draft_logits [bs, L, V]; waits for the draft."""
    assert b.draft_logits is not None
    limit = b.remaining if settings.cut_to_remaining else None
    if settings.shape == "chain_tree":
        logits = b.draft_logits[:, : b.width - 1]
        if not logits.is_cuda:
            build_chain_batch(logits, b.tree, root_tokens=b.bonus, max_tokens=limit)
            return
        log_probs, tokens = rank_on_device(logits, 1)
        budget = logits.shape[1]
    else:
        if not b.draft_logits.is_cuda:
            build_ddtree_batch(
                b.draft_logits, settings.budget, b.tree,
                root_tokens=b.bonus, max_tokens=limit, min_log_prob=settings.min_log_prob,
            )  # fmt: skip
            return
        budget = settings.budget
        log_probs, tokens = rank_on_device(b.draft_logits, min(budget, b.draft_logits.shape[-1]))
    _upload(b, _run_heaps(b, settings, log_probs, tokens, budget, limit))


def rank_on_device(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best log-probabilities and tokens per slot, [bs, L, k] each, on the host."""
    values, tokens = torch.topk(logits, k, dim=-1)
    log_probs = values - torch.logsumexp(logits, -1, keepdim=True)
    return log_probs.cpu(), tokens.cpu()


def _run_heaps(
    b: StepBuffers,
    settings: StepSettings,
    log_probs: Tensor,
    tokens: Tensor,
    budget: int,
    limit: Tensor | None,
) -> list[DraftTree]:
    floor = -torch.inf if settings.min_log_prob is None else settings.min_log_prob
    bonus = b.bonus.tolist()
    limits = [None] * b.bs if limit is None else limit.tolist()
    trees = []
    for request, (weights, ids) in enumerate(zip(log_probs.tolist(), tokens.tolist())):
        depth = draft_depth(len(weights), limits[request])
        ranked = list(zip(weights, ids))[:depth]
        token_ids, depths, parents, path = best_first(ranked, budget, floor)
        trees.append(
            DraftTree(
                torch.tensor([bonus[request], *token_ids]),
                torch.tensor([0, *depths]),
                torch.tensor([-1, *parents]),
                torch.tensor([0.0, *path], dtype=torch.float64),
            )
        )
    return trees


def _upload(b: StepBuffers, trees: list[DraftTree]) -> None:
    host = TreeBuffers(b.bs, b.width)
    for request, tree in enumerate(trees):
        n, links = len(tree), tree.parents.tolist()
        children, siblings = link_children(links)
        host.token_ids[request, :n] = tree.token_ids
        host.depths[request, :n] = tree.depths
        host.parents[request, :n] = tree.parents
        host.log_probs[request, :n] = tree.log_probs
        host.num_nodes[request] = n
        host.mask[request, :n, :n] = torch.from_numpy(ancestor_matrix(links))
        host.next_token[request, :n] = torch.tensor(children)
        host.next_sibling[request, :n] = torch.tensor(siblings)
    for name in UPLOADED:
        getattr(b.tree, name).copy_(getattr(host, name).pin_memory(), non_blocking=True)
