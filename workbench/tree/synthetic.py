"""Acceptance by a stated law instead of by a model, to tell the system's speed from the drafts' quality.

Two ways. `SyntheticDrafter` writes draft logits from the tokens the target is known to produce next, so that
ordinary, lossless acceptance follows the law. `accept_synthetic_batch` needs no such knowledge: it draws the
depth and keeps the best-ranked node there, so its output is not the model's and may not be scored.

Laws with one mean differ: name the law beside the number.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.tree.accept import write_path
from workbench.tree.buffers import AcceptBuffers, TreeBuffers


@dataclass(frozen=True)
class AcceptanceLaw:
    """`survival[d]` = probability that at least d + 1 drafts are accepted; non-increasing."""

    name: str
    survival: tuple[float, ...]

    def __post_init__(self) -> None:
        steps = (1.0, *self.survival, 0.0)
        if not self.survival or any(a < b for a, b in itertools.pairwise(steps)):
            raise ValueError(
                f"acceptance {list(self.survival)}: give 1 >= u1 >= u2 >= ... >= 0, at least one"
            )

    @property
    def slots(self) -> int:
        return len(self.survival)

    @property
    def mean_accept_length(self) -> float:
        """Tokens per verify pass, bonus included."""
        return 1.0 + math.fsum(self.survival)

    @property
    def conditional(self) -> tuple[float, ...]:
        """Probability that a draft is accepted given that all before it were."""
        return tuple(u / before if before else 0.0 for before, u in zip((1.0, *self.survival), self.survival))

    def draw_depths(self, noise: Tensor) -> Tensor:
        """Accepted drafts [bs] int64 for `noise` [bs] uniform in [0, 1); capturable after a first call."""
        return (noise.unsqueeze(1) < self.thresholds(noise.device)).sum(1)

    def thresholds(self, device: torch.device) -> Tensor:
        """`survival` as fp32 [L] on `device`, kept so that a captured step finds it at one address."""
        key = (self.survival, device)
        if key not in _THRESHOLDS:
            _THRESHOLDS[key] = torch.tensor(self.survival, dtype=torch.float32, device=device)
        return _THRESHOLDS[key]


_THRESHOLDS: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}


def geometric(mean_accept_length: float, slots: int) -> AcceptanceLaw:
    """Every draft accepted with one conditional probability p, where p + p^2 + ... + p^slots = mean - 1."""
    _check_mean(mean_accept_length, slots)
    low, high = 0.0, 1.0
    for _ in range(100):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**d for d in range(1, slots + 1)) < mean_accept_length - 1 else (low, p)
    return AcceptanceLaw("geometric", tuple(high**d for d in range(1, slots + 1)))


def floor_ceil(mean_accept_length: float, slots: int) -> AcceptanceLaw:
    """floor(mean - 1) drafts always, one more with the remaining probability, never another."""
    _check_mean(mean_accept_length, slots)
    rates = [min(1.0, max(0.0, mean_accept_length - d)) for d in range(1, slots + 1)]
    return AcceptanceLaw("floor_ceil", tuple(rates))


def per_position(rates: Sequence[float]) -> AcceptanceLaw:
    """Unconditional acceptance of each position, non-increasing."""
    return AcceptanceLaw("per_position", tuple(rates))


@dataclass(frozen=True)
class SyntheticDrafter:
    """Draft logits whose greedy acceptance follows `law`, for a chain and for every tree of budget >= L."""

    law: AcceptanceLaw
    vocab_size: int
    margin: float = 20.0  # of the top token over the rest: puts the spine into the first L nodes

    def __post_init__(self) -> None:
        if self.vocab_size < 3:
            raise ValueError(f"vocab_size={self.vocab_size}: a wrong draft needs at least 3 tokens")

    def draft(self, truth: Tensor, noise: Tensor, background: Tensor) -> Tensor:
        """Logits [bs, L, V] for the target's next tokens `truth` [bs, L]; `noise` [bs] uniform in [0, 1).

        `background` [bs, L, V] holds the logits of all other tokens, at most a few units apart. From the
        drawn depth on, the true token is ruled out (-inf), so no sibling can be right either.
        """
        depth = self.law.draw_depths(noise)
        right = torch.arange(truth.shape[1], device=truth.device) < depth.unsqueeze(1)  # [bs, L]
        top = torch.where(right, truth, (truth + 1) % self.vocab_size).unsqueeze(-1)
        peak = background.amax(-1, keepdim=True) + self.margin
        hidden = torch.where(right.unsqueeze(-1), peak, -torch.inf)
        return background.scatter(-1, truth.unsqueeze(-1), hidden).scatter(-1, top, peak)


def accept_synthetic_batch(
    tree: TreeBuffers, target_tokens: Tensor, out: AcceptBuffers, *, law: AcceptanceLaw, noise: Tensor
) -> None:
    """Accept the best-ranked path of the drawn depth, clipped to what the tree has; bonus = the target's
    token there.

    target_tokens [bs, N] int64, noise [bs] uniform in [0, 1). Capturable.
    """
    n = tree.width
    rows = torch.arange(n, device=tree.device)
    live = rows < tree.num_nodes.unsqueeze(1)  # [bs, N]
    deepest = torch.where(live, tree.depths, 0).amax(1)
    depth = torch.minimum(law.draw_depths(noise), deepest.long().clamp(max=out.max_accept - 1))
    at_depth = live & (tree.depths == depth.unsqueeze(1))
    last = torch.where(at_depth, rows, n).amin(1, keepdim=True)  # [bs, 1]
    path = tree.mask.gather(1, last.unsqueeze(-1).expand(-1, 1, n))[:, 0]  # [bs, N]
    write_path(tree, path, target_tokens, out)


def _check_mean(mean_accept_length: float, slots: int) -> None:
    if not 1.0 <= mean_accept_length <= slots + 1:
        raise ValueError(
            f"accept length {mean_accept_length} is out of reach of {slots} drafts: use 1 to {slots + 1}"
        )
