"""Points at which a decode can be observed or disturbed; the base class does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.decode.buffers import StepBuffers
    from workbench.decode.decision import ReplayDecision, StepBatch, StepClaim
    from workbench.decode.graph_runner import GraphRunner
    from workbench.decode.step import DecodeStep


class DecodeHooks:
    """Subclass and override; every method's default leaves the decode as it is.

    A decoder's `runner` and `step` pass through `make_runner` and `make_step`, so a hook can also return
    subclasses with other conditions or other stages.
    """

    def make_step(self, step: DecodeStep) -> DecodeStep:
        """The step function that is captured and run."""
        return step

    def make_runner(self, runner: GraphRunner) -> GraphRunner:
        """The runner that decides and replays, before anything is captured."""
        return runner

    def after_capture(self, runner: GraphRunner) -> None:
        """Everything has been captured."""

    def see_batch(self, batch: StepBatch) -> StepBatch:
        """What the decision gets to see of a batch."""
        return batch

    def after_decision(self, decision: ReplayDecision) -> ReplayDecision:
        """The decision that is acted on."""
        return decision

    def before_step(self, index: int, buffers: StepBuffers) -> None:
        """The inputs of step `index` are in its mailbox, nothing of it has run."""

    def before_stage(self, stage: str, buffers: StepBuffers) -> None:
        """A stage starts; runs in eager steps and during capture, not on replay."""

    def after_step(self, index: int, buffers: StepBuffers) -> None:
        """Step `index` has been launched; on a device it may still be running."""

    def claim(self, claim: StepClaim) -> StepClaim:
        """What is reported of the step: to the log, the counters and the result."""
        return claim

    def accept_tokens(self, row: int, tokens: list[int]) -> list[int]:
        """Tokens emitted by one request in one step, before stop and length are applied."""
        return tokens
