"""How faults are injected: hooks that change one batch fact, one runner method or one stage of the step."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from workbench.decode.decision import Bucket, ReplayDecision, StepBatch, StepClaim
from workbench.decode.hooks import DecodeHooks


class BatchHooks(DecodeHooks):
    """Changes what the decision gets to see of each batch."""

    def __init__(self, change: Callable[[StepBatch, int], StepBatch]) -> None:
        self.change, self.seen = change, 0

    def see_batch(self, batch: StepBatch) -> StepBatch:
        self.seen += 1
        return self.change(batch, self.seen)


class RunnerHooks(DecodeHooks):
    """Changes the runner before anything is captured."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change

    def make_runner(self, runner: Any) -> Any:
        self.change(runner)
        return runner


class StepHooks(DecodeHooks):
    """Changes a stage of the step; what it does is captured with it."""

    def __init__(self, stage: str, after: Callable[[Any, Any], None]) -> None:
        self.stage, self.after = stage, after

    def make_step(self, step: Any) -> Any:
        original = getattr(step, self.stage)

        def changed(b: Any) -> None:
            original(b)
            self.after(step, b)

        setattr(step, self.stage, changed)
        return step


def rank_votes(probability: float = 0.4) -> DecodeHooks:
    votes = random.Random(3)
    return BatchHooks(lambda batch, n: replace(batch, rank_agrees=votes.random() > probability))


def compare_tokens() -> DecodeHooks:
    def change(runner: Any) -> None:
        runner.compared_size = lambda batch: batch.bs * batch.width

    return RunnerHooks(change)


def only_modes(*modes: str) -> Callable[[Any], None]:
    def change(runner: Any) -> None:
        runner.allowed_modes = frozenset(modes)

    return change


class PlainDecode(BatchHooks):
    """Speculation is off for this batch, and plain decode was never captured."""

    def __init__(self) -> None:
        super().__init__(lambda batch, n: replace(batch, mode="decode"))

    def make_runner(self, runner: Any) -> Any:
        only_modes("verify")(runner)
        return runner


class Alternating(PlainDecode):
    """Every other step is a plain decode."""

    def __init__(self) -> None:
        super().__init__()
        self.change = lambda batch, n: replace(batch, mode="decode" if n % 2 else "verify")


class RunsEagerly(DecodeHooks):
    """The runner runs one part operation by operation; `says` is what it returns for it."""

    def __init__(self, part: str, says: bool) -> None:
        self.part, self.says = part, says

    def make_runner(self, runner: Any) -> Any:
        original = runner.run

        def run(part: str, b: Any, decision: ReplayDecision) -> bool:
            if part != self.part:
                return bool(original(part, b, decision))
            original(part, b, replace(decision, replay=False))
            return self.says

        runner.run = run
        return runner


class DropsFlag(DecodeHooks):
    """The flag of a step is not handed on, so its default, False, is logged."""

    def claim(self, claim: StepClaim) -> StepClaim:
        return replace(claim, replayed=False)


class OtherKey(DecodeHooks):
    """Captured under one key, looked up under another."""

    def after_capture(self, runner: Any) -> None:
        for bucket in list(runner.captured):
            moved = Bucket(bucket.bs, bucket.width + 1)
            runner.captured[moved] = runner.captured.pop(bucket)


class MovesBuffer(DecodeHooks):
    """Rebinds a static input to a new tensor in the middle of the run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, index: int, buffers: Any) -> None:
        if index == self.step:
            buffers.positions = buffers.positions.clone()


class StaleChoice(DecodeHooks):
    """The layers that feed the drafter are chosen after capture: the graph keeps the old choice."""

    def __init__(self) -> None:
        self.is_chosen = False

    def make_step(self, step: Any) -> Any:
        original = step.write_context

        def write_context(b: Any) -> None:
            if not self.is_chosen:
                b.taps = b.taps.flip(-1)
            original(b)

        step.write_context = write_context
        return step

    def after_capture(self, runner: Any) -> None:
        self.is_chosen = True

    def make_runner(self, runner: Any) -> Any:
        self.is_chosen = runner.mode == "eager"  # without a capture the choice comes first
        return runner


class SlowHost(DecodeHooks):
    """Not a fault of replay: the host takes its time between steps."""

    def accept_tokens(self, row: int, tokens: list[int]) -> list[int]:
        time.sleep(0.01)
        return tokens


def freeze_positions(step: Any, b: Any) -> None:
    """As if the graph held a tensor that nobody refreshes."""
    b.positions.fill_(7)


def open_mask(step: Any, b: Any) -> None:
    b.mask.fill_(True)


def write_live_slot(step: Any, b: Any) -> None:
    step.pool.buffer[:, 3] += 1.0


def waste_time(step: Any, b: Any) -> None:
    """Operations of the step's own device that change nothing."""
    rows = b.logits.new_ones(512, 512)
    for _ in range(4):
        rows = rows @ rows


def read_on_host(step: Any, b: Any) -> None:
    b.accept.accept_length.sum().item()
