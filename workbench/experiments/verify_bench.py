"""One verify-attention case over many variants: correct first, then timed together, always a row each."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from workbench.experiments.verify_cases import VerifyCase, VerifyInputs, build_inputs, pools_fit
from workbench.experiments.verify_gate import NOT_REACHED, Candidate, check, plan_run, qualify, recheck
from workbench.experiments.verify_options import BenchOptions
from workbench.experiments.verify_oracle import expected_output
from workbench.experiments.verify_rows import to_row
from workbench.measure import gpu_state, profilers, timing
from workbench.rows import Row, RowStatus, first_line
from workbench.targets import HardwareTarget

if TYPE_CHECKING:
    from workbench.attention.variants import Variant
    from workbench.experiments.verify_gate import Expected

MAX_POOLS = timing.MAX_CALLS_PER_SAMPLE


@dataclass
class Bench:
    """Runs case after case; once the context is lost or time is up, the rest are SKIPPED rows that say so."""

    target: HardwareTarget
    options: BenchOptions
    deadline: float = inf  # time.monotonic() after which the rest is skipped
    lost: str = ""

    def __post_init__(self) -> None:
        if self.target.backend == "cpu" and "triton" not in sys.modules:
            os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

    def run(self, case: VerifyCase, candidates: Sequence[Candidate]) -> list[Row]:
        """A row per candidate, whatever happens."""
        if not self.lost and time.monotonic() > self.deadline:
            self.lost = "the command's time limit was reached: raise --max-s"
        if not self.lost:
            try:
                return run_case(case, candidates, self.target, self.options)
            except ContextLost as error:
                self.lost = f"the CUDA context was lost at {case.name}: {error}"
        for candidate in candidates:
            if candidate.status is RowStatus.PASSED or candidate.reason == NOT_REACHED:
                candidate.status, candidate.reason, candidate.prepared = RowStatus.SKIPPED, self.lost, None
        return [to_row(c, self.target, self.options) for c in candidates]

    def launch_once(self, case: VerifyCase, candidates: Sequence[Candidate]) -> None:
        """Launch each candidate exactly once inside its NVTX range; no check, no timing, no pools."""
        for candidate in candidates:
            if candidate.variant.supports(candidate.case.shape, self.target) is None:
                inputs = build_inputs(
                    candidate.case, pools=1, device=device_of(self.target), seed=self.options.seed
                )
                run = plan_run(candidate, inputs)
                profilers.launch_once(candidate.label, partial(run.call, 0))


class ContextLost(RuntimeError):
    """The CUDA context no longer answers: nothing after this can be measured in this process."""


@dataclass
class Bed:
    """Inputs and fp64 answers of one case, built when first needed: peers may run another layout or mask."""

    pools: int
    target: HardwareTarget
    seed: int
    inputs: dict[str, VerifyInputs] = field(default_factory=dict)
    answers: "dict[tuple[str, str], Expected]" = field(default_factory=dict)

    def inputs_of(self, case: VerifyCase) -> VerifyInputs:
        """Inputs in the case's layout, with a tree mask that a causal candidate leaves out."""
        if case.layout not in self.inputs:
            built = replace(case, mask="tree")
            self.inputs[case.layout] = build_inputs(
                built, pools=self.pools, device=device_of(self.target), seed=self.seed
            )
        return self.inputs[case.layout]

    def answer_of(self, case: VerifyCase) -> "Expected":
        """fp64 (out, lse) of pool 0."""
        key = (case.layout, case.mask)
        if key not in self.answers:
            self.answers[key] = expected_output(self.inputs_of(case), case.mask)
        return self.answers[key]


def run_case(
    case: VerifyCase, candidates: Sequence[Candidate], target: HardwareTarget, options: BenchOptions
) -> list[Row]:
    """A row per candidate. Raises ContextLost after a fault that ends the process's use of the GPU."""
    try:
        bed = Bed(count_pools(case, target, options), target, options.seed)
        bed.answer_of(case)
    except (RuntimeError, MemoryError, ValueError) as error:
        for candidate in candidates:
            candidate.fail(error)
        _require_context(target)
        return [to_row(c, target, options) for c in candidates]
    for candidate in candidates:
        _guard(candidate, target, _gate, candidate, bed)
    if options.timed:
        _time(candidates, bed, target, options)
    return [to_row(c, target, options) for c in candidates]


