"""Sentences of notebook 30, every number from a row."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workbench.measure.statistics import median_interval, quantile
from workbench.rows import Origin, Row

SLOPES = ("ns_per_gap", "ns_per_descent")
STORY_DRAM_UTIL = 0.02  # what the decode that started the question was seen at


def findings(rows: list[Row]) -> list[str]:
    """The verdict first, from what was measured; then the fit, the wear, and what is derived from them."""
    by_variant = {row.variant: row for row in rows if row.origin is Origin.DERIVED}
    whole = compare_steps(rows)
    told = [*_verdict(by_variant.get("regression"), whole), *_moving(rows, whole), *_steps(rows, whole)]
    told += [*_cost(by_variant), *_wear(rows), *_tiers(rows, by_variant), *_copy(rows)]
    wrong = [row for row in rows if row.reason]
    return told + [f"{row.case_id} is left out: {row.reason}." for row in wrong]


@dataclass(frozen=True)
class Ratio:
    """One median over another, with its 95 % interval and how far the same thing differs from itself."""

    value: float
    low: float
    high: float
    noise: float = 0.0

    @property
    def is_visible(self) -> bool:
        """The interval excludes 1, and the difference is greater than the noise."""
        return (self.low > 1 or self.high < 1) and abs(self.value - 1) > self.noise

    def words(self) -> str:
        return f"{self.value - 1:+.1%} ({self.low - 1:+.1%} to {self.high - 1:+.1%})"


def compare_timings(ours: Sequence[float], theirs: Sequence[float], noise: float = 0.0) -> Ratio | None:
    """Median over median with bounds from both medians' intervals; None for too few samples."""
    a, b = median_interval(ours), median_interval(theirs)
    if a is None or b is None:
        return None
    return Ratio(quantile(ours, 0.5) / quantile(theirs, 0.5), a[0] / b[1], a[1] / b[0], noise)


def compare_steps(rows: list[Row]) -> Ratio | None:
    """Whole decode steps on the worn default pool over those on the fresh ones, measured."""
    steps = [row for row in rows if row.variant == "whole_step" and row.timing]
    fresh = [r.timing for r in steps if r.axes["layout"] == "contiguous" and r.timing]
    worn = [r.timing for r in steps if r.axes["layout"] == "churned:fifo" and r.timing]
    if len(fresh) < 2 or not worn:
        return None
    noise = abs(fresh[0].median_us / fresh[1].median_us - 1)
    return compare_timings(worn[0].samples, [*fresh[0].samples, *fresh[1].samples], noise)


def number(row: Row, name: str) -> float:
    """A metric as a float. ValueError names one that is missing."""
    value = row.metrics.get(name)
    if not isinstance(value, int | float):
        raise ValueError(f"row {row.case_id!r} has no number {name!r}: run the experiment again")
    return float(value)


def _verdict(fit: Row | None, whole: Ratio | None) -> Iterable[str]:
    if fit is None:
        yield "Too few correct layouts for a regression: nothing can be said about the cost of scatter."
        return
    kernel = (
        "Scatter costs time in the attention call, above the noise"
        if fit.metrics["above_noise"]
        else "No cost of scatter above the noise in the attention call"
    )
    if whole is None:
        step = "no whole step was measured"
    elif not whole.is_visible:
        step = (
            f"not visible in a whole decode step: {whole.words()} on the worn pool, noise {whole.noise:.1%},"
            f" so a cost below {max(whole.high - 1, whole.noise):.0%} cannot be excluded"
        )
    else:
        word = "slower" if whole.value > 1 else "faster"
        step = f"a whole decode step is {word} on the worn pool: {whole.words()}, noise {whole.noise:.1%}"
    yield f"{kernel} on {fit.target}; {step}."


def _steps(rows: list[Row], whole: Ratio | None) -> Iterable[str]:
    steps = [row for row in rows if row.variant == "whole_step" and row.timing]
    if steps and whole is not None:
        parts = [f"{r.axes['layout']} {r.timing.median_us / 1e3:.2f} ms" for r in steps if r.timing]
        yield (
            f"Measured: whole decode steps of the tiny pair behind {steps[0].axes['prompt_tokens']} tokens,"
            f" the same tokens on every pool, median: {', '.join(parts)}; the two contiguous ones differ by"
            f" noise alone ({whole.noise:.1%})."
        )


