"""Where a decode step's time goes: stages timed apart from the step's own clock, the rest shown as such.

On CPU both use the host's clock. On CUDA the step's own clock is a pair of events on the stream. A stage that
is launched kernel by kernel is a pair of events too; one inside a graph writes the device's timer from there
(the next replay would overwrite events of a graph before the host, one step behind, has read them).
Nothing here waits: what a step left behind is read after its results have arrived.
"""

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

STAGES = ("draft", "tree", "mask", "verify", "accept", "commit", "other")
PROFILE_VARIABLE = "WORKBENCH_PROFILE"  # print a summary every so many steps


@dataclass(frozen=True)
class StepRecord:
    """One step: its own clock, its stages, and what the host spent on it."""

    step: int
    bs: int
    replayed: bool
    step_us: float
    stages_us: dict[str, float]
    host_us: float = 0.0  # scheduling, launching and bookkeeping; waiting left out
    wait_us: float = 0.0
    tokens: int = 0
    read_s: float = 0.0  # host clock when the results were taken over; differences are step periods

    @property
    def unattributed_us(self) -> float:
        """Step time that no stage claims; negative when stages overlap."""
        return self.step_us - sum(self.stages_us.values())


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
        return _CudaReading(self._events[self._slot], set(self._used[self._slot]), self._copies[self._slot])


@dataclass(frozen=True)
class _CudaReading:
    events: list[Any]
    used: set[int]
    stamps_ns: Any

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


@dataclass
class Ledger:
    """The records of a decode. `segments` names the stage of each segment, in the order of the step."""

    segments: Sequence[str]
    records: list[StepRecord] = field(default_factory=list)
    sink: Callable[[str], None] = print
    every: int = field(default_factory=lambda: profile_interval())

    def add(
        self,
        reading: Reading,
        *,
        step: int,
        bs: int,
        replayed: bool,
        host_us: float,
        wait_us: float,
        tokens: int,
    ) -> StepRecord:
        """Read one step's clock and keep it; prints a summary every `every` steps."""
        step_us, segments_us = reading.read()
        stages_us = dict.fromkeys(STAGES, 0.0)
        for stage, us in zip(self.segments, segments_us):
            stages_us[stage] += us
        record = StepRecord(
            step, bs, replayed, step_us, stages_us, host_us, wait_us, tokens, time.perf_counter()
        )
        self.records.append(record)
        if self.every and len(self.records) % self.every == 0:
            self.sink(format_summary(self.summary(last=self.every), self.every))
        return record

    def summary(self, last: int | None = None, skip: int = 0) -> dict[str, float]:
        """Means over the last (default all) records without the first `skip`: step_us, <stage>_us, shares."""
        records = self.records[skip:] if last is None else self.records[-last:]
        if not records:
            return {}
        step_us = float(np.mean([r.step_us for r in records]))
        means = {stage: float(np.mean([r.stages_us[stage] for r in records])) for stage in STAGES}
        unattributed_us = step_us - sum(means.values())
        return {
            "steps": float(len(records)),
            "step_us": step_us,
            **{f"{stage}_us": us for stage, us in means.items()},
            "unattributed_us": unattributed_us,
            "unattributed_share": float(np.median([r.unattributed_us / (r.step_us or 1.0) for r in records])),
            "host_us": float(np.mean([r.host_us for r in records])),
            "wait_us": float(np.mean([r.wait_us for r in records])),
            "replayed_share": float(np.mean([r.replayed for r in records])),
            "tokens_per_step": float(np.mean([r.tokens for r in records])),
        }

    def periods_us(self, skip: int = 2) -> list[float]:
        """Time from one step's results to the next one's without the first `skip`: gaps and host included."""
        reads = [record.read_s for record in self.records[skip:]]
        return [(after - before) * 1e6 for before, after in itertools.pairwise(reads)]

    def counts(self) -> Counter[bool]:
        """Steps by whether they were said to be replayed."""
        return Counter(r.replayed for r in self.records)


def profile_interval() -> int:
    """Steps between printed summaries: WORKBENCH_PROFILE, or 0 for never. ValueError for a bad value."""
    text = os.environ.get(PROFILE_VARIABLE, "") or "0"
    if not text.isdigit():
        raise ValueError(f"{PROFILE_VARIABLE}={text!r}: give a number of steps, as in {PROFILE_VARIABLE}=50")
    return int(text)


def format_summary(summary: dict[str, float], steps: int) -> str:
    """One line: mean step, each stage with its share, the unattributed rest, host time."""
    step_us = summary["step_us"] or 1.0
    parts = [
        f"{stage} {summary[f'{stage}_us']:.0f} us ({summary[f'{stage}_us'] / step_us:.0%})"
        for stage in STAGES
        if summary[f"{stage}_us"] > 0
    ]
    return (
        f"ledger over {steps} steps: step {summary['step_us']:.0f} us = {', '.join(parts)}, "
        f"unattributed {summary['unattributed_us']:.0f} us ({summary['unattributed_share']:.1%}); "
        f"host {summary['host_us']:.0f} us, replayed {summary['replayed_share']:.0%}"
    )
