"""How far down the drafts are accepted: per position, offered and accepted, over many steps."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class AcceptanceStats:
    """Counts over verify passes; position d is the d-th draft behind the bonus."""

    drafts: int  # L
    counts: Counter[tuple[int, int]] = field(default_factory=Counter)  # (accept length, depth) -> passes

    def add(self, accept_length: int, depth: int) -> None:
        """One pass that emitted `accept_length` tokens (bonus included) from a tree of `depth`."""
        self.counts[accept_length, depth] += 1

    @property
    def passes(self) -> int:
        return self.counts.total()

    @property
    def emitted(self) -> int:
        return sum(length * n for (length, _), n in self.counts.items())

    @property
    def offered(self) -> np.ndarray:  # [L] passes whose tree reached depth d
        return self._sum_up(lambda length, depth: depth)

    @property
    def accepted(self) -> np.ndarray:  # [L] passes that accepted a node at depth d
        return self._sum_up(lambda length, depth: length - 1)

    def _sum_up(self, reach: Callable[[int, int], int]) -> np.ndarray:
        totals = np.zeros(self.drafts, dtype=np.int64)
        for (length, depth), n in self.counts.items():
            totals[: reach(length, depth)] += n
        return totals

    @property
    def mean_length(self) -> float:
        """Tokens per verify pass, bonus included; 0 before the first."""
        return self.emitted / self.passes if self.passes else 0.0

    def per_position(self) -> list[float]:
        """Share of passes that accepted position d, among all passes: unconditional, non-increasing."""
        return list((self.accepted / max(1, self.passes)).tolist())

    def conditional(self) -> list[float | None]:
        """Share of passes that accepted d - 1 and offered d which accepted d; None where none did."""
        accepted = self.accepted
        reached = np.minimum(np.concatenate(([self.passes], accepted[:-1])), self.offered)
        return [int(a) / int(r) if r else None for a, r in zip(accepted, reached)]
