"""Keep a request's slots in runs: a list of free runs, searched by place and by length."""

from bisect import bisect_left, insort

import numpy as np

from workbench.kv.booked import BookedPolicy
from workbench.kv.slot_book import Slots


class BestFitRuns(BookedPolicy):
    """Continue behind the request's last slot when free, else the smallest free run that holds all n."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._stop = {1: size + 1}  # start of a free run -> slot behind it
        self._starts, self._by_length = [1], [(size, 1)]

    def _choose(self, n: int, last_slot: int) -> Slots:
        pieces: list[Slots] = [np.empty(0, dtype=np.int64)]
        if last_slot and n and last_slot + 1 in self._stop:
            pieces.append(self._cut(last_slot + 1, n))
        while (missing := n - sum(map(len, pieces))) > 0:
            at = bisect_left(self._by_length, (missing, 0))
            _, start = self._by_length[min(at, len(self._by_length) - 1)]
            pieces.append(self._cut(start, missing))
        return np.concatenate(pieces)

    def _cut(self, start: int, n: int) -> Slots:
        """Take up to n slots from the front of the run at `start`."""
        stop = self._stop[start]
        end = min(start + n, stop)
        self._drop(start)
        if end < stop:
            self._add(end, stop)
        return np.arange(start, end, dtype=np.int64)

    def _returned(self, slots: Slots) -> None:
        for start, stop in _runs(np.sort(slots)):
            self._insert(start, stop)

    def _claimed(self, slots: Slots) -> None:
        for start, stop in _runs(np.sort(slots)):
            around = self._starts[bisect_left(self._starts, start + 1) - 1]
            behind = self._stop[around]
            self._drop(around)
            if around < start:
                self._add(around, start)
            if stop < behind:
                self._add(stop, behind)

    def _insert(self, start: int, stop: int) -> None:
        """Add a free run and join it with the runs it touches."""
        at = bisect_left(self._starts, start)
        if at and self._stop[self._starts[at - 1]] == start:
            start = self._starts[at - 1]
            self._drop(start)
        if stop in self._stop:
            behind = self._stop[stop]
            self._drop(stop)
            stop = behind
        self._add(start, stop)

    def _add(self, start: int, stop: int) -> None:
        self._stop[start] = stop
        insort(self._starts, start)
        insort(self._by_length, (stop - start, start))

    def _drop(self, start: int) -> None:
        length = self._stop.pop(start) - start
        del self._starts[bisect_left(self._starts, start)]
        del self._by_length[bisect_left(self._by_length, (length, start))]


def _runs(ascending: Slots) -> list[tuple[int, int]]:
    """(first, behind the last) of every maximal run of consecutive slots."""
    if not len(ascending):
        return []
    breaks = np.flatnonzero(np.diff(ascending) != 1) + 1
    firsts, lasts = ascending[np.r_[0, breaks]], ascending[np.r_[breaks - 1, -1]]
    return list(zip(firsts.tolist(), (lasts + 1).tolist()))
