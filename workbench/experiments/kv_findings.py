"""Sentences of notebook 30, every number from a row."""

from collections.abc import Iterable

from workbench.rows import Origin, Row

STORY_DRAM_UTIL = 0.02  # what the decode that started the question was seen at


def findings(rows: list[Row]) -> list[str]:
    """The verdict first, then how it came about."""
    by_variant = {row.variant: row for row in rows if row.origin is Origin.DERIVED}
    told = [*_cost(rows, by_variant), *_wear(rows), *_tiers(rows, by_variant), *_copy(rows)]
    wrong = [row for row in rows if row.reason]
    return told + [f"{row.case_id} is left out: {row.reason}." for row in wrong]


def number(row: Row, name: str) -> float:
    """A metric as a float. ValueError names one that is missing."""
    value = row.metrics.get(name)
    if not isinstance(value, int | float):
        raise ValueError(f"row {row.case_id!r} has no number {name!r}: run the experiment again")
    return float(value)


def _cost(rows: list[Row], derived: dict[str, Row]) -> Iterable[str]:
    fit = derived.get("regression")
    if fit is None:
        yield "Too few correct layouts for a regression: nothing can be said about the cost of scatter."
        return
    base, effect, noise = (number(fit, name) for name in ("base_us", "effect_us", "noise_us"))
    low, high = number(fit, "effect_low_us"), number(fit, "effect_high_us")
    verdict = "Scatter costs time" if fit.metrics["above_noise"] else "No cost of scatter above the noise"
    yield (
        f"{verdict} on {fit.target}: by the fit over {fit.metrics['layouts']} layouts of"
        f" {fit.axes['context']} tokens ({fit.axes['kernel']}) the most scattered one takes {effect:+.1f} µs"
        f" ({effect / base:+.1%}; 95 % interval {low:+.1f} to {high:+.1f}) over a contiguous one of"
        f" {base:.1f} µs (p10); one layout measured again differs by {noise:.1f} µs ({noise / base:.1%})."
    )
    yield (
        f"One gap costs {number(fit, 'ns_per_gap'):.2f} ns ({number(fit, 'ns_per_gap_low'):.2f} to"
        f" {number(fit, 'ns_per_gap_high'):.2f}), a backward step {number(fit, 'ns_per_descent'):.2f} ns more"
        f" ({number(fit, 'ns_per_descent_low'):.2f} to {number(fit, 'ns_per_descent_high'):.2f})."
    )
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
        before, after = number(plain, "pool_descent_rate"), number(sorting, "pool_descent_rate")
        removed = (
            f"{1 - after / before:.0%} of the default's backward steps" if before else "no backward step"
        )
        yield (
            f"need_sort sorted {sorting.metrics['sorts']} times in {number(sorting, 'wraps'):.1f} trips and"
            f" removed {removed}; gaps went from {number(plain, 'pool_gap_rate'):.1%} to"
            f" {number(sorting, 'pool_gap_rate'):.1%}."
        )
        yield from _before_first_wrap(aged)


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
        yield f"Timed together, median (p10 to p90): {', '.join(parts)}."
    step = derived.get("attention_of_a_step")
    if step is not None:
        names = [name for name in step.metrics if name.startswith("extra_us_")]
        parts = [f"{name.removeprefix('extra_us_')} {number(step, name):+.0f} µs" for name in names]
        yield (
            f"Over {step.metrics['model_layers']} layers (derived) attention takes"
            f" {number(step, 'attention_us'):.0f} µs on contiguous slots; {', '.join(parts)}."
        )
    whole = [row for row in rows if row.variant == "whole_step" and row.timing]
    if whole:
        parts = [f"{r.axes['layout']} {r.timing.median_us:.0f} µs" for r in whole if r.timing]
        yield (
            f"Whole decode steps of the tiny pair at {whole[0].axes['prompt_tokens']} tokens, the same tokens"
            f" on every pool, median: {', '.join(parts)}; the two contiguous ones differ by noise alone."
        )
    for row in rows:
        if row.variant == "relocation_plan":
            yield (
                f"Tier 1, round {row.axes['round']}: {row.metrics['rows']} rows of {row.metrics['requests']}"
                f" requests, gaps {row.metrics['gaps_before']} to {row.metrics['gaps_after']};"
                f" {row.metrics['verdict']}."
            )


def _copy(rows: list[Row]) -> Iterable[str]:
    for row in rows:
        if row.variant == "copy_rows" and row.timing:
            yield (
                f"The relocation copy moves {row.axes['rows']} rows of {row.axes['pool_layers']} layers at"
                f" {number(row, 'copy_gbps'):.1f} GB/s, {number(row, 'share_of_device_copy'):.0%} of the rate"
                " of a plain copy."
            )
