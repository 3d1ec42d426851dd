"""One verify-attention case over many variants: correct first, then timed together, always a row each."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from workbench.experiments.verify_cases import VerifyCase, VerifyInputs, build_inputs, pools_fit, published_us
from workbench.experiments.verify_gate import NOT_REACHED, Candidate, check, plan_run, qualify
from workbench.experiments.verify_oracle import expected_output
from workbench.measure import gpu_state, profilers, timing
from workbench.measure.statistics import median_interval
from workbench.rows import Origin, Row, RowStatus, Scalar, Timing
from workbench.targets import HardwareTarget

if TYPE_CHECKING:
    from workbench.attention.variants import Variant
    from workbench.experiments.verify_gate import Expected

MAX_POOLS = timing.MAX_CALLS_PER_SAMPLE


@dataclass(frozen=True)
class BenchOptions:
    """How every case is timed."""

    mode: timing.Mode = "graph"
    l2: timing.L2 = "cold"
    n: int = 20
    budget_s: float = 3.0  # per case, all variants together
    utilisation: bool = False  # keep each variant busy for 0.15 s and read GPM
    timed: bool = True
    seed: int = 0
    experiment: str = "verify_variants"


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
        inputs = build_inputs(case, pools=1, device=device_of(self.target), seed=self.options.seed)
        for candidate in candidates:
            reason = candidate.variant.supports(candidate.case.shape, self.target)
            if reason is None:
                run = plan_run(candidate, inputs)
                profilers.launch_once(candidate.label, partial(run.call, 0))


class ContextLost(RuntimeError):
    """The CUDA context no longer answers: nothing after this can be measured in this process."""


def run_case(
    case: VerifyCase, candidates: Sequence[Candidate], target: HardwareTarget, options: BenchOptions
) -> list[Row]:
    """A row per candidate. Raises ContextLost after a fault that ends the process's use of the GPU."""
    try:
        pools = count_pools(case, target, options)
        inputs = build_inputs(case, pools=pools, device=device_of(target), seed=options.seed)
        expected = {mask: expected_output(inputs, mask) for mask in {c.case.mask for c in candidates}}
    except (RuntimeError, MemoryError, ValueError) as error:
        for candidate in candidates:
            candidate.fail(error)
        _require_context(target)
        return [to_row(c, target, options) for c in candidates]
    for candidate in candidates:
        answer = expected[candidate.case.mask]
        candidate.metrics |= {"pools": pools}
        _guard(candidate, target, _gate, candidate, inputs, answer, target, options)
    if options.timed:
        _time(candidates, expected, target, options)
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
            nsplit if variant.splits else "auto",
            {name: value for name, value in (tunables or {}).items() if name in variant.tunables},
        )
        for variant in variants
    ]


def fitting_case(variant: "Variant", case: VerifyCase) -> VerifyCase:
    """The case, or its causal sibling for a peer without tree masks; the row's axes say which."""
    takes_tree = "tree" in variant.mask_layouts
    return case if takes_tree or case.mask != "tree" else replace(case, mask="causal")


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
        raise ContextLost(str(error).splitlines()[0]) from error


def _gate(
    candidate: Candidate,
    inputs: VerifyInputs,
    expected: "Expected",
    target: HardwareTarget,
    options: BenchOptions,
) -> None:
    qualify(candidate, inputs, expected, target)
    if target.backend == "cpu" and candidate.variant.backend == "triton":
        candidate.metrics |= {"interpreted": True}
        candidate.run = None  # the interpreter's speed says nothing about the kernel


def _time(
    candidates: Sequence[Candidate],
    expected: "dict[str, Expected]",
    target: HardwareTarget,
    options: BenchOptions,
) -> None:
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
            _guard(candidate, target, check, candidate, expected[candidate.case.mask])


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


def to_row(candidate: Candidate, target: HardwareTarget, options: BenchOptions) -> Row:
    """The candidate as a row: a timing only with PASSED, an impossible bandwidth as an error."""
    case, timed = candidate.case, None
    if candidate.prepared is not None and candidate.status is RowStatus.PASSED:
        try:
            timed = candidate.prepared.timing()
        except timing.ImpossibleBandwidth as error:
            candidate.fail(error)
    metrics = candidate.metrics | {"bound": case.shape.bound(target)}
    metrics |= {f"published_{peer}_us": value for peer, value in published_us(case, target.name).items()}
    if timed is not None:
        metrics |= _rates(timed, case)
    return Row(
        case_id=f"{case.name}-{candidate.label}",
        experiment=options.experiment,
        variant=candidate.variant.name,
        target=target.name,
        origin=Origin.MEASURED,
        status=candidate.status,
        reason=candidate.reason,
        axes=case.axes | {"nsplit": str(candidate.nsplit)},
        errors=candidate.errors,
        timing=timed,
        bytes=case.shape.bytes,
        flops=case.shape.flops,
        floor_us=case.shape.floor_us(target),
        metrics=metrics,
        gpu=candidate.gpu if timed is not None else None,
        repro=repro_command(candidate, target, options),
    )


def _rates(timed: Timing, case: VerifyCase) -> dict[str, Scalar]:
    """Least bytes and flops over the median, and the 95 % interval of the median."""
    interval = median_interval(timed.samples)
    rates: dict[str, Scalar] = {
        "gbps": case.shape.bytes / timed.median_us / 1e3,
        "tflops": case.shape.flops / timed.median_us / 1e6,
    }
    return rates | ({"ci95_low_us": interval[0], "ci95_high_us": interval[1]} if interval else {})


def repro_command(candidate: Candidate, target: HardwareTarget, options: BenchOptions) -> str:
    """The command line that redoes this row."""
    tunables = "".join(f" --tunables {name}={value}" for name, value in candidate.tunables.items())
    return (
        f"workbench bench verify --target {target.name} --variants {candidate.variant.name}"
        f" --shapes {candidate.case.name} --nsplit {candidate.nsplit} --mode {options.mode} --l2 {options.l2}"
        f" --seed {options.seed}{tunables}"
    )
