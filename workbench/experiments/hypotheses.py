"""What could explain a slow step, and how much of it at most, before anything is decided."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from workbench.experiments.fault_runs import EXPERIMENT, LongRun
from workbench.measure import gpu_state, timing
from workbench.measure.statistics import quantile
from workbench.rows import Origin, Row, RowStatus, Scalar
from workbench.targets import HardwareTarget

if TYPE_CHECKING:
    from workbench.decode.faults import Fault
    from workbench.decode.laboratory import Laboratory

LAUNCHES = 200


def state_hypotheses(run: LongRun, lab: "Laboratory", target: HardwareTarget) -> Iterable[Row]:
    """Derived rows: time per step that tree, mask, scattered KV and launches could explain at most."""
    summary = run.evidence.result.ledger.summary(skip=1)
    audit = run.evidence.audit
    launch_us = measure_launch_us(lab, target)
    scatter_us, how = measure_scatter_us(run, lab, target)
    step_us = summary.get("step_us", 0.0)
    explained = {
        "tree build": (summary.get("tree_us", 0.0), "the ledger's tree stage"),
        "mask": (summary.get("mask_us", 0.0), "the ledger's mask stage"),
        "scattered KV": (scatter_us, how),
        "launches": (
            audit.mean("eager_launches") * launch_us,
            f"{audit.mean('eager_launches'):.0f} eager launches of {launch_us:.1f} us each",
        ),
        "host between steps": (host_between_us(run), "the step's median period minus the median step"),
    }
    for name, (us, why) in explained.items():
        yield Row(
            case_id=f"hypothesis-{name.replace(' ', '-')}", experiment=EXPERIMENT, variant=name,
            target=target.name, origin=Origin.DERIVED, status=RowStatus.PASSED, axes={"run": "hypothesis"},
            metrics={"explains_us": us, "share_of_step": us / step_us if step_us else 0.0, "because": why},
        )  # fmt: skip


def host_between_us(run: LongRun) -> float:
    """Median time from one step's results to the next one's, less the median step; not below 0."""
    ledger = run.evidence.result.ledger
    periods, steps = ledger.periods_us(), [record.step_us for record in ledger.records]
    return max(0.0, quantile(periods, 0.5) - quantile(steps, 0.5)) if periods else 0.0


def measure_launch_us(lab: "Laboratory", target: HardwareTarget) -> float:
    """Host time of launching the smallest operation."""
    import torch

    one = torch.zeros(1, device=lab.target.device)

    def launch() -> Any:
        for _ in range(LAUNCHES):
            one.add_(1)

    span = timing.measure(launch, target=target, n=6).span_us
    return (span or 0.0) / LAUNCHES


def measure_scatter_us(run: LongRun, lab: "Laboratory", target: HardwareTarget) -> tuple[float, str]:
    """Extra time of reading this step's KV rows from scattered slots over all layers; how it was found."""
    import torch

    rows = max(1, run.held_tokens)
    pool = lab.target.make_pool(4 * rows)
    device = pool.buffer.device
    scattered = torch.randperm(4 * rows, device=device)[:rows] + 1
    contiguous = torch.arange(1, rows + 1, device=device)
    layer, out = pool.layer(0), torch.empty(rows, pool.width, dtype=pool.dtype, device=device)
    calls = {
        "scattered": lambda: torch.index_select(layer, 0, scattered, out=out),
        "contiguous": lambda: torch.index_select(layer, 0, contiguous, out=out),
    }
    prepared = {name: timing.prepare(call, target=target) for name, call in calls.items()}
    timing.sample_together(prepared, n=15)
    medians = {name: one.timing().median_us for name, one in prepared.items()}
    extra = max(0.0, medians["scattered"] - medians["contiguous"]) * pool.layers
    moved = rows * pool.width * out.element_size()
    gbps = moved / (medians["scattered"] * 1e3)
    return extra, f"{pool.layers} x {moved} bytes, gathered at {gbps:.1f} GB/s from scattered slots"


def utilisation_row(run: LongRun, lab: "Laboratory", fault: "Fault", target: HardwareTarget) -> Row:
    """DRAM and tensor utilisation of the faulty run: by GPM where the GPU has it, else derived from bytes."""
    summary = run.evidence.result.ledger.summary(skip=1)
    step_us = summary.get("step_us", 0.0) or 1.0
    config = lab.target.config
    moved = config.weight_bytes + run.held_tokens * config.kv_bytes_per_token
    metrics: dict[str, Scalar] = {
        "least_bytes": moved,
        "derived_dram_share": moved / (step_us * target.dram_gbps * 1e3),
        "busy_share": run.evidence.audit.mean("busy_share"),
    }
    seen: dict[str, float] = {}
    reason = "cpu has no GPM"
    if target.backend == "cuda":
        decoder = lab.make(fault, shadow_steps=())
        lab.generate(decoder, fault, max_steps=2)  # captures before the window opens
        seen, reason = gpu_state.read_utilisation(lambda: lab.generate(decoder, fault, max_steps=20))
    metrics |= seen
    metrics |= {} if seen else {"utilisation_reason": reason}
    return Row(
        case_id=f"{fault.name}-utilisation", experiment=EXPERIMENT, variant=fault.name, target=target.name,
        origin=Origin.MEASURED if seen else Origin.DERIVED, status=RowStatus.PASSED,
        axes={"run": "utilisation"}, metrics=metrics,
    )  # fmt: skip
