"""Which slots are out: the check that every allocator runs on every free."""

import numpy as np
import torch
from numpy.typing import NDArray

Slots = NDArray[np.int64]
NEVER, HELD, FREE, DUMMY, OUTSIDE = range(5)


def as_slots(idx: torch.Tensor | Slots) -> Slots:  # [n]
    """Slots as a flat int64 array on the host; a device tensor is waited for."""
    array = idx.detach().cpu().numpy() if isinstance(idx, torch.Tensor) else np.asarray(idx)
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"slots of dtype {array.dtype}: pass an integer tensor")
    return array.astype(np.int64, copy=False).reshape(-1)


class SlotBook:
    """One byte per slot: never handed out, held, or free again. Microseconds per call, whatever the size."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"allocator size={size} must be at least 1")
        self.size = size
        self.state = np.full(size + 2, NEVER, dtype=np.int8)
        self.state[0], self.state[size + 1] = DUMMY, OUTSIDE
        self._stamp = np.zeros(size + 2, dtype=np.int32)

    def take(self, slots: Slots) -> None:
        """Mark slots that come from a free list as held."""
        self.state[slots] = HELD

    def give(self, slots: Slots) -> None:
        """Mark held slots as free. ValueError names the first slot that may not be, and changes nothing."""
        order = np.arange(len(slots), dtype=np.int32)
        # "clip" sends anything outside 0..size to one of the two guard entries
        if not (self.state.take(slots, mode="clip") == HELD).all():
            raise ValueError(self._why_not(slots))
        self._stamp[slots] = order
        if not (self._stamp[slots] == order).all():
            raise ValueError(
                f"double free: slot {_first_repeat(slots)} appears twice in one free: free each slot once"
            )
        self.state[slots] = FREE

    def held(self) -> Slots:
        """Every held slot, ascending."""
        return np.flatnonzero(self.state == HELD)

    def _why_not(self, slots: Slots) -> str:
        states = self.state.take(slots, mode="clip")
        at = int(np.flatnonzero(states != HELD)[0])
        slot, state = int(slots[at]), int(states[at])
        if slot < 0 or state == OUTSIDE:
            return f"foreign slot {slot}: this allocator owns slots 1..{self.size}"
        if state == DUMMY:
            return "slot 0 is the padding dummy: drop padded rows before freeing"
        if state == NEVER:
            return f"foreign slot {slot}: it was never handed out, free only what alloc returned"
        return f"double free: slot {slot} is already free, free each slot once"


def _first_repeat(slots: Slots) -> int:
    values, counts = np.unique(slots, return_counts=True)
    return int(values[counts > 1][0])
