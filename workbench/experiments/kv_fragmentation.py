"""Notebook 30: how scattered slots get under each policy, what that costs, and whether moving rows pays."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from workbench import targets
from workbench.experiments.kv_bench import LayoutBench, LayoutCase, measure_copy
from workbench.experiments.kv_findings import findings
from workbench.experiments.kv_step import measure_steps
from workbench.experiments.kv_tiers import TIER_0, TIER_1, TierOptions, compare_tiers, cost_row
from workbench.rows import Row, Scalar
from workbench.shapes import VerifyShape
from workbench.targets import HardwareTarget

if TYPE_CHECKING:
    from workbench.kv.churn import Churn, Snapshot
    from workbench.kv.scatter_cost import ScatterCost

__all__ = ["Params", "findings", "run"]

POLICIES = ("fifo", "need_sort", "sorted_always", "best_fit_runs", "paged16", "paged64")
SYNTHETIC = ("reversed", "sorted", "random", "runs:4", "runs:16", "runs:64", "interleaved:8")
COLUMNS = (
    "case_id", "status", "axis_layout", "mode", "l2", "n", "median_us", "p10_us", "p90_us", "metric_gap_rate",
    "metric_descent_rate", "metric_mean_run", "metric_span_ratio", "metric_pages_2mb", "metric_wraps",
)  # fmt: skip
AGAIN = 3  # the same contiguous layout this many times: what differs between them is noise
STRIP_SLOTS, STRIP_LETTERS = 4096, "abcdefghijklmnopqrstuvwxyz"


class Params(BaseModel):
    """Parameters of notebook 30; 0 and "auto" choose by target."""

    model_config = ConfigDict(extra="forbid")
    target: str = Field("cpu", description="hardware target, one of data/targets")
    seed: int = Field(0, description="seed of requests, rows and sampling order")
    workload: str = Field(
        "auto", description="preset of data/workloads; auto: long_decode, on cpu its miniature"
    )
    policies: str = Field("all", description="allocation policies to age, with commas between")
    ages: list[float] = Field([0.5, 1.5, 4.0], description="trips around the pool at which layouts are taken")
    pool_slots: int = Field(0, ge=0, description="slots of the pool; 0: 32,768 on cpu, 400,000 on a GPU")
    context: int = Field(0, ge=0, description="tokens one call attends to; 0: 2,048 on cpu, 46,080 on a GPU")
    heads: int = Field(8, ge=1, description="query heads of one rank")
    q_len: int = Field(0, ge=0, description="tree rows of one request; 0: 2 on cpu, 16 on a GPU")
    variant: str = Field("auto", description="verify-attention variant")
    model_layers: int = Field(61, ge=1, description="layers of the model that a relocation must move")
    remaining_steps: int = Field(2000, ge=0, description="decode steps in which a relocation can pay off")
    samples: int = Field(15, ge=3, description="samples per layout")
    budget_s: float = Field(6.0, gt=0, description="most seconds of sampling per round")

    def resolved(self, target: HardwareTarget) -> "Params":
        """With the target's sizes in place of 0 and auto."""
        on_cpu = target.backend == "cpu"
        return self.model_copy(
            update={
                "workload": ("long_decode_small" if on_cpu else "long_decode")
                if self.workload == "auto"
                else self.workload,
                "pool_slots": self.pool_slots or (32_768 if on_cpu else 400_000),
                "policies": ",".join(POLICIES) if self.policies == "all" else self.policies,
                "context": self.context or (2_048 if on_cpu else 46_080),
                "q_len": self.q_len or (2 if on_cpu else 16),
            }
        )


