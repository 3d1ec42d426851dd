"""How scattered a request's slots are, and layouts made to order.

Gaps and backward steps are counted apart: sorting the free list removes only the latter.
"""

from dataclasses import dataclass

import numpy as np
import torch

from workbench.kv.slot_book import Slots, as_slots

PAGE_BYTES = 2 * 1024 * 1024
LATENT_ROW_BYTES = 1152  # (512 + 64) bf16 columns


@dataclass(frozen=True)
class LayoutScore:
    """Counts over one or more requests' slots in token order; pairs across requests are left out."""

    tokens: int
    runs: int  # maximal stretches of slots s, s+1, s+2, ...
    mean_run: float  # tokens / runs
    adjacency: float  # share of neighbouring tokens in neighbouring slots; 1.0 without neighbours
    descents: int  # later token in a lower slot
    span: int  # max - min + 1 slots
    pages_2mb: int  # 2 MB pages that hold at least one byte of the rows
    pairs: int = 0  # neighbouring tokens of one request

    @property
    def gaps(self) -> int:
        """Neighbouring tokens whose slots are not +1, forward or backward."""
        return round(self.pairs * self.gap_rate)

    @property
    def gap_rate(self) -> float:
        """Share of neighbouring tokens whose slots are not +1, forward or backward."""
        return 1.0 - self.adjacency

    @property
    def descent_rate(self) -> float:
        """Share of neighbouring tokens that go backward."""
        return self.descents / self.pairs if self.pairs else 0.0

    @property
    def span_ratio(self) -> float:
        """Slots spanned per token; 1.0 is dense."""
        return self.span / self.tokens if self.tokens else 0.0

    def metrics(self) -> dict[str, bool | int | float | str | None]:
        """For a row: counts and rates under their own names."""
        names = (
            "runs",
            "mean_run",
            "adjacency",
            "gap_rate",
            "descents",
            "descent_rate",
            "span",
            "span_ratio",
        )
        return {"tokens": self.tokens, "pages_2mb": self.pages_2mb} | {
            name: getattr(self, name) for name in names
        }


def layout_score(
    indices: torch.Tensor | Slots,  # [n] slots in token order
    indptr: torch.Tensor | Slots | None = None,  # [bs + 1]; None: one request
    *,
    row_bytes: int = LATENT_ROW_BYTES,
) -> LayoutScore:
    """Score of a layout; `row_bytes` is one slot in one layer and decides only `pages_2mb`."""
    slots = as_slots(indices)
    if not len(slots):
        return LayoutScore(0, 0, 0.0, 1.0, 0, 0, 0)
    steps = np.diff(slots)
    if indptr is not None:
        inside = np.ones(len(steps), dtype=bool)
        borders = as_slots(indptr)[1:-1] - 1
        inside[borders[(borders >= 0) & (borders < len(steps))]] = False
        steps = steps[inside]
    adjacent = int((steps == 1).sum())
    runs = len(slots) - adjacent
    return LayoutScore(
        tokens=len(slots),
        runs=runs,
        mean_run=len(slots) / runs,
        adjacency=adjacent / len(steps) if len(steps) else 1.0,
        descents=int((steps < 0).sum()),
        span=int(slots.max() - slots.min()) + 1,
        pages_2mb=_pages(slots, row_bytes),
        pairs=len(steps),
    )


def _pages(slots: Slots, row_bytes: int) -> int:
    first, last = slots * row_bytes // PAGE_BYTES, ((slots + 1) * row_bytes - 1) // PAGE_BYTES
    return len(np.union1d(first, last)) if row_bytes <= PAGE_BYTES else int((last - first + 1).sum())


LAYOUTS = ("contiguous", "runs:k", "sorted", "random", "reversed", "interleaved:k")


def make_layout(
    name: str, tokens: int, size: int, *, first: int = 1, seed: int = 0
) -> torch.Tensor:  # [tokens]
    """Slots in token order from a pool of slots 1..size.

    `contiguous`, `reversed` and `interleaved:k` (every k-th slot) start at `first`; `runs:k` puts runs of k
    slots anywhere in any order; `random` is a shuffle, `sorted` the same slots ascending. ValueError if it
    does not fit.
    """
    kind, k = _parse(name)
    reach = tokens * k if kind == "interleaved" else tokens
    if kind in ("contiguous", "reversed", "interleaved") and first + reach - 1 > size:
        raise ValueError(
            f"layout {name!r} of {tokens} tokens ends at slot {first + reach - 1}: the pool has {size} slots"
        )
    if tokens > (size // k * k if kind == "runs" else size):
        raise ValueError(f"layout {name!r} of {tokens} tokens does not fit {size} slots: enlarge the pool")
    rng = np.random.default_rng(seed)
    if kind == "runs":
        starts = rng.permutation(size // k)[: -(-tokens // k)] * k + 1
        slots = (starts[:, None] + np.arange(k)).reshape(-1)[:tokens]
    elif kind in ("random", "sorted"):
        slots = rng.permutation(size)[:tokens] + 1
        slots = np.sort(slots) if kind == "sorted" else slots
    else:
        slots = first + k * np.arange(tokens)
        slots = slots[::-1].copy() if kind == "reversed" else slots
    return torch.from_numpy(slots.astype(np.int64))


def _parse(name: str) -> tuple[str, int]:
    kind, _, argument = name.partition(":")
    takes_k = f"{kind}:k" in LAYOUTS
    if not takes_k and name not in LAYOUTS:
        raise ValueError(f"unknown layout {name!r}: choose one of {', '.join(LAYOUTS)}")
    if takes_k and not (argument.isdigit() and int(argument) > 0):
        raise ValueError(f"layout {name!r}: write {kind}:k with k at least 1, such as {kind}:16")
    return kind, int(argument) if takes_k else 1
