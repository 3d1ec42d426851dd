"""Is the tree that a step verified a right one? Near ties may be settled either way, nothing else may differ.

With nearly equal draft probabilities two right builders choose different nodes: sums in fp32 on the device,
in fp64 on the host. Such trees agree in what counts: sorted by weight, node by node, they are worth the same.
"""

import numpy as np
import torch
from torch import Tensor

from workbench.tree.buffers import TreeBuffers
from workbench.tree.ddtree import ancestor_matrix, link_children

WEIGHT_TOLERANCE = 1e-3  # of a path's log-probability; fp32 sums of a few dozen terms stay below 1e-4


def differing_parts(
    tree: TreeBuffers, best: TreeBuffers, logits: Tensor | None, live: int, *, is_linked: bool = True
) -> list[str]:
    """What makes `tree` another tree than `best` for the first `live` requests; [] when equal in worth.

    `logits` [bs, L, V] are the draft logits both were built from; None compares tokens. `is_linked` also
    checks the arrays that acceptance walks, which a plain chain does not have.
    """
    if not torch.equal(tree.num_nodes[:live], best.num_nodes[:live]):
        return ["tree.num_nodes"]
    if not torch.equal(tree.token_ids[:live, 0], best.token_ids[:live, 0]):
        return ["tree.token_ids"]
    wrong: list[str] = []
    for request in range(live):
        wrong += [name for name in misplaced(tree, request, is_linked) if name not in wrong]
    if wrong:
        return wrong
    if all(is_same_worth(tree, best, logits, request) for request in range(live)):
        return []
    return ["tree.token_ids"]


def misplaced(tree: TreeBuffers, request: int, is_linked: bool) -> list[str]:
    """Names of arrays that contradict the parents: a stale mask or depth of a tree that is gone."""
    n = int(tree.num_nodes[request])
    parents, depths = tree.parents[request, :n].tolist(), tree.depths[request, :n].tolist()
    if parents[:1] != [-1] or any(not 0 <= parent < i for i, parent in enumerate(parents[1:], start=1)):
        return ["tree.parents"]
    wrong = []
    if depths != [0, *(depths[parent] + 1 for parent in parents[1:])]:
        wrong.append("tree.depths")
    if not np.array_equal(tree.mask[request, :n, :n].cpu().numpy(), ancestor_matrix(parents)):
        wrong.append("tree.mask")
    if is_linked and has_wrong_links(tree, request, parents):
        wrong.append("tree.links")
    return wrong


def has_wrong_links(tree: TreeBuffers, request: int, parents: list[int]) -> bool:
    """Whether the walk arrays lead anywhere but to the children, or two siblings draft the same token."""
    n = len(parents)
    walk = (tree.next_token[request, :n].tolist(), tree.next_sibling[request, :n].tolist())
    drafts = list(zip(parents, tree.token_ids[request, :n].tolist()))
    return walk != link_children(parents) or len(set(drafts)) < n


def is_same_worth(tree: TreeBuffers, best: TreeBuffers, logits: Tensor | None, request: int) -> bool:
    """Whether the nodes, sorted by weight under logits [bs, L, V], weigh the same in both trees."""
    n = int(best.num_nodes[request])
    same = torch.equal(tree.token_ids[request, :n], best.token_ids[request, :n])
    if same and torch.equal(tree.parents[request, :n], best.parents[request, :n]):
        return True
    if logits is None:
        return False
    weights = [path_weights(t, logits[request], request)[1:].sort().values for t in (tree, best)]
    return bool((weights[0] - weights[1]).abs().max() <= WEIGHT_TOLERANCE)


def path_weights(tree: TreeBuffers, logits: Tensor, request: int) -> Tensor:
    """[n] fp64 log-probability of every node's path under logits [L, V], from nothing but the tree."""
    n = int(tree.num_nodes[request])
    depths, tokens = tree.depths[request, :n].long(), tree.token_ids[request, :n]
    slots = torch.log_softmax(logits.double(), -1)
    own = torch.where(depths > 0, slots[(depths - 1).clamp(min=0), tokens], 0.0)
    ancestors = torch.from_numpy(ancestor_matrix(tree.parents[request, :n].tolist())).to(own)
    return ancestors @ own
