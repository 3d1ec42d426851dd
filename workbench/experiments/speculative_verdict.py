"""Does one way to decode pay over another? Measured tokens per second decide; their factors explain.

rate ratio = accept ratio / step ratio x fill ratio x uneven ratio x outside ratio, exactly.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import stdev
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
VERBS = {"yes": "pays", "no": "does not pay", "undecided": "is undecided"}


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
    """a's measured tokens per second over b's, and the factors whose product it is."""
    assert a.timing is not None and b.timing is not None
    accept_ratio = number(a, "accept_length") / number(b, "accept_length")
    step_ratio = a.timing.median_us / b.timing.median_us
    rate_ratio = number(a, "tokens_per_s") / number(b, "tokens_per_s")
    low, high = rate_interval(a, b)
    step_low, step_high = step_interval(a, b, accept_ratio)
    metrics: dict[str, Scalar] = {
        "pays": _verdict(low, high),
        "tokens_per_s_ratio": rate_ratio,
        "tokens_per_s_low": low,
        "tokens_per_s_high": high,
        "passes": len(pass_rates(a)),
        "accept_ratio": accept_ratio,
        "step_ratio": step_ratio,
        "two_factors": accept_ratio / step_ratio,
        "two_factors_low": step_low,
        "two_factors_high": step_high,
        "rest_ratio": rate_ratio / (accept_ratio / step_ratio),
        "fill_ratio": number(a, "batch_fill") / number(b, "batch_fill"),
        "uneven_ratio": number(b, "mean_over_full_step") / number(a, "mean_over_full_step"),
        "outside_ratio": number(b, "decode_over_steps") / number(a, "decode_over_steps"),
        "batch_fill": number(a, "batch_fill"),
        "batch_fill_base": number(b, "batch_fill"),
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


def _verdict(low: float | None, high: float | None) -> str:
    if low is None or high is None or low <= 1 <= high:
        return "undecided"
    return "yes" if low > 1 else "no"


def pass_rates(row: Row) -> list[float]:
    """Tokens per second of each pass."""
    return [float(value or 0) for name, value in row.metrics.items() if name.startswith("tokens_per_s_pass")]


def rate_interval(a: Row, b: Row) -> tuple[float | None, float | None]:
    """95 % interval of the ratio of rates: its log +- t standard errors of the passes; None for one pass."""
    from scipy.stats import t

    ratios = [math.log(x / y) for x, y in zip(pass_rates(a), pass_rates(b), strict=True)]
    if len(ratios) < 2:
        return None, None
    reach = float(t.ppf(0.975, len(ratios) - 1)) * stdev(ratios) / math.sqrt(len(ratios))
    rate_ratio = number(a, "tokens_per_s") / number(b, "tokens_per_s")
    return rate_ratio * math.exp(-reach), rate_ratio * math.exp(reach)


def step_interval(a: Row, b: Row, accept_ratio: float) -> tuple[float | None, float | None]:
    """Bounds of accept over step ratio from 95 % intervals of both median steps; None with too few steps."""
    assert a.timing is not None and b.timing is not None
    ours, theirs = median_interval(a.timing.samples), median_interval(b.timing.samples)
    if ours is None or theirs is None:
        return None, None
    return accept_ratio * theirs[0] / ours[1], accept_ratio * theirs[1] / ours[0]


def number(row: Row, name: str) -> float:
    """A metric that must be there."""
    return float(row.metrics[name] or 0)


def findings(rows: list[Row]) -> list[str]:
    """What the arms say, in sentences computed from the rows: the measured verdict first."""
    arms = [row for row in rows if row.origin is Origin.MEASURED]
    derived = [row for row in rows if row.origin is Origin.DERIVED]
    told = [*best_trees(derived), *(r for r in derived if r.variant == "chain over none")]
    told += [row for row in derived if row.variant == "chain_tree over chain"]
    return [*_headline(derived), *_lossless(arms), *map(_sentence, told)]


def _headline(derived: list[Row]) -> list[str]:
    """Both questions in one sentence, for the launch that is replayed where there is one."""
    rows = [*(r for r in derived if r.variant == "chain over none"), *best_trees(derived)]
    graphs = [row for row in rows if row.axes["execution"] != "eager"]
    shown = [row for row in graphs or rows if row.axes["execution"] == (graphs or rows)[0].axes["execution"]]
    if not shown:
        return ["No two arms were correct and timed: nothing can be said about speed."]
    parts = [
        f"{meaning(row)} {VERBS[str(row.metrics['pays'])]} at temperature"
        f" {row.axes['temperature']:g} with {rate_words(row)}"
        for row in shown
    ]
    return [f"Measured end to end, {shown[0].axes['execution']}: {'; '.join(parts)}."]


def meaning(row: Row) -> str:
    """A pair of shapes in words."""
    first, _, second = row.variant.partition(" over ")
    return MEANING[first, second]


def rate_words(row: Row) -> str:
    """`1.41x the tokens per second (1.30 to 1.52)`."""
    return (
        f"{number(row, 'tokens_per_s_ratio'):.2f}x the tokens per second ({_interval(row, 'tokens_per_s')})"
    )


def _interval(row: Row, name: str) -> str:
    low, high = row.metrics[f"{name}_low"], row.metrics[f"{name}_high"]
    return "too few for an interval" if low is None else f"{low:.2f} to {high:.2f}"


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


def best_trees(derived: Sequence[Row]) -> list[Row]:
    """Tree over chain per execution and temperature, at the budget of most tokens per second."""
    best: dict[tuple[Any, Any], Row] = {}
    for row in derived:
        if row.variant == "tree over chain":
            key = (row.axes["execution"], row.axes["temperature"])
            if key not in best or number(row, "tokens_per_s_ratio") > number(best[key], "tokens_per_s_ratio"):
                best[key] = row
    return list(best.values())


def _sentence(row: Row) -> str:
    return (
        f"{row.axes['execution']}, temperature {row.axes['temperature']:g}, budget {row.axes['budget']}: "
        f"{meaning(row)} {VERBS[str(row.metrics['pays'])]}: {rate_words(row)}, measured in"
        f" {row.metrics['passes']} passes. {number(row, 'accept_ratio'):.2f}x tokens per request and step"
        f" against {number(row, 'step_ratio'):.2f}x time of a full step would be"
        f" {number(row, 'two_factors'):.2f}x ({_interval(row, 'two_factors')}); {_rest(row)}."
    )


def _rest(row: Row) -> str:
    """What lies between the two factors and the measured ratio, by name."""
    fill, base = number(row, "batch_fill"), number(row, "batch_fill_base")
    verb = "differs by more than the noise" if differs(row) else "agrees within the noise"
    return (
        f"that {verb}: the remaining {number(row, 'rest_ratio'):.2f}x is"
        f" {number(row, 'fill_ratio'):.2f}x from rows of finished requests (the batch is {fill:.0%} full"
        f" against {base:.0%}),"
        f" {number(row, 'uneven_ratio'):.2f}x from steps unlike the median full one and"
        f" {number(row, 'outside_ratio'):.2f}x from time outside of steps"
    )


def differs(row: Row) -> bool:
    """The measured ratio lies outside the two factors' interval and they outside of its: not noise."""
    for value, interval in (("tokens_per_s_ratio", "two_factors"), ("two_factors", "tokens_per_s")):
        low, high = row.metrics[f"{interval}_low"], row.metrics[f"{interval}_high"]
        if low is None or high is None or float(low) <= number(row, value) <= float(high):
            return False
    return True
