"""What a relocation would move, what the copy costs, and whether the fitted cost of scatter lets it pay."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workbench.kv.fragmentation import LayoutScore, layout_score
from workbench.kv.holders import Holder
from workbench.kv.policies import SlotPolicy
from workbench.kv.scatter_cost import ScatterCost
from workbench.kv.slot_book import Slots, as_slots
from workbench.targets import HardwareTarget

KEEP_RUN = 64  # tokens already in a run this long stay where they are


@dataclass(frozen=True)
class RelocationPlan:
    """What moves where, what it costs, and whether that can pay."""

    sources: torch.Tensor  # [rows] int64
    targets: torch.Tensor  # [rows] int64, free slots
    requests: tuple[int, ...]
    before: LayoutScore  # of the planned requests
    after: LayoutScore
    copy_us: float  # derived: every row of all layers read and written once, at the rate given
    gain_us_per_step: float  # derived: the fitted cost of gaps and backward steps, over all layers
    gain_interval_us: tuple[float, float] | None  # of the fit, 95 %
    remaining_steps: int
    pays: bool
    reason: str
    allocator: SlotPolicy
    holders: tuple[Holder, ...]

    @property
    def rows(self) -> int:
        """Slots that move."""
        return len(self.sources)

    @property
    def break_even_steps(self) -> float:
        """Steps after which the copy has paid for itself; infinite without a gain."""
        return self.copy_us / self.gain_us_per_step if self.gain_us_per_step > 0 else float("inf")


def plan_relocation(
    requests: Mapping[int, torch.Tensor],  # id -> [tokens] committed slots in token order
    allocator: SlotPolicy,
    holders: Sequence[Holder] = (),
    *,
    token_bytes: int,  # one slot over all layers of all pools that move
    layers: int,
    target: HardwareTarget,
    cost: ScatterCost,
    remaining_steps: int,
    copy_gbps: float | None = None,
    max_rows: int | None = None,
) -> RelocationPlan:
    """Choose the most scattered requests whose rows fit at most half as many free runs as they now lie in.

    A worn pool's free space is scattered too; what a first relocation leaves free serves a second one better.
    `cost` comes from fit_scatter_cost, `copy_gbps` (read plus written) from a measured copy; None is the
    target's DRAM rate, which a copy of scattered rows does not reach.
    ValueError for a paged allocator. A plan may hold nothing to move; its `reason` says why.
    """
    refuse_pages(allocator)
    free = as_slots(allocator.free_slots())
    budget = len(free) if max_rows is None else min(max_rows, len(free))
    worst_first = sorted(requests, key=lambda key: -layout_score(requests[key]).runs)
    moves: dict[int, tuple[Slots, Slots]] = {}
    for key in worst_first:
        sources = _scattered(as_slots(requests[key]))
        for planned, _ in moves.values():
            sources = sources[~np.isin(sources, planned)]  # a prefix that requests share moves once
        if not len(sources) or len(sources) > budget:
            continue
        targets = _take_runs(free, len(sources), most=layout_score(sources).runs // 2)
        if targets is None:
            continue
        moves[key] = (sources, targets)
        free, budget = np.setdiff1d(free, targets), budget - len(sources)
    return _priced(
        requests,
        moves,
        allocator,
        tuple(holders),
        token_bytes,
        layers,
        copy_gbps or target.dram_gbps,
        cost,
        remaining_steps,
    )


def _scattered(slots: Slots) -> Slots:
    """The slots that are not in a run of KEEP_RUN or more, in token order."""
    run = _run_of_each(slots)
    return slots[np.bincount(run)[run] < KEEP_RUN]


def _run_of_each(slots: Slots) -> Slots:  # [len(slots)]
    """Number of the run that each slot belongs to, from 0."""
    return np.concatenate((np.zeros(min(1, len(slots)), dtype=np.int64), np.cumsum(np.diff(slots) != 1)))


def _take_runs(free: Slots, n: int, most: int) -> Slots | None:  # [n] ascending
    """The smallest free run that holds n, else the fewest that do; None if those are more than `most`."""
    lengths = np.bincount(_run_of_each(free))
    first = np.cumsum(lengths) - lengths
    fitting = np.flatnonzero(lengths >= n)
    if len(fitting):
        start = first[fitting[np.argmin(lengths[fitting])]]
        return free[start : start + n]
    longest = np.argsort(-lengths, kind="stable")
    count = int(np.searchsorted(np.cumsum(lengths[longest]), n)) + 1
    if count > min(most, len(lengths)):
        return None
    return np.concatenate([free[first[i] : first[i] + lengths[i]] for i in np.sort(longest[:count])])[:n]


def _priced(
    requests: Mapping[int, torch.Tensor],
    moves: Mapping[int, tuple[Slots, Slots]],
    allocator: SlotPolicy,
    holders: tuple[Holder, ...],
    token_bytes: int,
    layers: int,
    copy_gbps: float,
    cost: ScatterCost,
    remaining_steps: int,
) -> RelocationPlan:
    empty = np.empty(0, dtype=np.int64)
    sources = np.concatenate([empty, *(pair[0] for pair in moves.values())])
    targets = np.concatenate([empty, *(pair[1] for pair in moves.values())])
    slot_map = make_slot_map(allocator.rows, sources, targets)
    old = [as_slots(requests[key]) for key in moves]
    indptr = np.concatenate(([0], np.cumsum([len(slots) for slots in old]))).astype(np.int64)
    flat = np.concatenate([empty, *old])
    row_bytes = token_bytes // layers
    before = layout_score(flat, indptr, row_bytes=row_bytes)
    after = layout_score(slot_map[flat], indptr, row_bytes=row_bytes)
    copy_us = 2 * len(sources) * token_bytes / (copy_gbps * 1e3)
    gain_us = layers * (cost.extra_us(before) - cost.extra_us(after))
    saving = cost.saving_interval_us(before, after)
    interval = (layers * saving[0], layers * saving[1]) if saving else None
    pays, reason = _verdict(len(sources), len(requests), copy_us, gain_us, interval, cost, remaining_steps)
    return RelocationPlan(
        torch.from_numpy(sources),
        torch.from_numpy(targets),
        tuple(moves),
        before,
        after,
        copy_us,
        gain_us,
        interval,
        remaining_steps,
        pays,
        reason,
        allocator,
        holders,
    )


def _verdict(
    rows: int,
    requests: int,
    copy_us: float,
    gain_us: float,
    interval_us: tuple[float, float] | None,
    cost: ScatterCost,
    remaining_steps: int,
) -> tuple[bool, str]:
    """(does it pay even at the lower end of the gain's interval, why) in one sentence. Derived throughout."""
    if rows == 0:
        return (
            False,
            f"none of {requests} requests can move: no scattered rows or no free runs that halve the gaps",
        )
    if not cost.above_noise:
        low, high = cost.effect_interval_us
        return False, (
            f"it cannot pay: scatter costs {cost.effect_us:.3g} us per layer by the fit"
            f" ({low:.3g} to {high:.3g}), not above the noise of {cost.noise_us:.3g} us"
        )
    if gain_us <= 0:
        return False, "it cannot pay: the predicted gain is zero"
    low, high = interval_us or (gain_us, gain_us)
    pays = low > 0 and copy_us / low < remaining_steps
    return pays, (
        f"by the fit it {'pays' if pays else 'cannot pay'}: a gain of {format_time(gain_us)} per step"
        f" ({format_time(low)} to {format_time(high)}) against {format_time(copy_us)} of copy,"
        f" {'after' if pays else 'even after'} {math.ceil(copy_us / gain_us)} of {remaining_steps} steps"
    )


def format_time(us: float) -> str:
    """Three digits and a unit: 0.25 us, 88 ms."""
    return f"{us / 1e3:.3g} ms" if abs(us) >= 1e3 else f"{us:.3g} us"


def refuse_pages(allocator: SlotPolicy) -> None:
    """ValueError for an allocator that hands out pages."""
    if allocator.page_size != 1:
        raise ValueError(
            f"page_size={allocator.page_size}: relocation moves single slots, use a page_size=1 policy"
        )


def make_slot_map(rows: int, sources: Slots, targets: Slots) -> Slots:  # [rows]
    """New slot of each slot; those that do not move map to themselves."""
    slot_map = np.arange(rows, dtype=np.int64)
    slot_map[sources] = targets
    return slot_map
