"""One call of generate: admission, prefill, steps launched ahead, results read behind, books kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from workbench.decode.acceptance import AcceptanceStats
from workbench.decode.launcher import LaunchedStep, Launcher
from workbench.decode.log import DecodeLog
from workbench.decode.result import DecodeResult, ReplaySummary
from workbench.decode.scheduler import Request, Scheduler
from workbench.decode.step import SEGMENT_STAGES
from workbench.measure.ledger import HostWatch, Ledger
from workbench.tree.sampling import draw_tokens

if TYPE_CHECKING:
    from workbench.decode.loop import SpeculativeDecoder

OnTokens = Callable[[int, list[int]], None]  # (prompt index, new tokens)


class BatchRun:
    """One call of generate."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        scheduler: Scheduler,
        temperature: float,
        log: DecodeLog,
        on_tokens: OnTokens | None = None,
        max_steps: int | None = None,
    ) -> None:
        self.d, self.scheduler, self.temperature = decoder, scheduler, temperature
        self.log, self.on_tokens = log, on_tokens
        self.requests = list(scheduler.waiting)
        self.launcher = Launcher(decoder)
        self.ledger = Ledger(SEGMENT_STAGES)
        self.acceptance = AcceptanceStats(decoder.max_accept - 1)
        self.in_flight: list[LaunchedStep] = []
        self.max_steps = max_steps
        self.prefill_s = 0.0
        self.discarded = 0

    def finish(self) -> DecodeResult:
        """Run until every request is done."""
        start = time.perf_counter()
        try:
            while self.scheduler.waiting or self.scheduler.running or self.in_flight:
                self._advance()
                if self.max_steps is not None and len(self.launcher.claims) >= self.max_steps:
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
        if launched and self.d.options.lag == 0:
            self._read(launched)

    def _cut_off(self) -> None:
        """End every request where it stands, after reading what is in flight."""
        for step in self.in_flight[:]:
            self._read(step)
        start = time.perf_counter()
        for request in self.scheduler.running[:]:
            self.scheduler.finish(request)
        self.ledger.add_one_off("finish", (time.perf_counter() - start) * 1e6)
        self.scheduler.waiting.clear()

    def _admit(self) -> None:
        admitted = tokens = 0
        start = time.perf_counter()
        while (request := self.scheduler.admissible()) is not None:
            tokens += len(request.context())
            admitted += 1
            self._prefill(request)
        if admitted:
            seconds = time.perf_counter() - start
            self.prefill_s += seconds
            self.ledger.add_one_off("admit", seconds * 1e6)
            s = self.scheduler
            self.log.add_prefill(admitted, tokens, s.held_tokens, len(s.running), len(s.waiting))

    def _prefill(self, request: Request) -> None:
        """Write the context of a new or retracted request; a new one gets its first token here."""
        d, context = self.d, request.context()
        slots = self.scheduler.admit(request).to(d.device)
        with torch.no_grad():
            if d.options.random_kv:
                for pool in (d.pool, d.draft_pool):
                    fill_with_noise(pool, slots, d.noise.generator)
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
        noise = torch.rand(1, generator=self.d.noise.generator, device=self.d.device)
        return int(draw_tokens(logits[:1], noise, temperature=self.temperature, top_k=s.top_k, top_p=s.top_p))

    def _launch(self) -> LaunchedStep | None:
        watch = HostWatch()
        requests = self.scheduler.due()
        if not requests:
            return None
        slots = self.scheduler.reserve(len(requests))
        if slots is None:
            self._make_room()
            return None
        try:
            step = self.launcher.launch(requests, slots, watch)
        except BaseException:
            self.scheduler.free([slot for row in slots for slot in row])
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

    def _read(self, step: LaunchedStep) -> None:
        """Take over the results of one step: tokens, slots, statistics, log."""
        step.watch.resume()
        result, stamps_ns = step.pending.wait()
        step.watch.lap("wait")
        accept_lengths = []
        for row, request in enumerate(step.requests):
            slots, step.slots[row] = step.slots[row], []  # what is left belongs to the step if this fails
            request.in_flight -= 1
            if request.is_done:
                self.scheduler.free(slots)
                self.discarded += 1
                continue
            accept_lengths.append(self._take(request, step, row, slots, result))
        self.in_flight.remove(step)
        self._record(step, accept_lengths, stamps_ns)

    def _take(self, request: Request, step: LaunchedStep, row: int, slots: list[int], result: Any) -> int:
        length = result.accept_length[row]
        self.scheduler.commit(request, slots, result.node_index[row][:length])
        self.acceptance.add(length, result.depth[row])
        tokens = self.d.hooks.accept_tokens(request.index, result.tokens[row][:length])
        counted = self._emit(request, tokens)
        request.accept_lengths.append(counted)
        if request.is_done:
            self._finish(request, step)
        return counted

    def _finish(self, request: Request, step: LaunchedStep) -> None:
        """Free a request that is done with `step`: once in its life, so not the step's own time."""
        step.watch.lap("read")
        before_us = step.watch.laps_us.get("one_off", 0.0)
        self.scheduler.finish(request)
        step.watch.lap("one_off")
        self.ledger.add_one_off("finish", step.watch.laps_us["one_off"] - before_us)

    def _emit(self, request: Request, tokens: list[int]) -> int:
        counted = request.take(tokens)
        if self.on_tokens:
            self.on_tokens(request.index, tokens[:counted])
        return counted

    def _record(self, step: LaunchedStep, accept_lengths: list[int], stamps_ns: list[int]) -> None:
        claim, s = step.claim, self.scheduler
        if accept_lengths:
            self.log.add_step(accept_lengths, s.held_tokens, len(s.waiting), claim.replayed)
        self.ledger.add(
            step.reading.read(stamps_ns),
            step=step.index,
            bs=len(step.requests),
            replayed=bool(claim.replayed),
            tokens=sum(accept_lengths),
            watch=step.watch,
            is_checked=step.index in self.d.shadow_steps,
        )

    def live_slots(self) -> set[int]:
        """Every slot that a request or a step in flight holds, or that is between those and the allocator:
        what the allocator has handed out."""
        held = {slot for r in self.scheduler.running for slot in r.slots}
        between = {*self.scheduler.freed, *self.scheduler.reserved}
        return held | between | {slot for step in self.in_flight for row in step.slots for slot in row}

    def _abandon(self) -> None:
        """After an error: give every slot back, so that the decoder stays usable."""
        for step in self.in_flight:
            self.scheduler.free([slot for row in step.slots for slot in row])
        for request in self.scheduler.running[:]:
            self.scheduler.finish(request)
        self.in_flight.clear()
        self.scheduler.flush(with_reserved=True)

    def _result(self, seconds: float) -> DecodeResult:
        runner = self.d.runner
        self.scheduler.flush(with_reserved=True)
        return DecodeResult(
            tokens=[r.tokens for r in self.requests],
            accept_lengths=[r.accept_lengths for r in self.requests],
            ledger=self.ledger,
            replay=ReplaySummary(
                self.d.options.mode,
                runner.backend.name if runner.backend else None,
                self.launcher.claims,
                runner.capture_report(),
                str(runner.capture_error) if runner.capture_error else None,
            ),
            log_lines=self.log.lines,
            acceptance=self.acceptance,
            seconds=seconds,
            prefill_s=self.prefill_s,
            retractions=self.scheduler.retracted,
            discarded=self.discarded,
            shadow=self.launcher.shadow,
        )


def fill_with_noise(pool: Any, slots: torch.Tensor, generator: torch.Generator) -> None:
    """Normal(0, 0.5) rows at `slots` in every layer; layer by layer, so that no second pool is needed."""
    if pool is None:
        return
    for layer in range(pool.layers):
        rows = torch.randn(len(slots), pool.width, generator=generator, device=slots.device)
        pool.layer(layer)[slots] = (rows * 0.5).to(pool.dtype)
