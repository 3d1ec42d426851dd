"""DDTree on the host: the `budget` most probable prefixes of per-slot draft marginals, by best-first
search.

The rule of arXiv 2604.12989: take the most probable candidate, offer its next sibling and its first child.
This is the oracle of the batch builders. Equal weights: the lexicographically smaller rank vector first, so
a prefix before its extension; equal logits in a slot: the smaller token id first.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Ranked = list[tuple[list[float], list[int]]]  # per slot: log-probabilities, descending, and their token ids
Nodes = tuple[list[int], list[int], list[int], list[float]]  # token ids, depths, parents, log-probabilities


@dataclass(frozen=True)
class DraftTree:
    """A tree in pop order: node 0 is the root (the known bonus token), parents precede children."""

    token_ids: Tensor  # [n] int64
    depths: Tensor  # [n] int64
    parents: Tensor  # [n] int64, -1 for the root
    log_probs: Tensor  # [n] fp64, of the whole path; 0 for the root

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    def visibility(self) -> Tensor:
        """[n, n] bool: row i sees its ancestors and itself."""
        return torch.from_numpy(ancestor_matrix(self.parents.tolist()))

    def positions(self, start: int) -> Tensor:
        """[n] int64: committed KV length `start` plus depth."""
        return self.depths + start

    def retrieve(self) -> tuple[Tensor, Tensor, Tensor]:
        """(index, next_token, next_sibling), each [n] int64: own row, first child, next sibling; -1 where
        none."""
        next_token, next_sibling = link_children(self.parents.tolist())
        return torch.arange(len(self)), torch.tensor(next_token), torch.tensor(next_sibling)

    def paths(self) -> list[tuple[int, ...]]:
        """Token sequence from the root (exclusive) to each node."""
        found: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.token_ids.tolist()[1:], self.parents.tolist()[1:]):
            found.append((*found[parent], token))
        return found


def ancestor_matrix(parents: list[int]) -> np.ndarray:
    """[n, n] bool: row i = row of its parent plus i. A parent index below 0 means none."""
    n = len(parents)
    row_bytes = (n + 7) // 8
    rows: list[int] = []
    for i, parent in enumerate(parents):
        rows.append((rows[parent] if parent >= 0 else 0) | (1 << i))
    packed = np.frombuffer(b"".join(row.to_bytes(row_bytes, "little") for row in rows), dtype=np.uint8)
    return np.unpackbits(packed.reshape(n, row_bytes), axis=1, count=n, bitorder="little").view(bool)


def link_children(parents: list[int]) -> tuple[list[int], list[int]]:
    """(first child, next sibling) per node; the smallest index, i.e. the most probable child, comes first."""
    next_token, next_sibling = [-1] * len(parents), [-1] * len(parents)
    for i in range(len(parents) - 1, 0, -1):
        parent = parents[i]
        if parent >= 0:
            next_sibling[i] = next_token[parent]
            next_token[parent] = i
    return next_token, next_sibling


def rank_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best log-probabilities and token ids per row of logits [..., L, V]: by logit, then id.

    Returns ([..., L, k] fp64, [..., L, k] int64), normalised over the whole vocabulary. Raises ValueError
    that names the row of a NaN or +inf.
    """
    x = logits.float()
    lse = torch.logsumexp(x, -1, keepdim=True)
    if not bool((lse < torch.inf).all()):
        row = (~(lse < torch.inf)).nonzero()[0, :-1].tolist()
        where = " of request ".join(map(str, reversed(row)))
        raise ValueError(f"NaN or +inf draft logit in slot {where}: check the drafter's output")
    vocab = x.shape[-1]
    values, tokens = torch.topk(x, min(k + 1, vocab), dim=-1)  # one more than k shows a tie across the cut
    if k < vocab:
        tied = values[..., k] == values[..., k - 1]
        tokens = tokens[..., :k]
        if bool(tied.any()):
            tokens[tied] = smallest_ids(x[tied], values[tied][:, k - 1 : k], k)
    tokens = tokens.sort(-1).values
    values, order = torch.sort(x.gather(-1, tokens), dim=-1, descending=True, stable=True)
    shift = torch.where(lse == -torch.inf, 0.0, lse)  # a slot without any token stays at -inf
    return values.double() - shift.double(), tokens.gather(-1, order)


