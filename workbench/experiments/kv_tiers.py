"""Tier 0 (sort the free list) and Tier 1 (move the rows) on a worn pool, and what copying must win back."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.experiments.kv_bench import LayoutBench, LayoutCase
from workbench.measure.statistics import median_interval
from workbench.rows import Origin, Row, RowStatus, Scalar

if TYPE_CHECKING:
    import torch

    from workbench.kv.churn import Churn
    from workbench.kv.relocation_plan import RelocationPlan
    from workbench.kv.scatter_cost import ScatterCost

TIER_0, TIER_1 = "need_sort", "fifo"
MOST_ROUNDS = 3  # a worn pool's free runs are short: each round leaves longer ones


@dataclass(frozen=True)
class TierOptions:
    """What a plan is priced with, and how the tiers are timed."""

    model_layers: int
    remaining_steps: int
    samples: int
    budget_s: float
    copy_gbps: float | None = None  # measured; None: the target's DRAM rate


def cost_row(cost: "ScatterCost", bench: LayoutBench) -> Row:
    """The regression as a derived row."""
    metrics: dict[str, Scalar] = {
        "base_us": cost.base_us,
        "ns_per_gap": cost.us_per_gap * 1e3,
        "ns_per_gap_low": cost.gap_interval_us[0] * 1e3,
        "ns_per_gap_high": cost.gap_interval_us[1] * 1e3,
        "ns_per_descent": cost.us_per_descent * 1e3,
        "ns_per_descent_low": cost.descent_interval_us[0] * 1e3,
        "ns_per_descent_high": cost.descent_interval_us[1] * 1e3,
        "effect_us": cost.effect_us,
        "effect_low_us": cost.effect_interval_us[0],
        "effect_high_us": cost.effect_interval_us[1],
        "noise_us": cost.noise_us,
        "above_noise": cost.above_noise,
        "layouts": cost.layouts,
    }
    return _derived("regression", bench, metrics)


def compare_tiers(
    bench: LayoutBench, worn: "dict[str, Churn]", cost: "ScatterCost", options: TierOptions
) -> list[Row]:
    """Relocate the worn default pool, check that the result is the same, then time all layouts together."""
    import torch

    from workbench.kv.relocation import relocate

    context, churn = bench.shape.max_kv_len, worn[TIER_1]
    requests = {request.id: torch.from_numpy(request.held.copy()) for request in churn.running}
    longest = max(requests, key=lambda key: len(requests[key]))
    before = requests[longest][-context:]
    bench.fill(before)
    plans: list[RelocationPlan] = []
    while len(plans) < MOST_ROUNDS:
        plans.append(price_plan(bench, churn, requests, cost, options))
        if not relocate(bench.pool, plans[-1]).done:
            break
    after = LayoutCase("relocated:fifo", requests[longest][-context:], "tiers", {"tier": 1})
    bench.check(after)
    if after.reason:
        raise ValueError(f"relocation changed the result: {after.reason}")
    sorted_slots = worn[TIER_0].snapshot().longest()[-context:]
    cases = [
        LayoutCase("contiguous", torch.arange(1, context + 1), "tiers"),
        LayoutCase("churned:fifo", before, "tiers"),
        LayoutCase("churned:need_sort", sorted_slots, "tiers", {"tier": 0}),
        after,
    ]
    rows = bench.measure(cases, n=options.samples, budget_s=options.budget_s)
    plan_rows = [plan_row(plan, number, bench) for number, plan in enumerate(plans, start=1)]
    return [*rows, step_row(cases, bench, options), *plan_rows]


def price_plan(
    bench: LayoutBench,
    churn: "Churn",
    requests: "dict[int, torch.Tensor]",
    cost: "ScatterCost",
    options: TierOptions,
) -> "RelocationPlan":
    """A plan for the whole model: `model_layers` layers of the bench's rows."""
    from workbench.kv.holders import SlotMapping
    from workbench.kv.relocation_plan import plan_relocation

    return plan_relocation(
        requests,
        churn.allocator,
        [SlotMapping("request slots", requests)],
        token_bytes=options.model_layers * bench.pool.row_bytes,
        layers=options.model_layers,
        target=bench.target,
        cost=cost,
        remaining_steps=options.remaining_steps,
        copy_gbps=options.copy_gbps,
    )


def step_row(cases: list[LayoutCase], bench: LayoutBench, options: TierOptions) -> Row:
    """What each layout adds to the attention of a model's step: layers x (median - contiguous median)."""
    timings = {case.name: case.timing for case in cases if case.timing}
    layers, base = options.model_layers, timings["contiguous"]
    metrics: dict[str, Scalar] = {"attention_us": layers * base.median_us, "model_layers": layers}
    around = median_interval(base.samples)
    for name, timing in timings.items():
        if name != "contiguous":
            own = median_interval(timing.samples)
            key = name.replace(":", "_")
            metrics |= {
                f"extra_us_{key}": layers * (timing.median_us - base.median_us),
                f"extra_low_us_{key}": layers * (own[0] - around[1]) if own and around else None,
                f"extra_high_us_{key}": layers * (own[1] - around[0]) if own and around else None,
            }
    return _derived("attention_of_a_step", bench, metrics)


def plan_row(plan: "RelocationPlan", number: int, bench: LayoutBench) -> Row:
    """One round's plan and its verdict as a derived row."""
    finite = plan.break_even_steps if plan.gain_us_per_step > 0 else None
    metrics: dict[str, Scalar] = {
        "rows": plan.rows,
        "requests": len(plan.requests),
        "copy_us": plan.copy_us,
        "gain_us_per_step": plan.gain_us_per_step,
        "gain_low_us": plan.gain_interval_us[0] if plan.gain_interval_us else None,
        "gain_high_us": plan.gain_interval_us[1] if plan.gain_interval_us else None,
        "break_even_steps": finite,
        "remaining_steps": plan.remaining_steps,
        "pays": plan.pays,
        "verdict": plan.reason,
        "gaps_before": plan.before.gaps,
        "gaps_after": plan.after.gaps,
        "descents_before": plan.before.descents,
        "descents_after": plan.after.descents,
    }
    return _derived("relocation_plan", bench, metrics, {"round": number})


def _derived(
    name: str, bench: LayoutBench, metrics: dict[str, Scalar], axes: dict[str, Scalar] | None = None
) -> Row:
    axes = axes or {}
    return Row(
        case_id=name + "".join(f"-{key}{value}" for key, value in axes.items()),
        experiment="kv_fragmentation",
        variant=name,
        target=bench.target.name,
        origin=Origin.DERIVED,
        status=RowStatus.PASSED,
        axes=bench.axes() | axes,
        metrics=metrics,
    )