def _moving(rows: list[Row], whole: Ratio | None) -> Iterable[str]:
    """Does Tier 1 pay: what was measured goes before what the fit predicts."""
    plans = [row for row in rows if row.variant == "relocation_plan" and row.metrics["rows"]]
    if not plans:
        return
    predicted = any(row.metrics["pays"] for row in plans)
    visible = whole is not None and whole.is_visible and whole.value > 1
    said = {
        (True, True): "pays by the fit, and a whole step shows a cost to win back",
        (True, False): "is not shown to pay: the fit predicts a gain, no whole step shows a cost to win back",
        (
            False,
            True,
        ): "is not shown to pay: a whole step is slower on the worn pool, the fit predicts no gain",
        (False, False): "does not pay: neither the fit nor a whole step shows a cost to win back",
    }
    yield f"Moving rows (Tier 1) {said[predicted, visible]}."


def _cost(derived: dict[str, Row]) -> Iterable[str]:
    fit = derived.get("regression")
    if fit is None:
        return
    base, effect, noise = (number(fit, name) for name in ("base_us", "effect_us", "noise_us"))
    low, high = number(fit, "effect_low_us"), number(fit, "effect_high_us")
    yield (
        f"Derived by a fit over {fit.metrics['layouts']} timed layouts of {fit.axes['context']} tokens"
        f" ({fit.axes['kernel']}): the most scattered one takes {effect:+.1f} µs ({effect / base:+.1%}; 95 %"
        f" interval {low:+.1f} to {high:+.1f}) over a contiguous one of {base:.1f} µs (p10); one layout"
        f" measured again differs by {noise:.1f} µs ({noise / base:.1%})."
    )
    slopes = {name: [number(fit, name + end) for end in ("", "_low", "_high")] for name in SLOPES}
    gap, step = ("{:.0f} ns ({:.0f} to {:.0f})".format(*slopes[name]) for name in SLOPES)
    yield f"By the same fit one gap costs {gap}, a backward step on top {step}."
    slowdown = 1 + max(high, 0.0) / base
    yield (
        f"For scatter alone to bring a kernel at the memory limit down to {STORY_DRAM_UTIL:.0%} of it, it"
        f" would have to take {1 / STORY_DRAM_UTIL:.0f} times as long; the upper end of the interval is"
        f" {slowdown:.2f} times: it {'cannot' if slowdown < 1 / STORY_DRAM_UTIL else 'could'} be the cause."
    )


def _wear(rows: list[Row]) -> Iterable[str]:
    aged = [row for row in rows if "age" in row.axes]
    if not aged:
        return
    last = max(float(row.axes["age"] or 0) for row in aged)
    oldest = {row.variant: row for row in aged if row.axes["age"] == last}
    parts = [f"{name} {_rates(row)}" for name, row in oldest.items()]
    yield (
        f"After {last:g} trips around the pool, gaps / backward steps between neighbouring tokens of all"
        f" requests: {', '.join(parts)}."
    )
    plain, sorting = oldest.get("fifo"), oldest.get("need_sort")
    if plain and sorting:
        yield _sorting(plain, sorting)
        yield from _before_first_wrap(aged)


def _sorting(plain: Row, sorting: Row) -> str:
    """What sorting removes and what it prevents."""
    before, after = number(plain, "pool_descent_rate"), number(sorting, "pool_descent_rate")
    removed = f"{1 - after / before:.0%} of the default's backward steps" if before else "no backward step"
    trips, held = number(sorting, "wraps"), number(sorting, "occupancy")
    following = [number(row, "next_gap_rate") for row in (plain, sorting)]
    gaps = [number(row, "pool_gap_rate") for row in (plain, sorting)]
    return (
        f"need_sort sorted {sorting.metrics['sorts']} times in {trips:.1f} trips (each time the slots free at"
        f" the last sort were used up; {held:.0%} of the pool is held) and removed {removed}. It moves no"
        f" row, so it closes no gap; it hands out free neighbours together again: {following[0]:.1%} of the"
        f" default's next slots do not follow their predecessor, {following[1]:.1%} of the sorted ones. Live"
        f" requests have {gaps[0]:.1%} and {gaps[1]:.1%} gaps."
    )