def smallest_ids(x: Tensor, least: Tensor, k: int) -> Tensor:
    """The k best ids per row of x [rows, V], ascending; of those equal to `least` [rows, 1], the k-th best
    value, the smallest ids."""
    above, equal = x > least, x == least
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= room))
    return chosen.nonzero()[:, 1].view(-1, k)


def best_first(ranked: Ranked, budget: int, min_log_prob: float = -math.inf) -> Nodes:
    """(token ids, depths, parents, log-probabilities) of the best prefixes in pop order, without the root."""
    tokens: list[int] = []
    depths: list[int] = []
    parents: list[int] = []
    log_probs: list[float] = []
    # (-weight, rank vector, parent index, parent's weight): the vector settles ties, the rest is carried
    heap: list[tuple[float, tuple[int, ...], int, float]]
    heap = [(-ranked[0][0][0], (0,), 0, 0.0)] if ranked and ranked[0][0] else []
    while heap and len(tokens) < budget:
        negative, ranks, parent, base = heapq.heappop(heap)
        depth, weight, rank = len(ranks), -negative, ranks[-1]
        if weight < min_log_prob or weight == -math.inf:
            break
        slot_log_probs, slot_tokens = ranked[depth - 1]
        tokens.append(slot_tokens[rank])
        depths.append(depth)
        parents.append(parent)
        log_probs.append(weight)
        if rank + 1 < len(slot_log_probs):
            heapq.heappush(heap, (-(base + slot_log_probs[rank + 1]), (*ranks[:-1], rank + 1), parent, base))
        if depth < len(ranked) and ranked[depth][0]:
            heapq.heappush(heap, (-(weight + ranked[depth][0][0]), (*ranks, 0), len(tokens), weight))
    return tokens, depths, parents, log_probs


def draft_depth(slots: int, max_tokens: int | None) -> int:
    """Depth worth drafting: a node at depth d yields d + 1 tokens with the bonus, so depth <= max_tokens -
    1."""
    return slots if max_tokens is None else max(0, min(slots, max_tokens - 1))


def build_ddtree(
    logits: Tensor,
    budget: int,
    root_token: int = -1,
    *,
    max_tokens: int | None = None,
    min_log_prob: float | None = None,
) -> DraftTree:
    """The best tree of at most `budget` nodes below the root for draft logits or log-probabilities [L, V].

    Cut by the budget, by the path's log-probability (`min_log_prob`), and by the tokens the request may still
    produce (`max_tokens`). Prefixes of probability zero do not exist. Raises ValueError on NaN or +inf.
    """
    floor = -math.inf if min_log_prob is None else min_log_prob
    return _make_tree(best_first(_rank_lists(logits, budget, max_tokens), budget, floor), root_token)


def build_chain(logits: Tensor, root_token: int = -1, *, max_tokens: int | None = None) -> DraftTree:
    """The chain of the most probable token per slot of [L, V]: a tree of width 1."""
    return _make_tree(best_first(_rank_lists(logits, 1, max_tokens), len(logits)), root_token)


def _rank_lists(logits: Tensor, budget: int, max_tokens: int | None) -> Ranked:
    if logits.ndim != 2:
        raise ValueError(f"draft logits have shape {tuple(logits.shape)}: pass one request's [L, V]")
    used = logits[: draft_depth(logits.shape[0], max_tokens)]
    if budget <= 0 or used.numel() == 0:
        return []
    log_probs, tokens = rank_tokens(used, min(budget, used.shape[1]))
    return list(zip(log_probs.tolist(), tokens.tolist()))


def _make_tree(nodes: Nodes, root_token: int) -> DraftTree:
    tokens, depths, parents, log_probs = nodes
    return DraftTree(
        torch.tensor([root_token, *tokens]),
        torch.tensor([0, *depths]),
        torch.tensor([-1, *parents]),
        torch.tensor([0.0, *log_probs], dtype=torch.float64),
    )
