"""Ways to hand slots out, behind one interface and in one table.

`last_slot` is the slot of the request's newest token (0: none yet); a policy may use it to stay close.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from workbench.kv.allocator import TokenKVAllocator
from workbench.kv.best_fit import BestFitRuns
from workbench.kv.booked import SortedAlways
from workbench.kv.paged import Paged
from workbench.kv.slot_book import SlotBook


class SlotPolicy(Protocol):
    """What the churn, the decode loop and the relocation need from an allocator."""

    size: int
    page_size: int
    handed_out: int
    book: SlotBook

    @property
    def rows(self) -> int: ...
    @property
    def wraps(self) -> float: ...
    def alloc(self, n: int, last_slot: int = 0) -> torch.Tensor | None: ...
    def free(self, idx: torch.Tensor) -> None: ...
    def available_size(self) -> int: ...
    def free_slots(self) -> torch.Tensor: ...
    def claim(self, idx: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class Policy:
    """One row of the table: what the notebook, the command line and the rows call it."""

    name: str
    title: str
    make: Callable[[int], SlotPolicy]
    uses_last_slot: bool = False  # slots depend on the request, so each one allocates for itself
    compacts: bool = False  # accepted rows are moved to the front of their window (page_size > 1)


def policies() -> list[Policy]:
    """Every policy, in the order of figures and tables."""
    return [
        Policy("fifo", "SGLang's default: first freed, first reused", TokenKVAllocator),
        Policy(
            "need_sort",
            "Tier 0: sort the free list when it is too short",
            lambda size: TokenKVAllocator(size, need_sort=True),
        ),
        Policy("sorted_always", "lowest free slots first", SortedAlways),
        Policy("best_fit_runs", "keep a request in runs", BestFitRuns, uses_last_slot=True),
        Policy("paged16", "pages of 16", lambda size: Paged(size, 16), uses_last_slot=True, compacts=True),
        Policy("paged64", "pages of 64", lambda size: Paged(size, 64), uses_last_slot=True, compacts=True),
    ]


def policy(name: str) -> Policy:
    """The policy called `name`. ValueError lists the known ones."""
    known = {each.name: each for each in policies()}
    if name not in known:
        raise ValueError(f"unknown policy {name!r}: choose one of {', '.join(known)}")
    return known[name]
