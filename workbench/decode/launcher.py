"""Launches one step: facts, decision, buffers, then the whole graph, or two graphs around a host tree."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from workbench.decode.buffers import StepBuffers
from workbench.decode.decision import Bucket, ReplayDecision, StepBatch, StepClaim
from workbench.decode.host_tree import build_on_host
from workbench.decode.scheduler import Request
from workbench.decode.step import mark_trace
from workbench.decode.transfer import Pending
from workbench.measure.ledger import HostWatch
from workbench.measure.stage_clock import Reading

if TYPE_CHECKING:
    from workbench.decode.loop import SpeculativeDecoder


@dataclass
class LaunchedStep:
    """A step whose results have not been read."""

    index: int
    requests: list[Request]
    slots: list[list[int]]  # [n][width]
    pending: Pending
    reading: Reading
    claim: StepClaim
    watch: HostWatch


@dataclass
class Launcher:
    """Steps of one decode, in order; every one leaves a claim."""

    d: SpeculativeDecoder
    claims: list[StepClaim] = field(default_factory=list)
    watch: HostWatch = field(default_factory=HostWatch)  # of the step being launched
    shadow: list[Any] = field(default_factory=list)

    def launch(self, requests: list[Request], slots: list[list[int]], watch: HostWatch) -> LaunchedStep:
        """Launch one step of `requests` [n] with reserved slots [n][width]; only a host tree waits."""
        d, index = self.d, len(self.claims)
        self.watch = watch
        batch = self._facts(requests)
        with mark_trace(f"decode_step#{index}"):
            if d.options.mode == "split_graph":
                b, claim = self._run_split(batch, requests, slots, index)
            else:
                b, claim = self._run_whole(batch, requests, slots, index)
        reading = d.clock.stop()
        pending = b.mail.pending(b, index)
        d.hooks.after_step(index, b)
        for request in requests:
            request.in_flight += 1
        claim = d.hooks.claim(claim)
        self.claims.append(claim)
        d.runner.counts[claim.reason] += 1
        watch.lap("collect")
        return LaunchedStep(index, requests, slots, pending, reading, claim, watch)

    def _facts(self, requests: list[Request]) -> StepBatch:
        d = self.d
        longest = max(len(r.slots) + r.in_flight * d.max_accept for r in requests)
        s = d.step.settings
        return StepBatch(
            bs=len(requests),
            width=d.width,
            mode="decode" if d.options.shape == "none" else "verify",
            hidden_mode="taps" if d.drafter is not None else "none",
            sampling=(s.sampled, s.top_k, s.top_p),
            max_kv_len=longest + d.max_accept,
        )

    def _place(
        self,
        decision: ReplayDecision,
        batch: StepBatch,
        requests: list[Request],
        slots: list[list[int]],
        index: int,
    ) -> StepBuffers:
        """Buffers of the bucket, with this step's inputs in their mailbox."""
        d = self.d
        b = d.runner.make_buffers(decision.bucket or Bucket(batch.bs, batch.width))
        b.mail.write(index, [r.row for r in requests], slots, b.bs)
        d.hooks.before_step(index, b)
        self.watch.lap("schedule")
        return b

    def _run_whole(
        self, batch: StepBatch, requests: list[Request], slots: list[list[int]], index: int
    ) -> tuple[StepBuffers, StepClaim]:
        d = self.d
        decision = d.runner.choose(batch)
        d.clock.start(in_graph=decision.replay)
        b = self._place(decision, batch, requests, slots, index)
        replayed = self._run_part("step", b, decision, index, b)
        self.watch.lap("launch")
        return b, StepClaim(index, replayed, decision.reason, decision.detail, batch.bs, batch.width)

    def _run_part(
        self, part: str, b: StepBuffers, decision: ReplayDecision, index: int, written: StepBuffers
    ) -> bool:
        d = self.d
        if index not in d.shadow_steps or part == "draft":
            return d.runner.run(part, b, decision)
        from workbench.decode.shadow import run_with_shadow

        replayed, report = run_with_shadow(d, part, b, decision, index, written)
        self.shadow.append(report)
        return replayed

    def _run_split(
        self, batch: StepBatch, requests: list[Request], slots: list[list[int]], index: int
    ) -> tuple[StepBuffers, StepClaim]:
        """Draft graph, tree on the host, verify graph; each decides on its own."""
        d = self.d
        draft = d.runner.choose(replace(batch, mode="draft") if "draft" in d.runner.allowed_modes else batch)
        d.clock.start()
        b = self._place(draft, batch, requests, slots, index)
        draft_replayed = d.runner.run("draft", b, draft)
        self.watch.lap("launch")
        with d.step.segment("tree", b):
            if d.options.shape in ("none", "chain"):
                d.step.build_tree(b)
            else:
                with torch.no_grad():
                    build_on_host(b, d.step.settings, self.watch)
        self.watch.lap("tree")
        width = d.width if d.options.pad_trees else int(b.tree.num_nodes[: batch.bs].max())
        verify = d.runner.choose(replace(batch, width=width))
        written, b = b, self._narrow(b, verify.bucket or Bucket(batch.bs, width))
        self.watch.lap("schedule")
        replayed = self._run_part("verify", b, verify, index, written)
        self.watch.lap("launch")
        claim = StepClaim(index, replayed, verify.reason, verify.detail, batch.bs, width, draft_replayed)
        return b, claim

    def _narrow(self, b: StepBuffers, bucket: Bucket) -> StepBuffers:
        """The buffers of another bucket with this one's inputs; the same ones where it is the same bucket."""
        if (b.bs, b.width) == (bucket.bs, bucket.width):
            return b
        other = self.d.runner.make_buffers(bucket)
        other.adopt(b)
        return other
