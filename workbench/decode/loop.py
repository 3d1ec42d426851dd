"""SpeculativeDecoder: a continuous batch over one step function, the host reading one step behind."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from workbench.decode.acceptance import AcceptanceStats
from workbench.decode.buffers import RequestTable, StepBuffers
from workbench.decode.decision import Bucket, ReplayDecision, StepBatch, StepClaim
from workbench.decode.graph_runner import GraphRunner, Mode
from workbench.decode.hooks import DecodeHooks
from workbench.decode.host_tree import build_on_host
from workbench.decode.log import DecodeLog
from workbench.decode.replay import make_backend
from workbench.decode.result import DecodeResult, ReplaySummary
from workbench.decode.scheduler import Request, Scheduler
from workbench.decode.step import (
    SEGMENT_STAGES,
    SHAPES,
    DecodeStep,
    Shape,
    StepSettings,
    mark_trace,
)
from workbench.decode.transfer import Pending, Transfer
from workbench.measure.ledger import CudaClock, HostClock, Ledger, NoClock, Reading, StageClock
from workbench.tree.sampling import draw_tokens
from workbench.tree.synthetic import AcceptanceLaw

OnTokens = Callable[[int, list[int]], None]  # (prompt index, new tokens)


@dataclass
class _Step:
    """A launched step whose results have not been read."""

    index: int
    requests: list[Request]
    slots: np.ndarray  # [n, width]
    pending: Pending
    reading: Reading
    claim: StepClaim
    launch_us: float


class SpeculativeDecoder:
    """Decodes prompts with a target and a drafter (None with shape="none").

    mode: eager, split_graph (draft graph, host tree, verify graph) or step_graph (everything in one graph).
    shape: none (plain autoregressive), chain, chain_tree (a chain through the tree machinery) or tree.
    random_kv: fill a prompt's rows with noise instead of a prefill (timing at long contexts).
    law: synthetic acceptance; the tokens are then not the model's and may not be scored.
    Raises ValueError for anything it cannot run, with the fix.
    """

    def __init__(
        self,
        target: Any,
        drafter: Any = None,
        *,
        mode: Mode = "step_graph",
        shape: Shape = "tree",
        budget: int = 16,
        variant: str = "auto",
        nsplit: int | str = "auto",
        draft_variant: str = "auto",
        max_batch: int = 8,
        max_context: int | None = None,
        pool_tokens: int | None = None,
        batch_sizes: Sequence[int] | None = None,
        padding: bool = True,
        strict: bool = False,
        pad_trees: bool = True,
        min_log_prob: float | None = None,
        cut_to_remaining: bool = False,
        stop_tokens: Sequence[int] = (),
        allocator: Any = None,
        law: AcceptanceLaw | None = None,
        hooks: DecodeHooks | None = None,
        log_interval: int = 40,
        log_sink: Callable[[str], None] | None = None,
        ledger: bool = True,
        random_kv: bool = False,
        lag: int = 1,
        seed: int = 0,
        shadow_steps: Sequence[int] = (),
        capture_progress: Callable[[Bucket, int, int], None] | None = None,
    ) -> None:
        if shape not in SHAPES:
            raise ValueError(f"shape={shape!r}: choose one of {', '.join(SHAPES)}")
        if shape != "none" and drafter is None:
            raise ValueError(f"shape={shape!r} needs a drafter: pass one, or use shape='none'")
        if shape != "none" and budget < 1:
            raise ValueError(f"budget={budget} must be at least 1: a tree has a root and `budget` nodes")
        if lag not in (0, 1):
            raise ValueError(f"lag={lag}: the host reads 0 or 1 steps behind")
        if max_batch < 1:
            raise ValueError(f"max_batch={max_batch} must be at least 1")
        if not pad_trees and mode == "step_graph":
            raise ValueError("pad_trees=False needs mode='split_graph' or 'eager': one graph has one width")
        self.target, self.drafter = target, drafter if shape != "none" else None
        self.device = torch.device(target.device)
        self.mode, self.shape, self.lag, self.seed, self.strict = mode, shape, lag, seed, strict
        self.pad_trees, self.stop_tokens = pad_trees, frozenset(stop_tokens)
        self.hooks = hooks or DecodeHooks()
        self.width, self.max_accept = pick_widths(shape, budget, self.drafter)
        self.max_batch = max_batch
        self.max_context = max_context or min(getattr(target.config, "max_position", 2048), 2048)
        self.allocator = allocator or _make_allocator(pool_tokens or max_batch * self.max_context)
        self.batch_sizes = self._check_batch_sizes(batch_sizes)
        self.random_kv = random_kv
        self.log_interval, self.log_sink = log_interval, log_sink
        self.capture_progress = capture_progress
        self.shadow_steps = frozenset(shadow_steps)

        self.pool = target.make_pool(self.allocator.size)
        self.draft_pool = self.drafter.make_pool(self.allocator.size, max_batch) if self.drafter else None
        self.table = RequestTable(max_batch + 1, self.max_context, self.device)
        self.transfer = Transfer(self.device)
        self.generator = torch.Generator(self.device)
        self.clock = make_clock(self.device) if ledger else NoClock()
        settings = StepSettings(
            shape, budget, min_log_prob=min_log_prob, cut_to_remaining=cut_to_remaining, law=law
        )
        step = DecodeStep(
            target, self.drafter, self.pool, self.draft_pool, self.table, settings,
            generator=self.generator, clock=self.clock, hooks=self.hooks,
        )  # fmt: skip
        self.step = self.hooks.make_step(step)
        runner = GraphRunner(
            self.step, mode, make_backend(self.device) if mode != "eager" else None, self.max_accept,
            self.max_context, self.device, padding=padding, strict=strict, variant=variant, nsplit=nsplit,
            draft_variant=draft_variant, hooks=self.hooks,
        )  # fmt: skip
        self.runner = self.hooks.make_runner(runner)

    def _check_batch_sizes(self, sizes: Sequence[int] | None) -> list[int]:
        chosen = sorted(set(sizes)) if sizes is not None else default_batch_sizes(self.max_batch)
        if not chosen or chosen[0] < 1:
            raise ValueError(f"batch_sizes={sizes}: give sizes of at least 1")
        if chosen[-1] * self.width > self.allocator.size:
            raise ValueError(
                f"bucket {chosen[-1]} x {self.width} needs {chosen[-1] * self.width} slots, the pool has "
                f"{self.allocator.size}: raise pool_tokens or lower batch_sizes"
            )
        if chosen[-1] > self.max_batch:
            raise ValueError(f"batch size {chosen[-1]} is above max_batch={self.max_batch}: raise max_batch")
        return chosen

    def capture(self) -> None:
        """Capture every bucket; `generate` does it on first use. A failure becomes the steps' reason."""
        self.runner.capture([Bucket(bs, self.width) for bs in self.batch_sizes], self.capture_progress)

    def use_sampling(self, temperature: float, top_k: int | None = None, top_p: float | None = None) -> None:
        """Fix how tokens are chosen; before capture this decides what the graphs sample."""
        if temperature < 0:
            raise ValueError(f"temperature={temperature} must be 0 (greedy) or positive")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p} must be in (0, 1]")
        sampled = temperature > 0
        chosen = (sampled, top_k or None, top_p) if sampled else (False, None, None)
        self.step.settings = replace(self.step.settings, sampled=chosen[0], top_k=chosen[1], top_p=chosen[2])
        if not self.runner.captured:
            self.runner.sampling = chosen

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int] = 64,
        temperature: float = 0.0,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        on_tokens: OnTokens | None = None,
        max_steps: int | None = None,
    ) -> DecodeResult:
        """Decode token-id prompts to the end, or for `max_steps` steps; prompts that do not fit wait.

        Raises ValueError for an empty prompt, one that cannot fit the pool or the context, or a bad limit.
        """
        self.use_sampling(temperature, top_k, top_p)
        requests = self._make_requests(prompts, max_new_tokens)
        log = DecodeLog(
            self.log_interval, self.device.type, self.allocator.size, self.width - 1, self.log_sink
        )
        if self.mode != "eager" and not self.runner.captured and self.runner.capture_error is None:
            self._capture_logged(log)
        self.generator.manual_seed(self.seed)
        return _Run(self, requests, temperature, log, on_tokens, max_steps).finish()

    def _capture_logged(self, log: DecodeLog) -> None:
        backend = self.runner.backend
        assert backend is not None
        free = free_gb(self.device)
        log.begin_capture(self.width, self.batch_sizes, backend.name, free)
        start = time.perf_counter()
        self.capture()
        if self.runner.capture_error is not None:
            log.write(f"Capture failed: {self.runner.capture_error}")
            return
        log.end_capture(time.perf_counter() - start, backend.reserved_bytes() / 1e9, free_gb(self.device))

    def _make_requests(self, prompts: Sequence[Sequence[int]], limits: int | Sequence[int]) -> list[Request]:
        if not prompts:
            raise ValueError("no prompts: pass at least one list of token ids")
        each = [limits] * len(prompts) if isinstance(limits, int) else list(limits)
        if len(each) != len(prompts):
            raise ValueError(
                f"{len(each)} limits for {len(prompts)} prompts: pass one number or one per prompt"
            )
        requests = [
            Request(i, list(map(int, prompt)), limit, self.stop_tokens)
            for i, (prompt, limit) in enumerate(zip(prompts, each))
        ]
        for request in requests:
            self._check_request(request)
        return requests

    def _check_request(self, request: Request) -> None:
        n, limit = len(request.prompt), request.max_new_tokens
        name = f"prompt {request.index}"
        if n == 0:
            raise ValueError(f"{name} is empty: give at least one token")
        if limit < 1:
            raise ValueError(f"{name}: max_new_tokens={limit} must be at least 1")
        vocab = self.target.config.vocab_size
        bad = next((t for t in request.prompt if not 0 <= t < vocab), None)
        if bad is not None:
            raise ValueError(f"{name}: token {bad} is outside the vocabulary 0..{vocab - 1}")
        slots = n + limit + 2 * self.width
        if slots > self.allocator.size:
            raise ValueError(
                f"{name}: {n} tokens and {limit} new ones need {slots} slots, the pool has "
                f"{self.allocator.size}: raise pool_tokens or shorten it"
            )
        rows = n + limit + 3 * self.max_accept
        if rows > self.max_context:
            raise ValueError(
                f"{name}: {n} tokens and {limit} new ones need a context of {rows}, it is "
                f"{self.max_context}: raise max_context or shorten it"
            )