def run(params: Params, step: Callable[[str], None] = print) -> list[Row]:
    """Rows of every aged and made layout, the regression, both tiers and the copy."""
    target = targets.load(params.target)
    targets.require_hardware(target)
    if target.backend == "cpu":
        with one_thread():
            return _run(params.resolved(target), target, step)
    return _run(params.resolved(target), target, step)


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a shared machine would be all that is measured."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run(params: Params, target: HardwareTarget, step: Callable[[str], None]) -> list[Row]:
    step(f"age {params.policies} to {max(params.ages):g} wraps of {params.pool_slots} slots")
    worn, aged = age_policies(params)
    dtype = "fp32" if target.backend == "cpu" else "bf16"
    shape = VerifyShape(1, params.heads, params.q_len, params.context, dtype, mask_layout="causal")
    bench = LayoutBench(shape, target, params.pool_slots, variant=params.variant, seed=params.seed)
    cases = [*synthetic_cases(params), *aged]
    step(f"time {len(cases)} layouts of {params.context} tokens with {bench.plan.variant}")
    rows = bench.measure(cases, n=params.samples, budget_s=params.budget_s)
    step("regress latency on gaps and backward steps")
    cost = fit_cost(cases)
    if cost is None:
        return rows
    rows.append(cost_row(cost, bench))
    step("time whole decode steps of the tiny pair on fresh and worn pools")
    prompt, new = (1_400, 256) if target.backend == "cuda" else (512, 24)
    rows += measure_steps(worn, target, params.pool_slots, prompt, new)
    step("time the copy of scattered rows")
    copy = measure_copy(bench.pool, params.pool_slots // 8, target, n=params.samples, seed=params.seed)
    if TIER_0 in worn and TIER_1 in worn:
        step("relocate the worn default pool and time both tiers together")
        rate = float(copy.metrics["copy_gbps"] or 0) if copy.timing else None
        options = TierOptions(
            params.model_layers, params.remaining_steps, 2 * params.samples, params.budget_s / 2, rate
        )
        rows += compare_tiers(bench, worn, cost, options)
    return [*rows, copy]


def age_policies(params: Params) -> "tuple[dict[str, Churn], list[LayoutCase]]":
    """Each policy's pool worn by the same requests, and the layout of its longest request at each age."""
    from workbench.kv import workload
    from workbench.kv.churn import Churn, age_pool
    from workbench.kv.policies import policy

    load, worn, cases = workload.load(params.workload), {}, []
    for name in map(str.strip, params.policies.split(",")):
        worn[name] = Churn(policy(name), load, params.pool_slots, params.seed)
        for age in sorted(params.ages):
            snapshot = age_pool(worn[name], age, params.context)
            case = _aged_case(snapshot, age, params.context)
            case.metrics |= {"next_gap_rate": next_gap_rate(worn[name].allocator, params.context)}
            cases.append(case)
    return worn, cases


def next_gap_rate(allocator: object, slots: int) -> float | None:
    """Gaps within the next `slots` that a free list would hand out; None for a policy without one list."""
    from workbench.kv.allocator import TokenKVAllocator
    from workbench.kv.fragmentation import layout_score

    if not isinstance(allocator, TokenKVAllocator):
        return None
    state = allocator.backup_state()
    taken = allocator.alloc(min(slots, allocator.available_size()))
    allocator.restore_state(state)
    return None if taken is None else layout_score(taken).gap_rate


def _aged_case(snapshot: "Snapshot", age: float, context: int) -> LayoutCase:
    everyone = snapshot.score()
    metrics: dict[str, Scalar] = {
        "wraps": snapshot.wraps,
        "occupancy": snapshot.occupancy,
        "sorts": snapshot.sorts,
        "retractions": snapshot.retractions,
        "moved_rows": snapshot.moved_rows,
        "requests": len(snapshot.request_ids),
        "pool_gap_rate": everyone.gap_rate,
        "pool_descent_rate": everyone.descent_rate,
        "strip": paint_strip(snapshot),
    }
    return LayoutCase(
        name=f"churned:{snapshot.policy}",
        slots=snapshot.longest()[-context:],
        variant=snapshot.policy,
        axes={"age": age, "workload": snapshot.workload},
        metrics=metrics,
    )


def paint_strip(snapshot: "Snapshot", slots: int = STRIP_SLOTS) -> str:
    """One letter per slot from the middle of the pool: who owns it; "." is free."""
    owners = snapshot.owners()
    start = max(1, (len(owners) - slots) // 2)
    letters = {request: STRIP_LETTERS[i % 26] for i, request in enumerate(snapshot.request_ids)}
    return "".join(letters.get(owner, ".") for owner in owners[start : start + slots].tolist())


def synthetic_cases(params: Params) -> list[LayoutCase]:
    """Made layouts; contiguous several times, and once at the far end of the pool."""
    from workbench.kv.fragmentation import make_layout

    context, size = params.context, params.pool_slots
    cases = [
        LayoutCase("contiguous", make_layout("contiguous", context, size), "synthetic", {"repeat": repeat})
        for repeat in range(AGAIN)
    ]
    far = make_layout("contiguous", context, size, first=size - context + 1)
    cases.append(LayoutCase("contiguous", far, "synthetic", {"place": "far"}))
    for name in SYNTHETIC:
        if not name.startswith("interleaved") or context * 8 <= size:
            slots = make_layout(name, context, size, seed=params.seed)
            cases.append(LayoutCase(name, slots, "synthetic"))
    return cases


def fit_cost(cases: Iterable[LayoutCase]) -> "ScatterCost | None":
    """The regression over all timed layouts; None when fewer than six were right.

    It takes each layout's p10: whatever else runs on the machine only ever adds time.
    """
    from workbench.kv.scatter_cost import fit_scatter_cost

    timed = [(case, case.timing.p10_us) for case in cases if case.timing is not None]
    again = [p10_us for case, p10_us in timed if "repeat" in case.axes]
    if len(timed) < 6 or len(again) < 2:
        return None
    scores = [case.score() for case, _ in timed]
    return fit_scatter_cost(scores, [p10_us for _, p10_us in timed], noise_us=max(again) - min(again))
