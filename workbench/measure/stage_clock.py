"""Clocks of a decode step: its own time, and the time of each of its segments.

On CPU both use the host's clock. On CUDA the step's own clock is a pair of events on the stream. A stage that
is launched kernel by kernel is a pair of events too; one inside a graph writes the device's timer from there
(the next replay would overwrite events of a graph before the host, one step behind, has read them).
Nothing here waits: what a step left behind is read after its results have arrived.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Reading(Protocol):
    """What a clock left behind for one step; readable once the step's results are there."""

    def read(self) -> tuple[float, list[float]]:
        """(step_us, microseconds per segment)."""
        ...


class StageClock(Protocol):
    """Marks the segments of a step."""

    def start(self) -> None:
        """The step begins."""
        ...

    def mark(self, segment: int, is_end: bool) -> None:
        """A segment begins or ends here."""
        ...

    def stop(self) -> Reading:
        """The step has been launched."""
        ...


@dataclass(frozen=True)
class _Known:
    step_us: float
    segments_us: list[float]

    def read(self) -> tuple[float, list[float]]:
        return self.step_us, self.segments_us


class NoClock:
    """Times nothing: to measure what timing costs."""

    def start(self) -> None:
        return None

    def mark(self, segment: int, is_end: bool) -> None:
        return None

    def stop(self) -> Reading:
        return _Known(0.0, [])


class HostClock:
    """The host's clock for a CPU step; a tape runs its marks as nodes."""

    def __init__(self, segments: int) -> None:
        self.stamps_ns: list[int] = [0] * (2 * segments)
        self._start_ns = 0

    def start(self) -> None:
        self.stamps_ns[:] = [0] * len(self.stamps_ns)
        self._start_ns = time.perf_counter_ns()

    def mark(self, segment: int, is_end: bool) -> None:
        self.stamps_ns[2 * segment + is_end] = time.perf_counter_ns()

    def stop(self) -> Reading:
        step_us = (time.perf_counter_ns() - self._start_ns) / 1e3
        pairs = zip(self.stamps_ns[::2], self.stamps_ns[1::2])
        return _Known(step_us, [max(0, end - begin) / 1e3 for begin, end in pairs])


class CudaClock:
    """Events for what is launched one by one, the device's timer for what runs inside a graph."""

    RING = 4  # steps whose events are kept apart; the host is at most one step behind

    def __init__(self, segments: int, stamp: Callable[[Any, int], None]) -> None:
        import torch

        self._torch, self._stamp, self._segments = torch, stamp, segments
        self.stamps_ns = torch.zeros(2 * segments, dtype=torch.int64, device="cuda")
        self._copies = [torch.zeros(2 * segments, dtype=torch.int64).pin_memory() for _ in range(self.RING)]
        self._views = [memoryview(copy.numpy()) for copy in self._copies]
        self._events = [self._make_events(2 * segments + 2) for _ in range(self.RING)]
        self._used: list[set[int]] = [set() for _ in range(self.RING)]
        self._slot = 0
        for index in range(2 * segments):  # compile the stamp now: a capture may not load modules
            stamp(self.stamps_ns, index)

    def _make_events(self, n: int) -> list[Any]:
        return [self._torch.cuda.Event(enable_timing=True) for _ in range(n)]

    def start(self) -> None:
        self._slot = (self._slot + 1) % self.RING
        self._used[self._slot].clear()
        self._events[self._slot][-2].record()

    def mark(self, segment: int, is_end: bool) -> None:
        index = 2 * segment + is_end
        if self._torch.cuda.is_current_stream_capturing():
            self._stamp(self.stamps_ns, index)
        else:
            self._events[self._slot][index].record()
            self._used[self._slot].add(index)

    def stop(self) -> Reading:
        self._copies[self._slot].copy_(self.stamps_ns, non_blocking=True)
        self._events[self._slot][-1].record()
        return _CudaReading(self._events[self._slot], set(self._used[self._slot]), self._views[self._slot])


@dataclass(frozen=True)
class _CudaReading:
    events: list[Any]
    used: set[int]
    stamps_ns: memoryview

    def read(self) -> tuple[float, list[float]]:
        self.events[-1].synchronize()  # recorded behind the step's results: already there when those are
        stamps = self.stamps_ns.tolist()
        segments_us = []
        for begin in range(0, len(stamps), 2):
            if begin in self.used:
                segments_us.append(self.events[begin].elapsed_time(self.events[begin + 1]) * 1e3)
            else:
                segments_us.append(max(0, stamps[begin + 1] - stamps[begin]) / 1e3)
        return self.events[-2].elapsed_time(self.events[-1]) * 1e3, segments_us
