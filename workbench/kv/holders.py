"""Everything that stores slot numbers and must learn, in one step, where rows went."""

from collections.abc import Callable, Iterable, MutableMapping
from typing import Protocol

import torch


class Holder(Protocol):
    """Two phases: `stage` may fail and shows nothing; `commit` shows all. `rollback` undoes either."""

    name: str

    def stage(self, slot_map: torch.Tensor) -> None:  # [rows] int64 on the host: new slot of each slot
        """Work the new slots out, aside."""

    def commit(self) -> None:
        """Show them."""

    def rollback(self) -> None:
        """Return to what was there before `stage`; nothing to do if nothing was staged."""


def remap(slots: torch.Tensor, slot_map: torch.Tensor) -> torch.Tensor:
    """`slot_map[slots]` in the dtype of `slots`; padding (negative) and rows behind the map stay."""
    slot_map = slot_map.to(slots.device)
    known = (slots >= 0) & (slots < len(slot_map))
    return torch.where(known, slot_map[torch.where(known, slots, 0).long()].to(slots.dtype), slots)


class SlotTensor:
    """A tensor of slots that keeps its address: a request table or the static buffer of a captured graph."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor = name, tensor
        self._old: torch.Tensor | None = None
        self._new: torch.Tensor | None = None

    def stage(self, slot_map: torch.Tensor) -> None:
        self._old = self.tensor.clone()
        self._new = remap(self.tensor, slot_map)

    def commit(self) -> None:
        if self._new is None:
            raise ValueError(f"holder {self.name!r}: commit before stage")
        self.tensor.copy_(self._new)

    def rollback(self) -> None:
        if self._old is not None:
            self.tensor.copy_(self._old)
        self._old = self._new = None


class SlotMapping:
    """Slots per request on the host; each request's tensor is replaced, never written."""

    def __init__(self, name: str, requests: MutableMapping[int, torch.Tensor]) -> None:
        self.name, self.requests = name, requests
        self._old: dict[int, torch.Tensor] | None = None
        self._new: dict[int, torch.Tensor] = {}

    def stage(self, slot_map: torch.Tensor) -> None:
        self._old = dict(self.requests)
        self._new = {key: remap(slots, slot_map) for key, slots in self.requests.items()}

    def commit(self) -> None:
        self.requests.update(self._new)

    def rollback(self) -> None:
        if self._old is not None:
            self.requests.update(self._old)
        self._old = None


class HasSlots(Protocol):
    """A host-side request."""

    slots: list[int]


class RequestSlots:
    """The `slots` list of every live request on the host; asked for anew at each relocation."""

    def __init__(self, name: str, live: Callable[[], Iterable[HasSlots]]) -> None:
        self.name, self.live = name, live
        self._old: list[tuple[HasSlots, list[int]]] = []
        self._new: list[list[int]] = []

    def stage(self, slot_map: torch.Tensor) -> None:
        self._old = [(request, request.slots) for request in self.live()]
        self._new = [
            remap(torch.tensor(slots, dtype=torch.int64), slot_map).tolist() for _, slots in self._old
        ]

    def commit(self) -> None:
        for (request, _), slots in zip(self._old, self._new):
            request.slots = slots

    def rollback(self) -> None:
        for request, slots in self._old:
            request.slots = slots
        self._old, self._new = [], []
