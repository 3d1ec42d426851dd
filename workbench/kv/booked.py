"""Checks and counters that every policy but SGLang's allocator shares, and the address-ordered one."""

import numpy as np
import torch

from workbench.kv.slot_book import HELD, SlotBook, Slots, as_slots


class BookedPolicy:
    """Checks and counters shared by the policies that are not SGLang's token allocator."""

    page_size = 1

    def __init__(self, size: int) -> None:
        self.size, self.book = size, SlotBook(size)
        self.handed_out, self._available = 0, size

    @property
    def rows(self) -> int:
        """Rows a pool needs for these slots, the dummy included."""
        return self.size + 1

    @property
    def wraps(self) -> float:
        """Trips around the pool: slots handed out so far / size."""
        return self.handed_out / self.size

    def available_size(self) -> int:
        """Free slots."""
        return self._available

    def alloc(self, n: int, last_slot: int = 0) -> torch.Tensor | None:  # [n] int64
        """n slots, or None and no change when fewer are free."""
        if n < 0:
            raise ValueError(f"alloc({n}): ask for 0 or more slots")
        if n > self.available_size():
            return None
        slots = self._choose(n, last_slot)
        self._take(slots)
        return torch.from_numpy(slots)

    def free(self, idx: torch.Tensor) -> None:
        """Give held slots back. ValueError names a double free, slot 0 or a foreign slot; all or nothing."""
        slots = as_slots(idx)
        self.book.give(slots)
        self._available += len(slots)
        self._returned(slots)

    def free_slots(self) -> torch.Tensor:  # [available] int64, ascending
        """Every slot that alloc could hand out, by number."""
        state = self.book.state[1 : self.size + 1]
        return torch.from_numpy(np.flatnonzero(state != HELD) + 1)

    def claim(self, idx: torch.Tensor) -> None:
        """Take exactly these free slots. ValueError names one that is not free."""
        slots = as_slots(idx)
        taken = np.setdiff1d(slots, self.free_slots().numpy())
        if len(taken) or len(np.unique(slots)) != len(slots):
            what = f"slot {taken[0]} is not free" if len(taken) else "a slot is named twice"
            raise ValueError(f"claim: {what}: claim what free_slots() lists")
        self._take(slots)
        self._claimed(slots)

    def _take(self, slots: Slots) -> None:
        self.book.take(slots)
        self.handed_out += len(slots)
        self._available -= len(slots)

    def _choose(self, n: int, last_slot: int) -> Slots:
        raise NotImplementedError

    def _returned(self, slots: Slots) -> None:
        """Slots came back."""

    def _claimed(self, slots: Slots) -> None:
        """Slots left by name."""


class SortedAlways(BookedPolicy):
    """The lowest free slots first: the order of a list that is sorted before every alloc."""

    CHUNK = 4096

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._lowest = 1  # nothing below is free

    def _choose(self, n: int, last_slot: int) -> Slots:
        found: list[Slots] = [np.empty(0, dtype=np.int64)]
        missing, start = n, self._lowest
        while missing > 0:
            stop = min(start + self.CHUNK, self.size + 1)
            free = np.flatnonzero(self.book.state[start:stop] != HELD)[:missing] + start
            found.append(free)
            missing, start = missing - len(free), stop
        slots = np.concatenate(found)
        self._lowest = int(slots[-1]) + 1 if n else self._lowest
        return slots

    def _returned(self, slots: Slots) -> None:
        if len(slots):
            self._lowest = min(self._lowest, int(slots.min()))
