"""Notebook 10: is every verify-attention variant correct, and how far from the floor is it?"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from workbench import targets
from workbench.experiments.verify_bench import Bench, BenchOptions, make_candidates
from workbench.experiments.verify_cases import VerifyCase, cpu_cases, quick_cases, table_cases
from workbench.measure import timing
from workbench.rows import Origin, Row, RowStatus

if TYPE_CHECKING:
    from workbench.attention.variants import Variant

BASELINES = {"cpu": "reference", "cuda": "triton_serial"}
COLUMNS = (
    "target", "variant", "axis_bs", "axis_heads", "axis_q_len", "axis_ctx", "axis_layout", "axis_mask",
    "axis_dtype", "status", "reason", "error_rel_fro", "mode", "l2", "n", "median_us", "p10_us", "p90_us",
    "stable", "floor_us", "floor_ratio", "metric_gbps", "metric_tflops", "gpu_dram_util", "gpu_tensor_util",
)  # fmt: skip
INTERPRETED_CASE = VerifyCase(1, 4, 3, 61, "random", "tree", "fp32", latent=64, rope=16)


class Params(BaseModel):
    """Parameters of notebook 10."""

    model_config = ConfigDict(extra="forbid")
    target: str = Field("cpu", description="hardware target, one of data/targets")
    seed: int = Field(0, description="seed of inputs and sampling order")
    shapes: str = Field(
        "quick",
        pattern="^(quick|table)$",
        description='on a GPU: 7 shapes ("quick"), or the whole peers table ("table")',
    )
    peers: bool = Field(True, description="also time other libraries' kernels where they can be imported")
    samples: int = Field(10, ge=3, description="samples per variant and shape")
    budget_s: float = Field(0.5, gt=0, description="most seconds of sampling per shape")


def run(params: Params, step: Callable[[str], None] = print) -> list[Row]:
    """Measured rows of every variant and shape here, then projected floors of the GPU targets."""
    target = targets.load(params.target)
    targets.require_hardware(target)
    options = BenchOptions(n=params.samples, budget_s=params.budget_s, seed=params.seed)
    on_gpu = {"quick": quick_cases, "table": table_cases}[params.shapes]
    cases = on_gpu() if target.backend == "cuda" else cpu_cases()
    bench, rows = Bench(target, options), []
    with timing.one_thread(target):
        for case, wanted in plan_cases(cases, chosen_variants(params.peers), target.backend):
            step(f"{case.name}: {', '.join(v.name for v in wanted)}")
            rows += bench.run(case, make_candidates(case, wanted))
    step("projected floors of the GPU targets")
    return rows + list(project_floors(target.name))


def chosen_variants(peers: bool) -> "list[Variant]":
    """Every variant of the table; peers only when asked for."""
    from workbench.attention import variants

    return [v for v in variants() if peers or v.backend != "peer"]


def plan_cases(
    cases: Iterable[VerifyCase], variants: "list[Variant]", backend: str
) -> "Iterable[tuple[VerifyCase, list[Variant]]]":
    """Which variants run which case.

    The fp64 oracle is timed on cpu only, interpreted Triton runs a tiny case, and torch_flex, which compiles
    for every shape, the first shape only.
    """
    left_out = "reference" if backend == "cuda" else "triton"
    for place, case in enumerate(cases):
        wanted = [v for v in variants if left_out not in (v.name, v.backend)]
        yield case, [v for v in wanted if place == 0 or v.name != "torch_flex"]
    interpreted = [v for v in variants if v.backend == "triton"]
    if backend == "cpu" and interpreted:
        yield INTERPRETED_CASE, interpreted


def project_floors(measured: str) -> Iterable[Row]:
    """The floor of each quick shape on every other GPU target: a roofline projection, nothing was run."""
    for name in targets.names():
        target = targets.load(name)
        if target.backend != "cuda" or name == measured:
            continue
        for case in quick_cases():
            yield Row(
                case_id=f"{case.name}-floor", experiment="verify_variants", variant="floor", target=name,
                origin=Origin.PROJECTED, status=RowStatus.PASSED, axes=case.axes, bytes=case.shape.bytes,
                flops=case.shape.flops, floor_us=case.shape.floor_us(target),
                metrics={"bound": case.shape.bound(target)},
            )  # fmt: skip


def findings(rows: list[Row]) -> list[str]:
    """What the rows say, in sentences."""
    measured = [row for row in rows if row.origin is Origin.MEASURED]
    told = [*_correctness(measured), *_speed(measured), *_layouts(measured), *_unsupported(measured)]
    projected = [row for row in rows if row.origin is Origin.PROJECTED]
    names = sorted({row.target for row in projected})
    if names:
        told.append(
            f"Projected, not measured: floors of {len(projected)} shape-target pairs on {', '.join(names)}."
        )
    return told


def _correctness(rows: list[Row]) -> Iterable[str]:
    passed = [row for row in rows if row.status is RowStatus.PASSED]
    wrong = [row for row in rows if row.status is RowStatus.INCORRECT]
    worst = max(passed, key=lambda row: row.errors["rel_fro"], default=None)
    if worst is not None:
        yield (
            f"{len({r.variant for r in passed})} variants pass on {len(passed)} cases; the largest relative"
            f" error against fp64 is {worst.errors['rel_fro']:.1e} ({worst.variant}, {worst.axes['dtype']})."
        )
    for row in wrong:
        yield f"{row.variant} is wrong on {row.case_id}: {row.reason}."
    failed = [
        r
        for r in rows
        if r.status in (RowStatus.RUNTIME_ERROR, RowStatus.COMPILE_ERROR, RowStatus.OUT_OF_MEMORY)
    ]
    for row in failed:
        yield f"{row.variant} failed on {row.case_id} with {row.status}: {row.reason}."


def _speed(rows: list[Row]) -> Iterable[str]:
    timed = [row for row in rows if row.timing is not None]
    if not timed:
        return
    baseline = BASELINES[targets.load(timed[0].target).backend]
    for variant in dict.fromkeys(row.variant for row in timed):
        ratios = [(row.floor_ratio or 0.0, row) for row in timed if row.variant == variant]
        best_ratio, best = min(ratios, key=lambda pair: pair[0])
        gains = [g for _, row in ratios if (g := speedup(row, timed, baseline)) is not None]
        against = f", {_span(gains)} times as fast as {baseline}" if gains and variant != baseline else ""
        yield f"{variant}: at best {best_ratio:.3g} times the floor ({best.axes['ctx']} tokens){against}."


def _span(values: list[float]) -> str:
    """ "2.2 to 6.6", or one number where both ends read the same."""
    return " to ".join(dict.fromkeys(f"{value:.2g}" for value in (min(values), max(values))))


def speedup(row: Row, rows: list[Row], baseline: str) -> float | None:
    """Baseline median over the row's, for the same case; None without a baseline timing."""
    for other in rows:
        if (
            other.variant == baseline
            and other.axes["case"] == row.axes["case"]
            and other.timing
            and row.timing
        ):
            return other.timing.median_us / row.timing.median_us
    return None


