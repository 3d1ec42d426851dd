"""Clocks of a decode step: its own time, and the time of each of its segments.

On CPU both use the host's clock. On CUDA a segment that is launched kernel by kernel lies between two events;
one inside a graph writes the device's timer from there (the next replay would overwrite events of a graph
before the host, one step behind, has read them). These stamps travel with the step's results: a step that is
one graph costs the host no call into the device for its clock.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

StepTimes = tuple[float, list[float]]  # (step_us, microseconds per segment)


class Reading(Protocol):
    """What a clock left behind for one step; readable once the step's results are there."""

    def read(self, stamps_ns: Sequence[int]) -> StepTimes:
        """Times of the step. `stamps_ns` are the device's, from the step's results."""
        ...


class StageClock(Protocol):
    """Marks the segments of a step."""

    num_stamps: int  # sent along with the results of a step
    device_stamps: Any  # the tensor they are in; None without any

    def start(self, in_graph: bool = False) -> None:
        """The step begins; `in_graph` when all of it, marks included, is in one graph."""
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

    def read(self, stamps_ns: Sequence[int]) -> StepTimes:
        return self.step_us, self.segments_us


class NoClock:
    """Times nothing: to measure what timing costs."""

    num_stamps, device_stamps = 0, None

    def start(self, in_graph: bool = False) -> None:
        return None

    def mark(self, segment: int, is_end: bool) -> None:
        return None

    def stop(self) -> Reading:
        return _Known(0.0, [])


class HostClock:
    """The host's clock for a CPU step; a tape runs its marks as nodes."""

    num_stamps, device_stamps = 0, None

    def __init__(self, segments: int) -> None:
        self.stamps_ns: list[int] = [0] * (2 * segments)
        self._start_ns = 0

    def start(self, in_graph: bool = False) -> None:
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

        self._torch, self._stamp, self.num_stamps = torch, stamp, 2 * segments
        self.device_stamps = torch.zeros(self.num_stamps, dtype=torch.int64, device="cuda")
        self._rings = [self._make_events(self.num_stamps + 2) for _ in range(self.RING)]
        self._slot, self._in_graph = 0, False
        self._used: set[int] = set()  # marks of this step that are events
        for index in range(self.num_stamps):  # compile the stamp now: a capture may not load modules
            stamp(self.device_stamps, index)
        self.device_stamps.zero_()  # segments that never run have no time

    def _make_events(self, n: int) -> list[Any]:
        return [self._torch.cuda.Event(enable_timing=True) for _ in range(n)]

    def start(self, in_graph: bool = False) -> None:
        self._slot, self._in_graph, self._used = (self._slot + 1) % self.RING, in_graph, set()
        if not in_graph:
            self._rings[self._slot][-2].record()

    def mark(self, segment: int, is_end: bool) -> None:
        index = 2 * segment + is_end
        if self._torch.cuda.is_current_stream_capturing():
            self._stamp(self.device_stamps, index)
        else:
            self._rings[self._slot][index].record()
            self._used.add(index)

    def stop(self) -> Reading:
        events = self._rings[self._slot]
        if not self._in_graph:
            events[-1].record()
        return _CudaReading(events, self._used, self._in_graph)


@dataclass(frozen=True)
class _CudaReading:
    events: list[Any]
    used: set[int]
    in_graph: bool

    def read(self, stamps_ns: Sequence[int]) -> StepTimes:
        segments_us = []
        for begin in range(0, len(stamps_ns), 2):
            if begin in self.used:
                segments_us.append(self.events[begin].elapsed_time(self.events[begin + 1]) * 1e3)
            else:
                segments_us.append(max(0, stamps_ns[begin + 1] - stamps_ns[begin]) / 1e3)
        return self._step_us(stamps_ns), segments_us

    def _step_us(self, stamps_ns: Sequence[int]) -> float:
        """From launch to the end; of one graph, from its first mark to its last."""
        if not self.in_graph:
            return self.events[-2].elapsed_time(self.events[-1]) * 1e3
        if self.used:  # said to be one graph, and launched one by one
            return self.events[0].elapsed_time(self.events[len(stamps_ns) - 1]) * 1e3
        return (stamps_ns[-1] - stamps_ns[0]) / 1e3
