"""SGLang's page_size=1 token allocator: the same slots in the same order, at a cost independent of the size.

Upstream concatenates and slices one tensor per call; here the free list is a ring. The books are on the host.
"""

from dataclasses import dataclass

import numpy as np
import torch

from workbench.kv.slot_book import SlotBook, Slots, as_slots


@dataclass(frozen=True)
class AllocatorState:
    """A copy of everything that decides what `alloc` hands out next."""

    free_pages: Slots
    release_pages: Slots
    states: np.ndarray
    group: tuple[Slots, ...] | None
    handed_out: int
    sorts: int


class TokenKVAllocator:
    """Slots 1..size, first freed first reused; with `need_sort` frees wait aside until the list is short."""

    page_size = 1

    def __init__(self, size: int, need_sort: bool = False) -> None:
        self.book = SlotBook(size)
        self.size, self.need_sort = size, need_sort
        self._ring = np.empty(size, dtype=np.int64)
        self._aside = np.empty(size if need_sort else 0, dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        """Back to the initial state: everything free and ascending."""
        self.book = SlotBook(self.size)
        self._group: list[Slots] | None = None
        self._head = self._count = 0
        self._aside_count = self.handed_out = self.sorts = 0
        self._fill(np.arange(1, self.size + 1, dtype=np.int64))

    @property
    def rows(self) -> int:
        """Rows a pool needs for these slots, the dummy included."""
        return self.size + 1

    @property
    def wraps(self) -> float:
        """Trips around the pool: slots handed out so far / size."""
        return self.handed_out / self.size

    @property
    def free_pages(self) -> torch.Tensor:  # [available] int64, in the order they will be handed out
        return torch.from_numpy(self._listed())

    @property
    def release_pages(self) -> torch.Tensor:  # [waiting] int64, in the order they were freed
        return torch.from_numpy(self._aside[: self._aside_count].copy())

    def available_size(self) -> int:
        """Free slots; those freed inside an open group are counted nowhere until it ends."""
        return self._count + self._aside_count

    def alloc(self, n: int, last_slot: int = 0) -> torch.Tensor | None:  # [n] int64
        """The first n free slots, or None (and no change) if fewer are free. `last_slot` is not used here."""
        if n < 0:
            raise ValueError(f"alloc({n}): ask for 0 or more slots")
        if self.need_sort and n > self._count:
            self.merge_and_sort_free()
        if n > self._count:
            return None
        slots = self._listed(n)
        self._head = (self._head + n) % self.size
        self._count -= n
        self.book.take(slots)
        self.handed_out += n
        return torch.from_numpy(slots)

    def free(self, idx: torch.Tensor) -> None:
        """Give held slots back. ValueError names a double free, slot 0 or a foreign slot; all or nothing."""
        slots = as_slots(idx)
        self.book.give(slots)
        if self._group is not None:
            self._group.append(slots.copy())
        else:
            self._put(slots)

    def merge_and_sort_free(self) -> None:
        """Sort the free list together with the slots set aside; nothing to do when none are."""
        if self._aside_count:
            merged = np.concatenate((self._listed(), self._aside[: self._aside_count]))
            self._fill(np.sort(merged))
            self._aside_count = 0
            self.sorts += 1

    def free_group_begin(self) -> None:
        """Collect the following frees. ValueError inside an open group: upstream would lose its slots."""
        if self._group is not None:
            raise ValueError("free_group_begin inside an open group: call free_group_end first")
        self._group = []

    def free_group_end(self) -> None:
        """Free everything collected since free_group_begin as one concatenated free."""
        collected, self._group = self._group, None
        for slots in collected or ():
            self._put(slots)

    def backup_state(self) -> AllocatorState:
        """A copy of the state, for slots that are only borrowed (drafting, planning)."""
        group = None if self._group is None else tuple(self._group)
        aside = self._aside[: self._aside_count].copy()
        return AllocatorState(
            self._listed(), aside, self.book.state.copy(), group, self.handed_out, self.sorts
        )

    def restore_state(self, state: AllocatorState) -> None:
        """Return to a backup; it can be restored any number of times."""
        self._fill(state.free_pages)
        self._aside_count = len(state.release_pages)
        self._aside[: self._aside_count] = state.release_pages
        self.book.state[:] = state.states
        self._group = None if state.group is None else list(state.group)
        self.handed_out, self.sorts = state.handed_out, state.sorts

    def free_slots(self) -> torch.Tensor:  # [available] int64, ascending
        """Every slot that alloc could hand out, by number."""
        return torch.from_numpy(np.sort(np.concatenate((self._listed(), self._aside[: self._aside_count]))))

    def claim(self, idx: torch.Tensor) -> None:
        """Take exactly these free slots, whatever the list's order. ValueError names one that is not free."""
        slots = as_slots(idx)
        is_claimed = np.zeros(self.size + 1, dtype=bool)
        is_claimed[slots[(slots > 0) & (slots <= self.size)]] = True
        listed, aside = self._listed(), self._aside[: self._aside_count].copy()
        if is_claimed[listed].sum() + is_claimed[aside].sum() != len(slots):
            missing = np.setdiff1d(slots, np.concatenate((listed, aside)))
            slot = missing[0] if len(missing) else _repeat(slots)
            raise ValueError(f"claim: slot {slot} is not free or named twice: claim what free_slots() lists")
        self._fill(listed[~is_claimed[listed]])
        kept = aside[~is_claimed[aside]]
        self._aside[: len(kept)], self._aside_count = kept, len(kept)
        self.book.take(slots)
        self.handed_out += len(slots)

    def _put(self, slots: Slots) -> None:
        n = len(slots)
        if self.need_sort:
            self._aside[self._aside_count : self._aside_count + n] = slots
            self._aside_count += n
            return
        tail = (self._head + self._count) % self.size
        first = min(n, self.size - tail)
        self._ring[tail : tail + first] = slots[:first]
        self._ring[: n - first] = slots[first:]
        self._count += n

    def _listed(self, n: int | None = None) -> Slots:
        """A copy of the first n (default all) entries of the free list."""
        n = self._count if n is None else n
        end = self._head + n
        if end <= self.size:
            return self._ring[self._head : end].copy()
        return np.concatenate((self._ring[self._head :], self._ring[: end - self.size]))

    def _fill(self, slots: Slots) -> None:
        self._head, self._count = 0, len(slots)
        self._ring[: len(slots)] = slots


def _repeat(slots: Slots) -> int:
    values, counts = np.unique(slots, return_counts=True)
    return int(values[np.argmax(counts)])