def _layouts(rows: list[Row]) -> Iterable[str]:
    """What scattered slots cost: pairs of shapes that differ in the layout only."""
    pairs: dict[str, list[tuple[Row, Row]]] = {}
    contiguous = {(r.variant, *_shape(r)): r for r in rows if r.timing and r.axes["layout"] == "contiguous"}
    for row in rows:
        other = contiguous.get((row.variant, *_shape(row)))
        if row.timing and row.axes["layout"] == "random" and other is not None:
            pairs.setdefault(row.variant, []).append((other, row))
    for variant, found in pairs.items():
        changes = sorted(
            r.timing.median_us / c.timing.median_us - 1 for c, r in found if r.timing and c.timing
        )
        clear = sum(differ(*pair) for pair in found)
        yield (
            f"Scattered slots change {variant} by {100 * changes[len(changes) // 2]:+.1f} % (median of"
            f" {len(found)} shapes; the 95 % intervals are apart on {clear} of them)."
        )


def differ(one: Row, other: Row) -> bool:
    """Whether the 95 % intervals of the medians do not touch; False where one is unknown."""
    bounds = [(r.metrics.get("ci95_low_us"), r.metrics.get("ci95_high_us")) for r in (one, other)]
    if any(not isinstance(edge, float) for pair in bounds for edge in pair):
        return False
    (low, high), (other_low, other_high) = bounds
    return bool(high < other_low or other_high < low)  # type: ignore[operator]


def _shape(row: Row) -> tuple[object, ...]:
    return tuple(row.axes[name] for name in ("bs", "heads", "q_len", "ctx", "mask", "dtype"))


def _unsupported(rows: list[Row]) -> Iterable[str]:
    reasons = {(r.variant, r.reason) for r in rows if r.status in (RowStatus.UNSUPPORTED, RowStatus.SKIPPED)}
    for variant, reason in sorted(reasons):
        yield f"Not run here: {variant} ({reason})."
    interpreted = sorted({r.variant for r in rows if r.metrics.get("interpreted")})
    if interpreted:
        yield f"Checked in the interpreter and therefore not timed: {', '.join(interpreted)}."
