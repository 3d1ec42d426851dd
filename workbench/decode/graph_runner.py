"""Captures the step once per bucket and decides, with a reason, whether a step is replayed from a graph."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from workbench.decode.attend import plan_drafter, plan_target
from workbench.decode.buffers import StepBuffers
from workbench.decode.capture_watch import CaptureError
from workbench.decode.conditions import CONDITIONS, Condition
from workbench.decode.decision import Bucket, ForwardMode, Reason, ReplayDecision, ReplayRefused, StepBatch
from workbench.decode.hooks import DecodeHooks
from workbench.decode.replay import Graph, GraphBackend
from workbench.decode.step import DecodeStep, mark_trace
from workbench.decode.watched import Watched, watch_buffers, watch_weights

Mode = Literal["eager", "split_graph", "step_graph"]
Progress = Callable[[Bucket, int, int], None]  # (captured bucket, done, of how many)
MODES = ("eager", "split_graph", "step_graph")
ADDRESS_INTERVAL = (
    16  # steps between looks at addresses; another tensor is noticed at once, a resized one then
)
OUTPUTS = ("draft_logits", "logits", "taps")
PART_OUTPUTS = {"step": OUTPUTS, "draft": OUTPUTS[:1], "verify": OUTPUTS[1:]}


@dataclass
class Captured:
    """The graphs of one bucket: one for the whole step, or one per part."""

    graphs: dict[str, Graph]
    watched: list[Watched]
    weights: list[Watched]  # looked at with the addresses only: there are many, and they seldom move
    outputs: dict[str, list[tuple[str, Any]]]  # per graph: what it leaves in the bucket's buffers
    seconds: float  # of the capture alone
    warmup_s: float  # before it: buffers, plans, compiling, one eager step
    reserved_bytes: int  # grown by this bucket


@dataclass
class GraphRunner:
    """Buckets, capture, the decision, and the run of one step."""

    step: DecodeStep
    mode: Mode
    backend: GraphBackend | None
    max_accept: int
    max_context: int
    device: torch.device
    padding: bool = True
    strict: bool = False
    variant: str = "auto"
    nsplit: int | str = "auto"
    draft_variant: str = "auto"
    hooks: DecodeHooks = field(default_factory=DecodeHooks)
    conditions: Sequence[Condition] = CONDITIONS
    allowed_modes: frozenset[ForwardMode] = frozenset({"verify", "decode"})
    hidden_mode: str = "taps"
    captured: dict[Bucket, Captured] = field(default_factory=dict)
    ordered: list[Bucket] = field(default_factory=list)  # captured buckets, ascending
    widths: dict[int, list[int]] = field(default_factory=dict)  # width -> captured batch sizes, ascending
    buffers: dict[Bucket, StepBuffers] = field(default_factory=dict)
    counts: Counter[Reason] = field(default_factory=Counter)
    replays: Counter[Bucket] = field(default_factory=Counter)
    looks: int = 0  # at the buffers of a bucket
    capture_error: CaptureError | None = None
    sampling: tuple[bool, int | None, float | None] = (False, None, None)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r}: choose one of {', '.join(MODES)}")
        self.sampling = self._sampling()

    def _sampling(self) -> tuple[bool, int | None, float | None]:
        """How the step chooses tokens now; what a capture holds is `sampling`."""
        s = self.step.settings
        return s.sampled, s.top_k, s.top_p

    @property
    def parts(self) -> dict[str, Callable[[StepBuffers], None]]:
        """Every part that can be run on its own, by name."""
        step = self.step
        return {"step": step.run, "draft": step.receive_and_draft, "verify": step.verify_and_send}

    def make_buffers(self, bucket: Bucket) -> StepBuffers:
        """The bucket's buffers and attention plans; the same ones for life."""
        if bucket not in self.buffers:
            b = StepBuffers(
                bucket.bs, bucket.width, self.max_accept, self.max_context, self.device,
                num_stamps=self.step.clock.num_stamps,
            )  # fmt: skip
            self.step.prepare_buffers(b)
            self.buffers[bucket] = b
            self.step.attends[bucket.bs, bucket.width] = self._plan(bucket)
        return self.buffers[bucket]

    def _plan(self, bucket: Bucket) -> tuple[Any, Any]:
        step, context = self.step, self.max_context
        options: dict[str, Any] = {"nsplit": self.nsplit, "device": self.device}
        layout = "causal" if step.settings.shape == "chain" else "tree"
        target = plan_target(
            step.target.config, bucket.bs, bucket.width, context, step.target.dtype,
            variant=self.variant, mask_layout=layout, **options,
        )  # fmt: skip
        if not step.has_drafter:
            return target, None
        options["nsplit"] = "auto"
        config = step.drafter.config
        drafter = plan_drafter(
            config, bucket.bs, context, step.drafter.dtype, variant=self.draft_variant, **options
        )
        return target, drafter

    def capture(self, buckets: Iterable[Bucket], progress: Progress | None = None) -> None:
        """Capture largest first into one memory pool, on dummy rows; a failure becomes the reason."""
        if self.mode == "eager" or self.backend is None:
            raise ValueError(f"mode={self.mode!r} has no graphs to capture: use split_graph or step_graph")
        planned = sorted(buckets, reverse=True)
        self.captured.clear()
        self.capture_error, self.sampling = None, self._sampling()
        pool = self.backend.new_pool()
        try:
            for done, bucket in enumerate(planned):
                self.captured[bucket] = self._capture_bucket(bucket, pool)
                if progress:
                    progress(bucket, done + 1, len(planned))
        except CaptureError as error:
            self.capture_error = error
            self.captured.clear()
            if self.strict:
                raise
        self.ordered = sorted(self.captured)
        self.widths = {}
        for bucket in self.ordered:
            self.widths.setdefault(bucket.width, []).append(bucket.bs)
        self.hooks.after_capture(self)

    def _capture_bucket(self, bucket: Bucket, pool: Any) -> Captured:
        assert self.backend is not None
        begin, before = time.perf_counter(), self.backend.reserved_bytes()
        b = self.make_buffers(bucket)
        b.mail.up_host.zero_()
        self._warm_up(b)
        warm = time.perf_counter()
        captured = ("draft", "verify") if self.mode == "split_graph" else ("step",)
        graphs = {name: self.backend.capture(partial(self.parts[name], b), pool) for name in captured}
        done = time.perf_counter()
        return Captured(
            graphs=graphs,
            watched=watch_buffers(self.step, b, ignored=OUTPUTS),
            weights=watch_weights(self.step),
            outputs={part: [(name, getattr(b, name)) for name in PART_OUTPUTS[part]] for part in graphs},
            seconds=done - warm,
            warmup_s=warm - begin,
            reserved_bytes=self.backend.reserved_bytes() - before,
        )

    def _warm_up(self, b: StepBuffers) -> None:
        """Compile and allocate outside of the capture, on rows of padding only; no decode may be running."""
        with torch.no_grad():
            self.step.run(b)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def moved_buffers(self, bucket: Bucket) -> list[str]:
        """Names of static tensors and weights that no longer lie where the graph expects them."""
        if bucket not in self.captured:
            return []
        watched = self.captured[bucket].watched
        self.looks += 1
        if self.looks % ADDRESS_INTERVAL == 0:
            return [name for one in [*watched, *self.captured[bucket].weights] for name in one.moved()]
        return [name for one in watched for name in one.replaced()]

    def sizes(self, width: int) -> list[int]:
        """Captured batch sizes of this width, ascending."""
        return self.widths.get(width, [])

    def compared_size(self, batch: StepBatch) -> int:
        """The number that is compared with the captured batch sizes."""
        return batch.bs

    def pick_bucket(self, batch: StepBatch) -> Bucket:
        """The smallest captured bucket that holds the batch."""
        sizes = self.sizes(batch.width)
        return Bucket(sizes[bisect_left(sizes, self.compared_size(batch))], batch.width)

    def decide(self, batch: StepBatch) -> ReplayDecision:
        """Replay or not, and why: the first condition that fails is the reason."""
        for reason, check in self.conditions:
            detail = check(self, batch)
            if detail is not None:
                return ReplayDecision(False, reason, detail)
        bucket = self.pick_bucket(batch)
        return ReplayDecision(
            True, Reason.REPLAYED, f"bs {batch.bs} in bucket {bucket.bs} x {bucket.width}", bucket
        )

    def choose(self, batch: StepBatch) -> ReplayDecision:
        """`decide` through the hooks. In strict mode a refusal raises ReplayRefused."""
        decision = self.hooks.after_decision(self.decide(self.hooks.see_batch(batch)))
        if self.strict and not decision.replay and decision.reason is not Reason.GRAPH_DISABLED:
            raise ReplayRefused(
                f"strict: a step of {batch.bs} is not replayed: {decision.reason} ({decision.detail})"
            )
        return decision

    def run(self, part: str, b: StepBuffers, decision: ReplayDecision) -> bool:
        """Replay `part` of the step or run it eagerly; returns whether a graph was launched."""
        if not decision.replay:
            with torch.no_grad():
                self.parts[part](b)
            return False
        assert decision.bucket is not None
        captured = self.captured[decision.bucket]
        with mark_trace(f"replay:{part}"):
            captured.graphs[part].replay()
        if part != "draft":
            self.replays[decision.bucket] += 1
        for name, value in captured.outputs[part]:
            setattr(b, name, value)
        return True

    def capture_report(self) -> list[dict[str, Any]]:
        """One entry per bucket: size, seconds of warm-up and capture, reserved bytes, nodes."""
        return [
            {
                "bs": bucket.bs,
                "width": bucket.width,
                "capture_s": done.seconds,
                "warmup_s": done.warmup_s,
                "reserved_bytes": done.reserved_bytes,
                "nodes": sum(graph.nodes for graph in done.graphs.values()),
                "replays": self.replays[bucket],
            }
            for bucket, done in self.captured.items()
        ]
