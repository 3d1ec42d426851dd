"""A candidate as a row: a timing only with PASSED, an impossible bandwidth as an error."""

from workbench.experiments.verify_cases import VerifyCase, published_us
from workbench.experiments.verify_gate import Candidate
from workbench.experiments.verify_options import BenchOptions
from workbench.measure import timing
from workbench.measure.statistics import median_interval
from workbench.rows import Origin, Row, RowStatus, Scalar, Timing
from workbench.targets import HardwareTarget


def to_row(candidate: Candidate, target: HardwareTarget, options: BenchOptions) -> Row:
    """The row, whatever happened to the candidate."""
    case, timed = candidate.case, None
    if candidate.prepared is not None and candidate.status is RowStatus.PASSED:
        try:
            timed = candidate.prepared.timing()
        except timing.ImpossibleBandwidth as error:
            candidate.fail(error)
    metrics = candidate.metrics | {"bound": case.shape.bound(target)}
    metrics |= {
        f"published_{peer}_us": value for peer, value in published_us(candidate.asked, target.name).items()
    }
    if timed is not None:
        metrics |= _rates(timed, case)
    return Row(
        case_id=f"{candidate.asked.name}-{candidate.label}",
        experiment=options.experiment,
        variant=candidate.variant.name,
        target=target.name,
        origin=Origin.MEASURED,
        status=candidate.status,
        reason=candidate.reason,
        axes=case.axes | {"nsplit": str(candidate.nsplit), "case": candidate.asked.name},
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
        f" --shapes {candidate.asked.name} --nsplit {candidate.nsplit} --mode {options.mode}"
        f" --l2 {options.l2} --seed {options.seed}{tunables}"
    )
