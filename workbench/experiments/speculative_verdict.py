"""Does one way to decode pay over another? Accept length gained against step time added, both shown."""

from collections.abc import Iterable, Sequence
from typing import Any

from workbench.measure.statistics import median_interval
from workbench.rows import Origin, Row, RowStatus, Scalar

PAIRS = (
    ("chain", "none"),
    ("tree", "none"),
    ("tree", "chain"),
    ("chain_tree", "chain"),
    ("tree", "chain_tree"),
)
MEANING = {
    ("chain", "none"): "speculation",
    ("tree", "none"): "speculation with a tree",
    ("tree", "chain"): "a tree instead of a chain",
    ("chain_tree", "chain"): "the tree machinery alone",
    ("tree", "chain_tree"): "the tree's shape",
}


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """Derived rows: each pair of shapes of one execution and temperature that were both correct."""
    timed = [row for row in rows if row.timing]
    groups = dict.fromkeys((row.axes["execution"], row.axes["temperature"]) for row in timed)
    return [
        compare(a, b)
        for execution, temperature in groups
        for first, second in PAIRS
        for a in select(timed, first, execution, temperature)
        for b in select(timed, second, execution, temperature)
    ]


def select(rows: Iterable[Row], shape: str, execution: Any, temperature: Any) -> list[Row]:
    """Rows of one shape, execution and temperature."""
    wanted = (shape, execution, temperature)
    return [row for row in rows if (row.variant, row.axes["execution"], row.axes["temperature"]) == wanted]


def compare(a: Row, b: Row) -> Row:
    """Both factors of a's speed over b's, with an interval from the spread of the step times."""
    assert a.timing is not None and b.timing is not None
    accept_ratio = number(a, "accept_length") / number(b, "accept_length")
    step_ratio = a.timing.median_us / b.timing.median_us
    low, high = speedup_interval(a, b, accept_ratio)
    metrics: dict[str, Scalar] = {
        "accept_ratio": accept_ratio,
        "step_ratio": step_ratio,
        "speedup": accept_ratio / step_ratio,
        "speedup_low": low,
        "speedup_high": high,
        "pays": "undecided"
        if low is None or high is None or low <= 1 <= high
        else "yes"
        if low > 1
        else "no",
        "tokens_per_s_ratio": number(a, "tokens_per_s") / number(b, "tokens_per_s"),
    }
    return Row(
        case_id=f"{a.variant}:{b.variant}/{a.axes['execution']}/B{a.axes['budget']}/T{a.axes['temperature']:g}",
        experiment=a.experiment,
        variant=f"{a.variant} over {b.variant}",
        target=a.target,
        origin=Origin.DERIVED,
        status=RowStatus.PASSED,
        axes={name: a.axes[name] for name in ("execution", "budget", "temperature")},
        metrics=metrics,
    )


def speedup_interval(a: Row, b: Row, accept_ratio: float) -> tuple[float | None, float | None]:
    """Bounds of the speed-up from 95 % intervals of both median step times; None with too few steps."""
    assert a.timing is not None and b.timing is not None
    ours, theirs = median_interval(a.timing.samples), median_interval(b.timing.samples)
    if ours is None or theirs is None:
        return None, None
    return accept_ratio * theirs[0] / ours[1], accept_ratio * theirs[1] / ours[0]


def number(row: Row, name: str) -> float:
    """A metric that must be there."""
    return float(row.metrics[name] or 0)


def findings(rows: list[Row]) -> list[str]:
    """What the arms say, in sentences computed from the rows."""
    arms = [row for row in rows if row.origin is Origin.MEASURED]
    derived = [row for row in rows if row.origin is Origin.DERIVED]
    said = [*_lossless(arms), *_best_trees(derived)]
    said += [_sentence(row) for row in derived if row.variant in ("chain over none", "chain_tree over chain")]
    return said


def _lossless(arms: list[Row]) -> list[str]:
    wrong = [row for row in arms if row.status is not RowStatus.PASSED]
    if wrong:
        return [f"NOT lossless: {row.case_id}: {row.reason}" for row in wrong]
    greedy = [row for row in arms if row.axes["temperature"] == 0]
    sampled = [row for row in arms if row.axes["temperature"] != 0]
    said = []
    if greedy:
        split = sum(int(number(row, "divergences")) for row in greedy)
        tokens = "token-identical to plain decode" if not split else f"plain decode's up to {split} near ties"
        said.append(f"All {len(greedy)} greedy arms are {tokens} ({greedy[0].axes['dtype']}).")
    if sampled:
        worst = max(abs(number(row, "surprise_z")) for row in sampled)
        said.append(
            f"All {len(sampled)} sampled arms draw from the target: their tokens' surprise is at most "
            f"{worst:.1f} standard errors from its entropy."
        )
    return said


def _best_trees(derived: list[Row]) -> list[str]:
    """The verdict on trees per execution and temperature, at the best budget."""
    best: dict[tuple[Any, Any], Row] = {}
    for row in derived:
        if row.variant == "tree over chain":
            key = (row.axes["execution"], row.axes["temperature"])
            if key not in best or number(row, "speedup") > number(best[key], "speedup"):
                best[key] = row
    return [_sentence(row) for row in best.values()]


def _sentence(row: Row) -> str:
    first, _, second = row.variant.partition(" over ")
    verb = {"yes": "pays", "no": "does not pay", "undecided": "is undecided"}[str(row.metrics["pays"])]
    low, high = row.metrics["speedup_low"], row.metrics["speedup_high"]
    interval = "too few steps for an interval" if low is None else f"{low:.2f} to {high:.2f}"
    return (
        f"{row.axes['execution']}, temperature {row.axes['temperature']:g}, budget {row.axes['budget']}: "
        f"{MEANING[first, second]} {verb}: {number(row, 'accept_ratio'):.2f}x tokens per step against "
        f"{number(row, 'step_ratio'):.2f}x step time = {number(row, 'speedup'):.2f}x ({interval})."
    )
