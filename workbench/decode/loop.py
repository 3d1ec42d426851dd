"""SpeculativeDecoder: a continuous batch over one step function, the host reading one step behind."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from workbench.decode.batch_run import BatchRun, OnTokens
from workbench.decode.buffers import RequestTable
from workbench.decode.decision import Bucket
from workbench.decode.graph_runner import GraphRunner, Progress
from workbench.decode.hooks import DecodeHooks
from workbench.decode.log import DecodeLog
from workbench.decode.noise import NoiseSource
from workbench.decode.options import DecodeOptions
from workbench.decode.replay import make_backend
from workbench.decode.result import DecodeResult
from workbench.decode.scheduler import Request, Scheduler
from workbench.decode.step import SEGMENT_STAGES, DecodeStep, StepSettings
from workbench.kv.allocator import TokenKVAllocator
from workbench.measure.stage_clock import CudaClock, HostClock, NoClock, StageClock


class SpeculativeDecoder:
    """Decodes prompts with a target and a drafter (none for shape="none"); options: `DecodeOptions`.

    Raises ValueError for anything it cannot run, with the fix.
    """

    def __init__(self, target: Any, drafter: Any = None, **options: Any) -> None:
        o = self.options = DecodeOptions.make(options)
        if o.shape != "none" and drafter is None:
            raise ValueError(f"shape={o.shape!r} needs a drafter: pass one, or use shape='none'")
        self.target, self.drafter = target, drafter if o.shape != "none" else None
        self.device = torch.device(target.device)
        self.seed, self.shadow_steps = o.seed, frozenset(o.shadow_steps)
        self.hooks = o.hooks or DecodeHooks()
        self.width, self.max_accept = o.widths(self.drafter)
        self.max_context = o.max_context or min(target.config.max_position, 2048)
        self.allocator = o.allocator or TokenKVAllocator(o.pool_tokens or o.max_batch * self.max_context)
        self.batch_sizes = o.pick_batch_sizes(self.width, self.allocator.size)
        self.pool = target.make_pool(self.allocator.size)
        self.draft_pool = self.drafter.make_pool(self.allocator.size, o.max_batch) if self.drafter else None
        self.table = RequestTable(o.max_batch + 1, self.max_context, self.device)
        self.noise = NoiseSource(self.device)
        self.clock = make_clock(self.device) if o.ledger else NoClock()
        self._is_running = False
        self._capture: tuple[float, float, float] | None = (
            None  # GB before, GB after, seconds: not logged yet
        )
        self.step = self.hooks.make_step(self._make_step())
        self.runner = self.hooks.make_runner(self._make_runner())

    def _make_step(self) -> DecodeStep:
        o = self.options
        settings = StepSettings(
            o.shape, o.budget, min_log_prob=o.min_log_prob, cut_to_remaining=o.cut_to_remaining, law=o.law
        )
        return DecodeStep(
            self.target, self.drafter, self.pool, self.draft_pool, self.table, settings,
            noise=self.noise, clock=self.clock, hooks=self.hooks,
        )  # fmt: skip

    def _make_runner(self) -> GraphRunner:
        o = self.options
        backend = make_backend(self.device) if o.mode != "eager" else None
        return GraphRunner(
            self.step, o.mode, backend, self.max_accept, self.max_context, self.device, padding=o.padding,
            strict=o.strict, variant=o.variant, nsplit=o.nsplit, draft_variant=o.draft_variant,
            hooks=self.hooks,
        )  # fmt: skip

    def capture(self, progress: Progress | None = None) -> None:
        """Capture every bucket; `generate` does it on first use. A failure becomes the steps' reason."""
        self._require_idle()
        start, before_gb = time.perf_counter(), free_gb(self.device)
        buckets = [Bucket(bs, self.width) for bs in self.batch_sizes]
        self.runner.capture(buckets, progress or self.options.capture_progress)
        self._capture = (before_gb, free_gb(self.device), time.perf_counter() - start)

    def use_sampling(self, temperature: float, top_k: int | None = None, top_p: float | None = None) -> None:
        """Fix how tokens are chosen; before capture this decides what the graphs sample."""
        if temperature < 0:
            raise ValueError(f"temperature={temperature} must be 0 (greedy) or positive")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p} must be in (0, 1]")
        sampled = temperature > 0
        chosen = (sampled, top_k or None, top_p) if sampled else (False, None, None)
        self.step.settings = replace(self.step.settings, sampled=chosen[0], top_k=chosen[1], top_p=chosen[2])

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
        self._require_idle()
        self.use_sampling(temperature, top_k, top_p)
        start = time.perf_counter()
        requests = self._make_requests(prompts, max_new_tokens)
        requests_us = (time.perf_counter() - start) * 1e6
        o = self.options
        log = DecodeLog(o.log_interval, self.device.type, self.allocator.size, self.width - 1, o.log_sink)
        if o.mode != "eager" and not self.runner.captured and self.runner.capture_error is None:
            self.capture()
        self._log_capture(log)
        self.noise.seed(self.seed)
        self.table.turn.zero_()  # the steps of a decode count from 0
        scheduler = Scheduler(self.allocator, o.max_batch, self.width)
        scheduler.waiting.extend(requests)
        run = BatchRun(self, scheduler, temperature, log, on_tokens, max_steps)
        run.ledger.add_one_off("requests", requests_us)
        self._is_running = True
        try:
            return run.finish()
        finally:
            self._is_running = False

    def _require_idle(self) -> None:
        if self._is_running:
            raise RuntimeError(
                "a decode is running on this decoder and would lose its buffers: wait for it, or make another"
            )

    def _log_capture(self, log: DecodeLog) -> None:
        """The lines of a capture, in the log of the first decode after it."""
        if self._capture is None or self.runner.backend is None:
            return
        (before_gb, after_gb, seconds), self._capture = self._capture, None
        log.begin_capture(self.width, self.batch_sizes, self.runner.backend.name, before_gb)
        if self.runner.capture_error is not None:
            log.write(f"Capture failed: {self.runner.capture_error}")
        else:
            log.end_capture(seconds, self.runner.backend.reserved_bytes() / 1e9, after_gb)

    def _make_requests(self, prompts: Sequence[Sequence[int]], limits: int | Sequence[int]) -> list[Request]:
        if not prompts:
            raise ValueError("no prompts: pass at least one list of token ids")
        each = [limits] * len(prompts) if isinstance(limits, int) else list(limits)
        if len(each) != len(prompts):
            raise ValueError(
                f"{len(each)} limits for {len(prompts)} prompts: pass one number or one per prompt"
            )
        requests = [
            Request(i, list(map(int, prompt)), limit, frozenset(self.options.stop_tokens))
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
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