def make_candidates(
    case: VerifyCase,
    variants: "Sequence[Variant]",
    nsplit: int | str = "auto",
    tunables: dict[str, Any] | None = None,
) -> list[Candidate]:
    """One candidate per variant; each takes the tunables it has, and no split count if it does not split."""
    return [
        Candidate(
            variant,
            fitting_case(variant, case),
            case,
            nsplit if variant.splits else "auto",
            {name: value for name, value in (tunables or {}).items() if name in variant.tunables},
        )
        for variant in variants
    ]


def fitting_case(variant: "Variant", case: VerifyCase) -> VerifyCase:
    """The case, or its nearest kin for a peer: causal without tree masks, pages of 64 for FlashMLA."""
    fitted = replace(case, mask="causal") if case.mask not in variant.mask_layouts else case
    paged = variant.name == "flashmla" and not case.layout.startswith("pages")
    return replace(fitted, layout="pages:64") if paged else fitted


def count_pools(case: VerifyCase, target: HardwareTarget, options: BenchOptions) -> int:
    """Rotating pools for the L2 state asked for. Raises ValueError when they do not fit."""
    if target.backend == "cpu" or options.l2 == "warm":
        return 1
    pools = min(timing.pools_needed(case.shape.bytes, target), MAX_POOLS)
    if not pools_fit(case, pools, target):
        raise ValueError(f"{case.name}: {pools} pools of {case.shape.bytes} bytes exceed half of the memory")
    return pools


def device_of(target: HardwareTarget) -> str:
    return "cuda" if target.backend == "cuda" else "cpu"


def _guard(candidate: Candidate, target: HardwareTarget, work: Callable[..., None], *args: Any) -> None:
    """Run `work`; an exception becomes the candidate's status, unless it took the CUDA context with it."""
    try:
        work(*args)
    except Exception as error:
        candidate.fail(error)
        _require_context(target)


def _require_context(target: HardwareTarget) -> None:
    if target.backend != "cuda":
        return
    import torch

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise ContextLost(first_line(error)) from error


def _gate(candidate: Candidate, bed: Bed) -> None:
    candidate.metrics |= {"pools": bed.pools}
    reason = candidate.variant.supports(candidate.case.shape, bed.target)
    if reason:
        candidate.status, candidate.reason = RowStatus.UNSUPPORTED, reason
        return
    qualify(candidate, bed.inputs_of(candidate.case), bed.answer_of(candidate.case))
    if bed.target.backend == "cpu" and candidate.variant.backend == "triton":
        candidate.metrics |= {"interpreted": True}
        candidate.run = None  # the interpreter's speed says nothing about the kernel


def _time(candidates: Sequence[Candidate], bed: Bed, target: HardwareTarget, options: BenchOptions) -> None:
    """Prepare each correct candidate, sample all of them interleaved, then check the results again."""
    for candidate in candidates:
        if candidate.run is not None:
            _guard(candidate, target, _prepare, candidate, target, options)
    ready = {c.label: c for c in candidates if c.prepared is not None}
    if not ready:
        return
    prepared = {name: c.prepared for name, c in ready.items() if c.prepared is not None}
    try:
        with gpu_state.GpuSampler() as sampler:
            timing.sample_together(prepared, n=options.n, budget_s=options.budget_s, seed=options.seed)
    except RuntimeError as error:
        for candidate in ready.values():
            candidate.fail(error)
        return _require_context(target)
    for candidate in ready.values():
        candidate.gpu = sampler.state()
        if options.utilisation:
            _guard(candidate, target, _read_utilisation, candidate, sampler)
        if candidate.run is not None:
            _guard(candidate, target, recheck, candidate)
        if candidate.run is not None:
            _guard(candidate, target, check, candidate, bed.answer_of(candidate.case))


def _prepare(candidate: Candidate, target: HardwareTarget, options: BenchOptions) -> None:
    assert candidate.run is not None
    candidate.prepared = timing.prepare(
        candidate.run.calls(),
        target=target,
        mode=options.mode if target.backend == "cuda" and candidate.variant.capturable else "eager",
        l2=options.l2,
        bytes_per_call=candidate.case.shape.bytes,
    )


def _read_utilisation(candidate: Candidate, sampler: gpu_state.GpuSampler) -> None:
    """Keep the device busy with this candidate alone and read GPM; a metric says why where it cannot."""
    prepared = candidate.prepared
    assert prepared is not None

    def work() -> None:
        for _ in range(8):
            prepared.run()
        timing.synchronize(prepared.target)

    utilisation, reason = gpu_state.read_utilisation(work)
    candidate.gpu = sampler.state(utilisation)
    candidate.metrics |= {"sm_util": utilisation["sm_util"]} if "sm_util" in utilisation else {}
    candidate.metrics |= {"utilisation_reason": reason} if reason else {}
