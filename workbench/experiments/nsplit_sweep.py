"""Notebook 20: what does the number of KV splits cost and bring, and what does "auto" pick?"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from workbench import targets
from workbench.experiments.split_regret import median_us, regrets
from workbench.experiments.verify_bench import Bench, BenchOptions
from workbench.experiments.verify_cases import VerifyCase, quick_cases
from workbench.experiments.verify_gate import Candidate
from workbench.measure import timing
from workbench.rows import Origin, Row
from workbench.targets import HardwareTarget

if TYPE_CHECKING:
    from workbench.attention.variants import Variant

NAME = "nsplit_sweep"
COLUMNS = (
    "variant", "axis_q_len", "axis_ctx", "axis_dtype", "axis_nsplit", "metric_plan_nsplit", "status",
    "reason", "error_rel_fro", "error_cos_diff", "mode", "l2", "n", "median_us", "p10_us", "p90_us",
    "floor_ratio", "metric_partial_traffic_bytes",
)  # fmt: skip
INTERPRETED_CASES = tuple(
    VerifyCase(1, 4, 3, 253, "random", "tree", dtype, 64, 16) for dtype in ("bf16", "fp32")
)


class Params(BaseModel):
    """Parameters of notebook 20."""

    model_config = ConfigDict(extra="forbid")
    target: str = Field("cpu", description="hardware target, one of data/targets")
    seed: int = Field(0, description="seed of inputs and sampling order")
    max_nsplit: int = Field(64, ge=1, le=1024, description="the sweep goes 1, 2, 4, ... up to this")
    samples: int = Field(
        12, ge=6, description="samples per split count; fewer than 6 cannot tell a regret from noise"
    )
    budget_s: float = Field(2.5, gt=0, description="most seconds of sampling per shape and variant")


def run(params: Params, step: Callable[[str], None] = print) -> list[Row]:
    """Rows of every split count and of "auto" per variant and shape, then derived partial traffic."""
    target = targets.load(params.target)
    targets.require_hardware(target)
    options = BenchOptions(n=params.samples, budget_s=params.budget_s, seed=params.seed, experiment=NAME)
    bench = Bench(target, options)
    rows: list[Row] = []
    with timing.one_thread(target):
        for variant, case in plan_sweeps(target):
            interpreted = case in INTERPRETED_CASES
            step(f"{variant.name} on {case.name}" + (" in the interpreter, untimed" if interpreted else ""))
            largest = min(params.max_nsplit, 16) if interpreted else params.max_nsplit
            rows += sweep(case, variant, powers_of_two(largest), bench)
    step("derived partial traffic")
    return rows + [
        partial_traffic(row)
        for row in rows
        if row.axes["nsplit"] != "auto" and row.metrics.get("plan_nsplit")
    ]


def plan_sweeps(target: HardwareTarget) -> "Iterable[tuple[Variant, VerifyCase]]":
    """Which variant sweeps which shape: here on cpu Triton is interpreted and gets tiny ones."""
    from workbench.attention import variants

    on_gpu = target.backend == "cuda"
    cpu = [VerifyCase(1, 8, 16, 4096, dtype="fp32"), VerifyCase(1, 8, 1, 8192, dtype="fp32")]
    for variant in variants():
        if not variant.splits or variant.backend == "peer" or target.backend not in variant.devices:
            continue
        interpreted = not on_gpu and variant.backend == "triton"
        for case in quick_cases() if on_gpu else INTERPRETED_CASES if interpreted else cpu:
            yield variant, case


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... up to `largest`."""
    return [1 << k for k in range(largest.bit_length())]


def sweep(case: VerifyCase, variant: "Variant", counts: Sequence[int], bench: Bench) -> list[Row]:
    """One row per split count and one for "auto", all sampled interleaved."""
    choices: list[int | str] = [*counts, "auto"]
    return bench.run(case, [Candidate(variant, case, case, nsplit) for nsplit in choices])


def partial_traffic(row: Row) -> Row:
    """What the partial results of that split count add to the least bytes: written once, read once."""
    moved = 2 * int(row.metrics["workspace_bytes"] or 0)
    return Row(
        case_id=f"{row.case_id}-traffic", experiment=NAME, variant=row.variant, target=row.target,
        origin=Origin.DERIVED, status=row.status, reason=row.reason, axes=row.axes, bytes=moved,
        metrics={"partial_traffic_bytes": moved, "share_of_least_bytes": moved / (row.bytes or 1)},
    )  # fmt: skip


def findings(rows: list[Row]) -> list[str]:
    """What the rows say, in sentences."""
    return [*_regret_findings(rows), *_drift_findings(rows), *_traffic_findings(rows)]


def _regret_findings(rows: list[Row]) -> Iterable[str]:
    for one in regrets(rows):
        auto, wanted = one.auto, one.best.metrics["plan_nsplit"]
        text = (
            f"{auto.variant}, {auto.axes['q_len']} rows on {auto.axes['ctx']} tokens:"
            f" auto picks {_splits(auto.metrics['plan_nsplit'])}"
        )
        again = "".join(
            f"; the same plan measured again differs by {median_us(twin) / median_us(auto) - 1:+.1%}"
            for twin in one.twins[:1]
        )
        if one.is_same_plan:
            yield f"{text}, the fastest of the sweep{again}."
        elif one.is_ahead:
            lead = f"{_splits(wanted)} take {one.lead:.1%} longer"
            yield f"{text}, faster than every count of the sweep; {lead}{again}."
        elif one.lead > 0:
            few = "" if one.is_told else ", too few samples"
            yield f"{text}, not told apart from {_splits(wanted)}{few}{again}."
        elif not one.is_told:
            yield f"{text}; {_splits(wanted)} measured {one.share:.1%} faster, too few samples{again}."
        elif one.is_noise:
            yield f"{text}; {_splits(wanted)} measured {one.share:.1%} faster, within the noise{again}."
        else:
            yield f"{text}, {_splits(wanted)} would be {one.share:.1%} faster (95 % intervals apart{again})."


def _splits(count: object) -> str:
    return f"{count} split" + ("" if count == 1 else "s")


def _drift_findings(rows: list[Row]) -> Iterable[str]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.errors and row.axes["nsplit"] != "auto":
            groups.setdefault((row.variant, str(row.axes["dtype"])), []).append(row)
    for (variant, dtype), group in groups.items():
        low = min(group, key=lambda row: row.errors["rel_fro"])
        high = max(group, key=lambda row: row.errors["rel_fro"])
        yield (
            f"{variant} in {dtype}: the error against fp64 runs from {low.errors['rel_fro']:.1e}"
            f" ({low.axes['nsplit']} splits) to {high.errors['rel_fro']:.1e} ({high.axes['nsplit']} splits)."
        )


def _traffic_findings(rows: list[Row]) -> Iterable[str]:
    derived = [row for row in rows if row.origin is Origin.DERIVED]
    if derived:
        most = max(derived, key=lambda row: float(row.metrics["share_of_least_bytes"] or 0))
        share = 100 * float(most.metrics["share_of_least_bytes"] or 0)
        yield (
            f"Derived: partial results move up to {share:.0f} % of the least bytes"
            f" ({most.variant}, {most.axes['nsplit']} splits, {most.axes['ctx']} tokens)."
        )
