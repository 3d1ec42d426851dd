"""How far down the drafts are accepted: per position, offered and accepted, over many steps."""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class AcceptanceStats:
    """Counts over verify passes; position d is the d-th draft behind the bonus."""

    drafts: int  # L
    passes: int = 0
    emitted: int = 0
    offered: np.ndarray = field(init=False)  # [L] passes whose tree reached depth d
    accepted: np.ndarray = field(init=False)  # [L] passes that accepted a node at depth d

    def __post_init__(self) -> None:
        self.offered = np.zeros(self.drafts, dtype=np.int64)
        self.accepted = np.zeros(self.drafts, dtype=np.int64)

    def add(self, accept_length: int, depth: int) -> None:
        """One pass that emitted `accept_length` tokens (bonus included) from a tree of `depth`."""
        self.passes += 1
        self.emitted += accept_length
        self.offered[:depth] += 1
        self.accepted[: accept_length - 1] += 1

    @property
    def mean_length(self) -> float:
        """Tokens per verify pass, bonus included; 0 before the first."""
        return self.emitted / self.passes if self.passes else 0.0

    def per_position(self) -> list[float]:
        """Share of passes that accepted position d, among all passes: unconditional, non-increasing."""
        return (self.accepted / max(1, self.passes)).tolist()

    def conditional(self) -> list[float | None]:
        """Share of passes that accepted d - 1 and offered d which accepted d; None where none did."""
        before = np.concatenate(([self.passes], self.accepted[:-1]))
        reached = np.minimum(before, self.offered)
        return [int(a) / int(r) if r else None for a, r in zip(self.accepted, reached)]