def _rates(row: Row) -> str:
    return f"{number(row, 'pool_gap_rate'):.1%} / {number(row, 'pool_descent_rate'):.2%}"


def _before_first_wrap(aged: list[Row]) -> Iterable[str]:
    young = {(row.variant, row.axes["age"]): row for row in aged if number(row, "wraps") < 1}
    for (variant, age), row in young.items():
        other = young.get(("need_sort", age))
        if variant == "fifo" and other:
            is_same = all(row.metrics[name] == other.metrics[name] for name in ("strip", "runs", "span"))
            yield (
                f"At {number(row, 'wraps'):.2f} trips the default and need_sort hold"
                f" {'the same' if is_same else 'different'} slots, with {number(row, 'pool_gap_rate'):.1%}"
                " gaps."
            )


def _tiers(rows: list[Row], derived: dict[str, Row]) -> Iterable[str]:
    timed = {str(row.axes["layout"]): row.timing for row in rows if row.variant == "tiers" and row.timing}
    if "contiguous" in timed:
        parts = [
            f"{name} {t.median_us:.1f} µs ({t.p10_us:.1f} to {t.p90_us:.1f})" for name, t in timed.items()
        ]
        yield f"Measured, one attention call, in turns, median (p10 to p90): {', '.join(parts)}."
    moved = compare_tiers(rows)
    if moved is not None:
        word = "faster" if moved.high < 1 else "slower" if moved.low > 1 else "not told apart in time"
        yield f"Measured: after relocation the call is {word}, {moved.words()} against the worn pool."
    step = derived.get("attention_of_a_step")
    if step is not None:
        parts = [_extra(step, name) for name in step.metrics if name.startswith("extra_us_")]
        yield (
            f"Derived, not measured: {step.metrics['model_layers']} times one layer, attention of a step"
            f" takes {number(step, 'attention_us') / 1e3:.3g} ms on contiguous slots; {', '.join(parts)}."
        )
    for row in rows:
        if row.variant == "relocation_plan":
            yield (
                f"Tier 1, round {row.axes['round']}: {row.metrics['rows']} rows of {row.metrics['requests']}"
                f" requests, gaps {row.metrics['gaps_before']} to {row.metrics['gaps_after']}. Derived, not"
                f" measured: {row.metrics['verdict']}."
            )


def compare_tiers(rows: list[Row]) -> Ratio | None:
    """One attention call on relocated slots over the same on the worn pool's, measured."""
    timed = {row.axes["layout"]: row.timing for row in rows if row.variant == "tiers" and row.timing}
    if "relocated:fifo" not in timed or "churned:fifo" not in timed:
        return None
    return compare_timings(timed["relocated:fifo"].samples, timed["churned:fifo"].samples)


def _extra(step: Row, name: str) -> str:
    layout = name.removeprefix("extra_us_")
    low, high = (step.metrics.get(f"extra_{end}_us_{layout}") for end in ("low", "high"))
    interval = f" ({low / 1e3:+.3g} to {high / 1e3:+.3g})" if low is not None and high is not None else ""  # type: ignore[operator]
    return f"{layout} {number(step, name) / 1e3:+.3g} ms{interval}"


def _copy(rows: list[Row]) -> Iterable[str]:
    for row in rows:
        if row.variant == "copy_rows" and row.timing:
            where = "larger than the cache" if row.metrics.get("beyond_cache") else "that may stay in a cache"
            yield (
                f"The relocation copy moves {row.axes['rows']} rows of {row.axes['pool_layers']} layers at"
                f" {number(row, 'copy_gbps'):.1f} GB/s, read plus written; a plain copy of the same bytes,"
                f" both on data {where}, reaches {number(row, 'device_copy_gbps'):.1f} GB/s"
                f" ({number(row, 'share_of_device_copy'):.0%})."
            )
