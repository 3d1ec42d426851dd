"""Tier 1: move the scattered rows of live requests into free runs and tell everyone who knows their slots.

Targets are free slots, so the old layout stays whole until the very last step; whatever fails before it,
nothing has moved. Call it between two steps of a decode: rows of reserved, unwritten slots are not touched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from workbench.kv.holders import Holder
from workbench.kv.relocation_plan import RelocationPlan, make_slot_map, refuse_pages
from workbench.kv.slot_book import HELD, as_slots


class RowPool(Protocol):
    """Anything with rows of all layers in one tensor."""

    @property
    def buffer(self) -> torch.Tensor: ...  # [layers, rows, width]


@dataclass(frozen=True)
class Relocated:
    """What happened; `done` is false after an abort, and the old layout is then in force."""

    done: bool
    rows: int
    bytes: int  # read plus written
    reason: str


def relocate(
    pools: RowPool | Sequence[RowPool],
    plan: RelocationPlan,
    *,
    chunk_rows: int | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Relocated:
    """Copy the plan's rows in every pool, then remap holders and allocator together.

    `should_stop` is asked before each chunk and before the remap. On a stop or an error nothing has changed.
    Raises ValueError when the plan no longer fits (a source was freed, a target was taken).
    """
    buffers = [pool.buffer for pool in (pools if isinstance(pools, Sequence) else [pools])]
    _check(plan, buffers)
    if plan.rows == 0:
        return Relocated(False, 0, 0, plan.reason)
    chunk, stopped = chunk_rows or plan.rows, False
    for start in range(0, plan.rows, chunk):
        if stopped := bool(should_stop and should_stop()):
            break
        for buffer in buffers:
            copy_rows(buffer, plan.sources[start : start + chunk], plan.targets[start : start + chunk])
    if stopped or (should_stop and should_stop()):
        return Relocated(False, 0, 0, "stopped before the remap: the old layout is in force")
    _remap(plan)
    moved = 2 * plan.rows * sum(b.shape[0] * b.shape[2] * b.element_size() for b in buffers)
    return Relocated(True, plan.rows, moved, f"moved {plan.rows} rows of {len(plan.requests)} requests")


def _remap(plan: RelocationPlan) -> None:
    """Every holder or none; the allocator last, it was checked and cannot refuse."""
    slot_map = torch.from_numpy(
        make_slot_map(plan.allocator.rows, as_slots(plan.sources), as_slots(plan.targets))
    )
    touched: list[Holder] = []
    try:
        for holder in plan.holders:
            touched.append(holder)
            holder.stage(slot_map)
        for holder in plan.holders:
            holder.commit()
    except BaseException:
        for holder in touched:
            holder.rollback()
        raise
    plan.allocator.claim(plan.targets)
    plan.allocator.free(plan.sources)


def _check(plan: RelocationPlan, buffers: Sequence[torch.Tensor]) -> None:
    refuse_pages(plan.allocator)
    free = as_slots(plan.allocator.free_slots())
    sources, targets = as_slots(plan.sources), as_slots(plan.targets)
    taken = np.setdiff1d(targets, free)
    if len(taken):
        raise ValueError(f"target slot {taken[0]} is no longer free: plan again")
    freed = sources[plan.allocator.book.state[sources] != HELD]
    if len(freed):
        raise ValueError(f"source slot {freed[0]} was freed since the plan: plan again")
    for slots in (sources, targets):
        if len(np.unique(slots)) != len(slots):
            raise ValueError("a slot is named twice in the plan: plan again from distinct slots")
    for buffer in buffers:
        if buffer.shape[1] < plan.allocator.rows:
            raise ValueError(f"a pool of {buffer.shape[1]} rows under an allocator of {plan.allocator.rows}")


def copy_rows(buffer: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy rows to rows in every layer of `buffer` [layers, rows, width]; any overlap is read before written.

    Disjoint rows on CUDA take one launch, overlapping ones a staging buffer. Slots are on the host.
    """
    overlaps = len(np.intersect1d(as_slots(sources), as_slots(targets))) > 0
    sources, targets = (slots.to(buffer.device, non_blocking=True) for slots in (sources, targets))
    if overlaps:
        buffer.index_copy_(1, targets, buffer.index_select(1, sources))
    else:
        copy_disjoint_rows(buffer, sources, targets)


def copy_disjoint_rows(buffer: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """The same for slots on the buffer's device that are known not to overlap: no check, no host sync."""
    if buffer.is_cuda:
        from workbench.kv.triton_copy import copy_rows as copy_on_device

        copy_on_device(buffer, sources, targets)
    else:
        buffer.index_copy_(1, targets, buffer.index_select(1, sources))
