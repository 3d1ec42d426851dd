"""The decode step at given contexts: eager, split graphs and one graph, correct first, then timed and traced.

Steps are timed without a profiler, the three modes in alternating rounds; launches, gaps and busy share come
from a separate traced run, after everything that the process times: a tracer that stays attached slows graph
launches (see `record_trace`). At long contexts of an untrained model the pool holds noise instead of a
prefill and acceptance follows a stated law: a step launches and moves the same, its tokens mean nothing.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from workbench.decode.loop import SpeculativeDecoder
from workbench.decode.result import DecodeResult
from workbench.decode.step import SEGMENT_STAGES
from workbench.experiments.step_attention import time_attention
from workbench.experiments.step_case import NAME, StepCase, make_allocator, release_memory
from workbench.experiments.step_parts import typical_parts
from workbench.experiments.step_trace import SKIPPED_STEPS, summarise_trace
from workbench.measure import gpu_state, trace
from workbench.measure.ledger import Ledger
from workbench.measure.profilers import record_trace
from workbench.measure.statistics import is_stable, quantile
from workbench.rows import GpuState, Origin, Row, RowStatus, Timing, first_line
from workbench.shapes import DTYPE_BYTES
from workbench.targets import HardwareTarget
from workbench.tree.synthetic import geometric

MODES = ("eager", "split_graph", "step_graph")
WATCHED_STEPS = 40  # of a utilisation window
TRACED_STEPS = {"cpu": 2, "cuda": 8}
FAILURES = (RuntimeError, ValueError, MemoryError)  # of a mode; out of memory on a GPU is the first


@dataclass
class StepBench:
    """Decoders of one case and what was seen of them."""

    case: StepCase
    target: HardwareTarget
    prompts: Sequence[Sequence[int]]
    steps: int  # per round
    rounds: int
    modes: Sequence[str] = MODES
    variant: str = "auto"
    seed: int = 0
    models: Any = None  # (target, drafter), held during a phase only
    decoders: dict[str, SpeculativeDecoder] = field(default_factory=dict)
    periods_us: dict[str, list[float]] = field(default_factory=dict)
    results: dict[str, list[DecodeResult]] = field(default_factory=dict)  # one per round
    shadows: dict[str, list[Any]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the timed decoder
    traced: dict[str, dict[str, Any]] = field(default_factory=dict)
    gpu: dict[str, GpuState | None] = field(default_factory=dict)
    failed: list[Row] = field(default_factory=list)
    attention: list[Row] = field(default_factory=list)

    def run(self, models: tuple[Any, Any], step: Callable[[str], None]) -> list[Row]:
        """Both phases of a case that is alone in its process."""
        self.time(models, step)
        return self.trace(models, step)

    def time(self, models: tuple[Any, Any], step: Callable[[str], None]) -> None:
        """Check every mode, time them in turn; a failing mode becomes a row with its reason."""
        self.models = models
        for mode in self.modes:
            step(f"{self.case.case_id(mode)}: build, capture, check")
            try:
                self._check(mode)
            except FAILURES as error:
                self._give_up(mode, error)
        step(f"ctx {self.case.context}: {self.rounds} rounds of {self.steps} steps, modes alternating")
        for index in range(self.rounds):
            order = list(self.decoders)[:: 1 if index % 2 == 0 else -1]
            for mode in order:
                try:
                    self._time(mode)
                except FAILURES as error:
                    self._give_up(mode, error)
        self.attention = self._attention_rows()
        for mode in self.decoders:
            self.facts[mode] = self._facts(mode)
            self.gpu[mode] = self._watch_gpu(mode)
        self.decoders.clear()
        self.models = None
        release_memory()

    def trace(self, models: tuple[Any, Any], step: Callable[[str], None]) -> list[Row]:
        """Trace every timed mode in a decoder of its own; one row per mode, then attention's.

        A mode that cannot be traced keeps its times; `trace_reason` says why it has no launches.
        """
        self.models = models
        rows = list(self.failed)
        for mode in self.facts:
            step(f"ctx {self.case.context} {mode}: trace")
            try:
                self.decoders[mode] = self._make(mode)
                self.traced[mode] = self._trace(mode)
            except FAILURES as error:
                self.traced[mode] = {"trace_reason": first_line(error)}
            rows.append(self._row(mode))
            self.decoders.clear()
            release_memory()
        self.models = None
        return rows + self.attention

    def _make(self, mode: Any) -> SpeculativeDecoder:
        case, limit = self.case, self._limit(max(self.steps, WATCHED_STEPS))
        law = None
        if case.accept_length is not None and case.shape != "none":
            law = geometric(case.accept_length, min(self.models[1].config.block_size - 1, case.budget))
        slots = case.context + limit + 128
        decoder = SpeculativeDecoder(
            *self.models, mode=mode, shape=case.shape, budget=case.budget, variant=self.variant,
            max_batch=case.bs, batch_sizes=[case.bs], max_context=slots, law=law, random_kv=case.random_kv,
            allocator=make_allocator(case.bs * slots, case.layout, self.seed), seed=self.seed,
        )  # fmt: skip
        if mode != "eager":
            decoder.use_sampling(0.0)
            decoder.capture()
            require_graphs(decoder)
        return decoder

    def _limit(self, steps: int) -> int:
        """Tokens that surely take `steps` steps and a few more."""
        drafts = 0 if self.case.shape == "none" else self.models[1].config.block_size - 1
        return (steps + SKIPPED_STEPS + 2) * (min(drafts, self.case.budget) + 1)

    def _check(self, mode: str) -> None:
        """Capture, then recompute one step eagerly and compare."""
        decoder = self._make(mode)
        decoder.shadow_steps = frozenset({2})
        result = decoder.generate(self.prompts, self._limit(0))
        decoder.shadow_steps = frozenset()
        self.decoders[mode], self.shadows[mode] = decoder, result.shadow

    def _time(self, mode: str) -> None:
        self.decoders[mode].seed = self.seed
        result = self._decode(mode, self.steps)
        self.results.setdefault(mode, []).append(result)
        periods = result.ledger.periods_us(SKIPPED_STEPS)
        self.periods_us.setdefault(mode, []).extend(periods)

    def _decode(self, mode: str, steps: int) -> DecodeResult:
        """Decode until `steps` steps behind the first few have been seen."""
        decoder = self.decoders[mode]
        return decoder.generate(self.prompts, self._limit(steps), max_steps=steps + SKIPPED_STEPS)

    def _trace(self, mode: str) -> dict[str, Any]:
        steps = TRACED_STEPS[self.target.backend]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            record_trace(path, lambda: self._decode(mode, steps))
            require_graphs(self.decoders[mode])
            return summarise_trace(trace.load(path)) or {"trace_reason": "no steady step in the trace"}

    def _watch_gpu(self, mode: str) -> GpuState | None:
        """Clocks and utilisation over further steps, not the timed ones; filling the pool is in it."""
        if self.target.backend == "cpu":
            return None

        def work() -> None:
            self._decode(mode, WATCHED_STEPS)
            torch.cuda.synchronize()

        with gpu_state.GpuSampler() as sampler:
            utilisation, reason = gpu_state.read_utilisation(work)
        if reason:
            self.facts[mode]["utilisation_reason"] = reason
        return sampler.state(utilisation)

    def _attention_rows(self) -> list[Row]:
        """Verify attention alone, once per case: no mode's own measurement. The step's sum is a product."""
        mode = next(iter(self.decoders), None)
        if mode is None:
            return []
        status, reason = self._verdict(mode)
        timing, metrics = None, {"layers": self.models[0].config.num_layers}
        if status is RowStatus.PASSED:
            decoder = self.decoders[mode]
            timing = time_attention(decoder, self.case.bs, self.case.context, self.target)
            metrics["verify_attention_us"] = timing.median_us * metrics["layers"]
        return [
            Row(
                case_id=self.case.case_id("verify_attention"), experiment=NAME, variant="verify_attention",
                target=self.target.name, origin=Origin.MEASURED, status=status, reason=reason,
                axes=self.case.axes | {"part": "verify_attention"}, timing=timing,
                metrics=metrics | {"attention_variant": self._attention_variant(mode)}, repro=self._repro(),
            )
        ]  # fmt: skip

    def _repro(self) -> str:
        case = self.case
        return (
            f"workbench bench step --target {self.target.name} --preset {case.model} "
            f"--contexts {case.context} --budget {case.budget} --bs {case.bs}"
        )

    def _row(self, mode: str) -> Row:
        samples = self.periods_us[mode]
        status, reason = self._verdict(mode)
        timing = None
        if status is RowStatus.PASSED:
            clock = "host" if self.target.backend == "cpu" else "eager" if mode == "eager" else "graph"
            timing = Timing(
                mode=clock,  # type: ignore[arg-type]
                l2="n/a", n=len(samples), median_us=quantile(samples, 0.5), p10_us=quantile(samples, 0.1),
                p90_us=quantile(samples, 0.9), samples=tuple(round(s, 2) for s in samples),
                stable=is_stable(samples),
            )  # fmt: skip
        return Row(
            case_id=self.case.case_id(mode), experiment=NAME, variant=mode, target=self.target.name,
            origin=Origin.MEASURED, status=status, reason=reason, axes=self.case.axes | {"mode": mode},
            errors=self._errors(mode), timing=timing, gpu=self.gpu[mode],
            metrics=self._metrics(mode, timing), repro=self._repro(),
        )  # fmt: skip

    def _verdict(self, mode: str) -> tuple[RowStatus, str]:
        wrong = [report for report in self.shadows[mode] if not report.is_ok]
        if wrong:
            return RowStatus.INCORRECT, wrong[0].sentence()
        return (RowStatus.PASSED, "") if self.shadows[mode] else (RowStatus.SKIPPED, "no step was checked")

    def _errors(self, mode: str) -> dict[str, float]:
        return {
            name: max((getattr(report, f"{name}_error") for report in self.shadows[mode]), default=0.0)
            for name in ("logits", "kv")
        }

    def _metrics(self, mode: str, timing: Timing | None) -> dict[str, Any]:
        """Of every round's steps; a row without a time has none here either, only counts."""
        if timing is None:
            told = ("_per_step", "trace_reason")
            return self.facts[mode] | {
                name: n for name, n in self.traced[mode].items() if name.endswith(told)
            }
        ledger = pool_ledgers(self.results[mode])
        parts = typical_parts(ledger, self.periods_us[mode])
        return {**self.facts[mode], **ledger.summary(), **parts, **self.traced[mode]}

    def _facts(self, mode: str) -> dict[str, Any]:
        """What is known of a timed mode besides its times."""
        report, config = self.results[mode][-1], self.models[0].config
        captures = self.decoders[mode].runner.capture_report()
        return {
            "backend": report.replay.backend,
            "replay_share": report.replay.share,
            "accept_length": report.mean_accept_length,
            "capture_s": sum(entry["capture_s"] for entry in captures),
            "warmup_s": sum(entry["warmup_s"] for entry in captures),
            "reserved_bytes": sum(entry["reserved_bytes"] for entry in captures),
            "attention_variant": self._attention_variant(mode),
            "ties_settled_otherwise": any(shadow.chose_otherwise for shadow in self.shadows[mode]),
            "weight_bytes": config.weight_bytes,
            "kv_bytes": self.case.bs * self.case.context * config.kv_bytes_per_token,
            "element_bytes": DTYPE_BYTES[config.dtype],
        }

    def _attention_variant(self, mode: str) -> str:
        decoder = self.decoders[mode]
        return decoder.step.attends[self.case.bs, decoder.width][0].plan.variant

    def _give_up(self, mode: str, error: Exception) -> None:
        """A mode without times: its row has the reason, the other modes go on."""
        for of_mode in (self.decoders, self.results, self.periods_us):
            of_mode.pop(mode, None)
        self.failed.append(self._failed(mode, error))

    def _failed(self, mode: str, error: Exception) -> Row:
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        return Row(
            case_id=self.case.case_id(mode), experiment=NAME, variant=mode, target=self.target.name,
            origin=Origin.MEASURED, status=RowStatus.OUT_OF_MEMORY if is_memory else RowStatus.RUNTIME_ERROR,
            reason=first_line(error), axes=self.case.axes | {"mode": mode},
        )  # fmt: skip


def require_graphs(decoder: SpeculativeDecoder) -> None:
    """Raise the error of a failed capture: the decoder would go on eagerly under the mode's name."""
    if decoder.runner.capture_error is not None:
        raise decoder.runner.capture_error


def pool_ledgers(results: Sequence[DecodeResult]) -> Ledger:
    """The steady steps of all rounds in one ledger; one-off work is that of the last round."""
    records = [record for result in results for record in result.ledger.records[SKIPPED_STEPS:]]
    return Ledger(SEGMENT_STAGES, records, results[-1].ledger.one_offs_us, every=0)