class _Run:
    """One call of generate."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        requests: list[Request],
        temperature: float,
        log: DecodeLog,
        on_tokens: OnTokens | None,
        max_steps: int | None,
    ) -> None:
        self.d, self.requests, self.temperature, self.log, self.on_tokens = (
            decoder, requests, temperature, log, on_tokens,
        )  # fmt: skip
        self.scheduler = Scheduler(decoder.allocator, decoder.max_batch, decoder.width)
        self.scheduler.waiting.extend(requests)
        self.ledger = Ledger(SEGMENT_STAGES)
        self.acceptance = AcceptanceStats(decoder.max_accept - 1)
        self.claims: list[StepClaim] = []
        self.in_flight: list[_Step] = []
        self.max_steps = max_steps
        self.prefill_s = 0.0
        self.discarded = 0
        self.index = 0
        self.shadow: list[Any] = []

    def finish(self) -> DecodeResult:
        """Run until every request is done."""
        start = time.perf_counter()
        try:
            while self.scheduler.waiting or self.scheduler.running or self.in_flight:
                self._advance()
                if self.max_steps is not None and self.index >= self.max_steps:
                    self._cut_off()
        except BaseException:
            self._abandon()
            raise
        return self._result(time.perf_counter() - start)

    def _advance(self) -> None:
        """Launch the next step, then read the one before it."""
        self._admit()
        behind = self.in_flight[:]
        launched = self._launch()
        for step in behind:
            if step in self.in_flight:
                self._read(step)
        if launched and self.d.lag == 0:
            self._read(launched)

    def _cut_off(self) -> None:
        """End every request where it stands, after reading what is in flight."""
        for step in self.in_flight[:]:
            self._read(step)
        for request in self.scheduler.running[:]:
            self.scheduler.finish(request)
        self.scheduler.waiting.clear()

    def _admit(self) -> None:
        admitted = tokens = 0
        start = time.perf_counter()
        while (request := self.scheduler.admissible()) is not None:
            tokens += len(request.context())
            admitted += 1
            self._prefill(request)
        if admitted:
            self.prefill_s += time.perf_counter() - start
            s = self.scheduler
            self.log.add_prefill(admitted, tokens, s.held_tokens, len(s.running), len(s.waiting))

    def _prefill(self, request: Request) -> None:
        """Write the context of a new or retracted request; a new one gets its first token here."""
        d, context = self.d, request.context()
        slots = self.scheduler.admit(request).to(d.device)
        with torch.no_grad():
            if d.random_kv:
                for pool in (d.pool, d.draft_pool):
                    fill_with_noise(pool, slots, d.generator)
                first = context[-1]
            else:
                first = self._run_prefill(context, slots)
            if not request.tokens:
                self._emit(request, [first])
        if request.is_done:
            self.scheduler.finish(request)
            return
        d.table.set_row(request.row, slots, request.tokens[-1], request.remaining, self.temperature)

    def _run_prefill(self, context: list[int], slots: torch.Tensor) -> int:
        """The models' own prefill; returns the token behind the context."""
        d = self.d
        output = d.target.prefill(torch.tensor(context, device=d.device), d.pool, slots)
        if d.drafter is not None:
            positions = torch.arange(len(context), device=d.device)
            d.drafter.write_context(output.taps, positions, slots, d.draft_pool)
        return self._first_token(output.logits)

    def _first_token(self, logits: torch.Tensor) -> int:
        s = self.d.step.settings
        if not s.sampled:
            return int(logits[0].argmax())
        noise = torch.rand(1, generator=self.d.generator, device=self.d.device)
        return int(draw_tokens(logits[:1], noise, temperature=self.temperature, top_k=s.top_k, top_p=s.top_p))

    def _launch(self) -> _Step | None:
        start = time.perf_counter()
        requests = self.scheduler.due()
        if not requests:
            return None
        slots = self.scheduler.reserve(len(requests))
        if slots is None:
            self._make_room()
            return None
        try:
            step = self._run_step(requests, slots, start)
        except BaseException:
            self.scheduler.free(slots.reshape(-1))
            raise
        self.in_flight.append(step)
        return step

    def _make_room(self) -> None:
        """The pool is exhausted: read what is in flight, which frees slots; else retract the youngest."""
        if self.in_flight:
            for step in self.in_flight[:]:
                self._read(step)
        elif len(self.scheduler.running) > 1:
            self.scheduler.retract_youngest()
        else:
            raise RuntimeError("one request does not fit the pool although it was checked: slots have leaked")

    def _run_step(self, requests: list[Request], slots: np.ndarray, start: float) -> _Step:
        d, index = self.d, self.index
        self.index += 1
        batch = self._facts(requests)
        d.clock.start()
        with mark_trace(f"decode_step#{index}"):
            if d.mode == "split_graph":
                b, claim = self._run_split(batch, requests, slots, index)
            else:
                b, claim = self._run_whole(batch, requests, slots, index)
            with d.step.segment("result", b):
                pending = d.transfer.download(b, index)
        reading = d.clock.stop()
        d.hooks.after_step(index, b)
        for request in requests:
            request.in_flight += 1
        claim = d.hooks.claim(claim)
        self.claims.append(claim)
        d.runner.counts[claim.reason] += 1
        launch_us = (time.perf_counter() - start) * 1e6
        return _Step(index, requests, slots, pending, reading, claim, launch_us)

    def _facts(self, requests: list[Request]) -> StepBatch:
        d = self.d
        longest = max(len(r.slots) + r.in_flight * d.max_accept for r in requests)
        s = d.step.settings
        return StepBatch(
            bs=len(requests),
            width=d.width,
            mode="decode" if d.shape == "none" else "verify",
            hidden_mode="taps" if d.drafter is not None else "none",
            sampling=(s.sampled, s.top_k, s.top_p),
            max_kv_len=longest + d.max_accept,
        )

    def _place(
        self,
        decision: ReplayDecision,
        batch: StepBatch,
        requests: list[Request],
        slots: np.ndarray,
        index: int,
    ) -> StepBuffers:
        """Buffers of the bucket, with this step's inputs on their way."""
        d = self.d
        b = d.runner.make_buffers(decision.bucket or Bucket(batch.bs, batch.width))
        with d.step.segment("upload", b):
            d.transfer.upload(b, index, [r.row for r in requests], slots)
        d.hooks.before_step(index, b)
        return b

    def _run_whole(
        self, batch: StepBatch, requests: list[Request], slots: np.ndarray, index: int
    ) -> tuple[StepBuffers, StepClaim]:
        d = self.d
        decision = d.runner.choose(batch)
        b = self._place(decision, batch, requests, slots, index)
        replayed = self._run_part("step", b, decision, index)
        return b, StepClaim(index, replayed, decision.reason, decision.detail, batch.bs, batch.width)

    def _run_part(self, part: str, b: StepBuffers, decision: ReplayDecision, index: int) -> bool:
        d = self.d
        if index not in d.shadow_steps or part == "draft":
            return d.runner.run(part, b, decision)
        from workbench.decode.shadow import run_with_shadow

        replayed, report = run_with_shadow(d, part, b, decision, index)
        self.shadow.append(report)
        return replayed

    def _run_split(
        self, batch: StepBatch, requests: list[Request], slots: np.ndarray, index: int
    ) -> tuple[StepBuffers, StepClaim]:
        """Draft graph, tree on the host, verify graph; each decides on its own."""
        d = self.d
        draft = d.runner.choose(replace(batch, mode="draft") if "draft" in d.runner.allowed_modes else batch)
        b = self._place(draft, batch, requests, slots, index)
        draft_replayed = d.runner.run("draft", b, draft)
        with d.step.segment("tree", b):
            if d.shape in ("none", "chain"):
                d.step.build_tree(b)
            else:
                with torch.no_grad():
                    build_on_host(b, d.step.settings)
        width = d.width if d.pad_trees else int(b.tree.num_nodes[: batch.bs].max())
        verify = d.runner.choose(replace(batch, width=width))
        b = self._narrow(b, verify.bucket or Bucket(batch.bs, width))
        replayed = self._run_part("verify", b, verify, index)
        claim = StepClaim(index, replayed, verify.reason, verify.detail, batch.bs, width, draft_replayed)
        return b, claim

    def _narrow(self, b: StepBuffers, bucket: Bucket) -> StepBuffers:
        """The buffers of another bucket with this one's inputs; the same ones where it is the same bucket."""
        if (b.bs, b.width) == (bucket.bs, bucket.width):
            return b
        other = self.d.runner.make_buffers(bucket)
        other.adopt(b)
        return other

    def _read(self, step: _Step) -> None:
        """Take over the results of one step: tokens, slots, statistics, log."""
        start = time.perf_counter()
        result = step.pending.wait()
        waited = time.perf_counter()
        self.in_flight.remove(step)
        accept_lengths = []
        for row, request in enumerate(step.requests):
            request.in_flight -= 1
            if request.is_done:
                self.scheduler.free(step.slots[row])
                self.discarded += 1
                continue
            accept_lengths.append(self._take(request, step, row, result))
        self._record(step, accept_lengths, (waited - start) * 1e6, (time.perf_counter() - waited) * 1e6)

    def _take(self, request: Request, step: _Step, row: int, result: Any) -> int:
        length = int(result.accept_length[row])
        self.scheduler.commit(request, step.slots[row], result.node_index[row, :length])
        self.acceptance.add(length, int(result.depth[row]))
        tokens = self.d.hooks.accept_tokens(request.index, result.tokens[row, :length].tolist())
        counted = self._emit(request, tokens)
        request.accept_lengths.append(counted)
        if request.is_done:
            self.scheduler.finish(request)
        return counted

    def _emit(self, request: Request, tokens: list[int]) -> int:
        counted = request.take(tokens)
        if self.on_tokens:
            self.on_tokens(request.index, tokens[:counted])
        return counted

    def _record(self, step: _Step, accept_lengths: list[int], wait_us: float, host_us: float) -> None:
        claim, s = step.claim, self.scheduler
        if accept_lengths:
            self.log.add_step(accept_lengths, s.held_tokens, len(s.waiting), claim.replayed)
        self.ledger.add(
            step.reading,
            step=step.index,
            bs=len(step.requests),
            replayed=bool(claim.replayed),
            host_us=step.launch_us + host_us,
            wait_us=wait_us,
            tokens=sum(accept_lengths),
        )

    def live_slots(self) -> set[int]:
        """Every slot that a request or a step in flight holds; equals what the allocator has handed out."""
        held = {slot for r in self.scheduler.running for slot in r.slots}
        return held | {int(slot) for step in self.in_flight for slot in step.slots.flat}

    def _abandon(self) -> None:
        """After an error: give every slot back, so that the decoder stays usable."""
        for step in self.in_flight:
            self.scheduler.free(step.slots.reshape(-1))
        for request in self.scheduler.running[:]:
            self.scheduler.finish(request)
        self.in_flight.clear()

    def _result(self, seconds: float) -> DecodeResult:
        runner = self.d.runner
        return DecodeResult(
            tokens=[r.tokens for r in self.requests],
            accept_lengths=[r.accept_lengths for r in self.requests],
            ledger=self.ledger,
            replay=ReplaySummary(
                self.d.mode,
                runner.backend.name if runner.backend else None,
                self.claims,
                runner.capture_report(),
                str(runner.capture_error) if runner.capture_error else None,
            ),
            log_lines=self.log.lines,
            acceptance=self.acceptance,
            seconds=seconds,
            prefill_s=self.prefill_s,
            retractions=self.scheduler.retracted,
            discarded=self.discarded,
            shadow=self.shadow,
        )


