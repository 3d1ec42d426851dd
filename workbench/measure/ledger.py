"""Where a decode step's time goes: stages timed apart from the step's own clock, the rest shown as such.

The host's own time is split into parts by laps of one watch per step. Waiting for the device is a lap of its
own and no host time; so is work that is done once per request and not once per step.
"""

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from workbench.measure.stage_clock import StepTimes

STAGES = ("draft", "tree", "mask", "verify", "accept", "commit", "other")
HOST_PARTS = ("schedule", "launch", "tree", "collect", "read")  # of a step's host time, in order
PROFILE_VARIABLE = "WORKBENCH_PROFILE"  # print a summary every so many steps


class HostWatch:
    """Where the host's time of one step goes, lap by lap: HOST_PARTS, "wait", "one_off"."""

    __slots__ = ("_since", "laps_us")

    def __init__(self) -> None:
        self.laps_us: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        """What has passed since the last lap belongs to `part`."""
        now = time.perf_counter()
        self.laps_us[part] = self.laps_us.get(part, 0.0) + (now - self._since) * 1e6
        self._since = now

    def resume(self) -> None:
        """What has passed since the last lap belongs to other steps."""
        self._since = time.perf_counter()


@dataclass(frozen=True)
class StepRecord:
    """One step: its own clock, its stages, and what the host spent on it."""

    step: int
    bs: int
    replayed: bool
    step_us: float
    stages_us: dict[str, float]
    laps_us: dict[str, float] = field(default_factory=dict)  # of the host: HOST_PARTS, "wait", "one_off"
    tokens: int = 0
    read_s: float = 0.0  # host clock when the results were taken over; differences are step periods
    is_checked: bool = False  # recomputed beside, which is in its times: in no summary and no period

    @property
    def host_us(self) -> float:
        """Scheduling, launching and bookkeeping; neither waiting nor what is done once per request."""
        return sum(self.laps_us.get(part, 0.0) for part in HOST_PARTS)

    @property
    def unattributed_us(self) -> float:
        """Step time that no stage claims; negative when stages overlap."""
        return self.step_us - sum(self.stages_us.values())


@dataclass
class Ledger:
    """The records of a decode. `segments` names the stage of each segment, in the order of the step."""

    segments: Sequence[str]
    records: list[StepRecord] = field(default_factory=list)
    one_offs_us: dict[str, float] = field(default_factory=dict)  # host work per request or call, by name
    sink: Callable[[str], None] = print
    every: int = field(default_factory=lambda: profile_interval())

    def add(
        self,
        times: StepTimes,
        *,
        step: int,
        bs: int,
        replayed: bool,
        tokens: int,
        watch: HostWatch,
        is_checked: bool = False,
    ) -> StepRecord:
        """Keep what one step's clock read, end its watch; prints a summary every `every` steps."""
        step_us, segments_us = times
        stages_us = dict.fromkeys(STAGES, 0.0)
        for stage, us in zip(self.segments, segments_us):
            stages_us[stage] += us
        watch.lap("read")
        record = StepRecord(
            step, bs, replayed, step_us, stages_us, watch.laps_us, tokens, time.perf_counter(), is_checked
        )  # fmt: skip
        self.records.append(record)
        if self.every and len(self.records) % self.every == 0 and (found := self.summary(last=self.every)):
            self.sink(format_summary(found, self.every))
        return record

    def add_one_off(self, name: str, us: float) -> None:
        """Keep host work that belongs to no step: reading prompts, admission with its prefill, freeing."""
        self.one_offs_us[name] = self.one_offs_us.get(name, 0.0) + us

    def summary(self, last: int | None = None, skip: int = 0) -> dict[str, float]:
        """Means over the last (default all) records without the first `skip`: step_us, <stage>_us, shares.

        Host times are medians (with the 90th percentile and the maximum) and unattributed_share is the median
        step's, so that one interrupted step does not speak for all; one_off_us is the sum over the decode.
        """
        records = self.records[skip:] if last is None else self.records[-last:]
        records = [record for record in records if not record.is_checked]
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
            **_host_summary(records),
            "one_off_us": sum(self.one_offs_us.values()),
            "replayed_share": float(np.mean([r.replayed for r in records])),
            "tokens_per_step": float(np.mean([r.tokens for r in records])),
        }

    def periods_us(self, skip: int = 2) -> list[float]:
        """Time from one step's results to the next one's without the first `skip`: gaps and host included.

        Results are read one step behind, so nothing was launched between the last two reads: no period.
        """
        records = self.records[skip:]
        # a step's launch, with its check, lies between the reads of the two steps before it
        disturbed = [a.is_checked or b.is_checked for a, b in itertools.pairwise(records)]
        reads = [record.read_s for record in records[:-1]]
        periods = [(after - before) * 1e6 for before, after in itertools.pairwise(reads)]
        return [us for us, *checked in zip(periods, disturbed, disturbed[1:]) if not any(checked)]

    def counts(self) -> Counter[bool]:
        """Steps by whether they were said to be replayed."""
        return Counter(r.replayed for r in self.records)


def _host_summary(records: Sequence[StepRecord]) -> dict[str, float]:
    host_us = [r.host_us for r in records]
    parts = {part: [r.laps_us.get(part, 0.0) for r in records] for part in (*HOST_PARTS, "wait")}
    medians = {part: float(np.median(laps)) for part, laps in parts.items()}
    return {
        "host_us": float(np.median(host_us)),
        "host_p90_us": float(np.quantile(host_us, 0.9)),
        "host_max_us": max(host_us),
        "wait_us": medians.pop("wait"),
        **{f"host_{part}_us": us for part, us in medians.items()},
    }


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
        f"host {summary['host_us']:.0f} us a step (p90 {summary['host_p90_us']:.0f}), "
        f"replayed {summary['replayed_share']:.0%}"
    )
