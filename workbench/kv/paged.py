"""SGLang's paged sibling (page_size > 1), for comparison: last freed, first reused."""

import numpy as np
import torch

from workbench.kv.booked import BookedPolicy
from workbench.kv.slot_book import HELD, SlotBook, Slots


class Paged(BookedPolicy):
    """Pages of `page_size` slots, page 0 the dummy; a page that empties goes to the head of the list.

    A request fills the page of its last slot first. What is left of a page is nobody else's.
    """

    def __init__(self, size: int, page_size: int) -> None:
        if size % page_size:
            raise ValueError(f"size={size} is not a multiple of page_size={page_size}: choose one that is")
        super().__init__(size)
        self.book = SlotBook(size + page_size - 1)
        self.page_size = page_size
        self._pages = np.arange(
            size // page_size, 0, -1, dtype=np.int64
        )  # the head of the list is at the end
        self._count = len(self._pages)
        self._used = np.zeros(size // page_size + 1, dtype=np.int64)  # held slots per page

    @property
    def rows(self) -> int:
        return self.size + self.page_size

    def available_size(self) -> int:
        """Slots in entirely free pages."""
        return self._count * self.page_size

    def alloc(self, n: int, last_slot: int = 0) -> torch.Tensor | None:  # [n] int64
        """n slots behind `last_slot`: the rest of its page, then new pages; None when they are too few."""
        if n < 0:
            raise ValueError(f"alloc({n}): ask for 0 or more slots")
        rest = self._rest_of_page(last_slot)[:n]
        new_pages = -(-(n - len(rest)) // self.page_size)
        if new_pages > self._count:
            return None
        pages = self._pages[self._count - new_pages : self._count][::-1]
        self._count -= new_pages
        fresh = (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
        slots = np.concatenate((rest, fresh[: n - len(rest)]))
        self._take(slots)
        np.add.at(self._used, slots // self.page_size, 1)
        return torch.from_numpy(slots)

    def free_slots(self) -> torch.Tensor:
        pages = np.sort(self._pages[: self._count])
        return torch.from_numpy((pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1))

    def claim(self, idx: torch.Tensor) -> None:
        """Refused: the slots of a page stay together."""
        raise ValueError(f"claim on pages of {self.page_size} slots: relocation is for page_size=1 policies")

    def _rest_of_page(self, last_slot: int) -> Slots:
        behind = last_slot + 1
        if last_slot == 0 or behind % self.page_size == 0:
            return np.empty(0, dtype=np.int64)
        rest = np.arange(behind, (behind // self.page_size + 1) * self.page_size, dtype=np.int64)
        return rest if not (self.book.state[rest] == HELD).any() else np.empty(0, dtype=np.int64)

    def _returned(self, slots: Slots) -> None:
        pages, counts = np.unique(slots // self.page_size, return_counts=True)
        self._used[pages] -= counts
        emptied = pages[self._used[pages] == 0][::-1]
        self._pages[self._count : self._count + len(emptied)] = emptied
        self._count += len(emptied)