def pick_widths(shape: Shape, budget: int, drafter: Any) -> tuple[int, int]:
    """(rows per request, most tokens a step may emit)."""
    if shape == "none":
        return 1, 1
    drafts = min(drafter.config.block_size - 1, budget)
    return (budget if shape == "tree" else drafts) + 1, drafts + 1


def default_batch_sizes(max_batch: int) -> list[int]:
    """Powers of two up to `max_batch`, and itself."""
    return sorted({2**i for i in range(max_batch.bit_length()) if 2**i <= max_batch} | {max_batch})


def fill_with_noise(pool: Any, slots: torch.Tensor, generator: torch.Generator) -> None:
    """Normal(0, 0.5) rows at `slots` in every layer; layer by layer, so that no second pool is needed."""
    if pool is None:
        return
    for layer in range(pool.layers):
        rows = torch.randn(len(slots), pool.width, generator=generator, device=slots.device)
        pool.layer(layer)[slots] = (rows * 0.5).to(pool.dtype)


def make_clock(device: torch.device) -> StageClock:
    """The stage clock of a device."""
    if device.type == "cpu":
        return HostClock(len(SEGMENT_STAGES))
    from workbench.decode.device_timer import stamp_device_time

    return CudaClock(len(SEGMENT_STAGES), stamp_device_time)


def free_gb(device: torch.device) -> float:
    """Free memory of the device in GB; of the machine on cpu."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0] / 1e9
    import os

    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9


def _make_allocator(size: int) -> Any:
    from workbench.kv.allocator import TokenKVAllocator

    return TokenKVAllocator(size)
