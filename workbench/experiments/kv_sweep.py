"""`workbench bench kv`: allocator micro-latency, then layouts x context x pool size, then the copy."""

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass

from workbench.experiments.kv_bench import SPARE_SLOTS, LayoutBench, LayoutCase, measure_copy
from workbench.measure import timing
from workbench.measure.statistics import is_stable, quantile
from workbench.rows import Origin, Row, RowStatus, Timing
from workbench.shapes import VerifyShape
from workbench.targets import HardwareTarget

STEP_SLOTS = 17  # a verify step of budget 16
SIZES = (32_768, 1_000_000)
TURNS = 3000
COPY_BYTES = 2_000_000_000  # most that one timed copy reads


@dataclass(frozen=True)
class SweepOptions:
    """What every point of the sweep shares."""

    layouts: list[str]
    heads: int
    q_len: int
    variant: str
    samples: int
    seed: int


def allocator_rows(target: HardwareTarget) -> list[Row]:
    """Each policy's alloc plus free of one verify step, on pools of two sizes, an eighth of each held."""
    from workbench.kv.policies import policies

    return [_allocator_row(policy.name, size, target) for policy in policies() for size in SIZES]


def _allocator_row(name: str, size: int, target: HardwareTarget) -> Row:
    samples = tuple(_step_latencies_us(name, size - size % 64))
    median_us = quantile(samples, 0.5)
    timed = Timing(
        mode="host", l2="n/a", n=len(samples), median_us=median_us, p10_us=quantile(samples, 0.1),
        p90_us=quantile(samples, 0.9), stable=is_stable(samples[:500]),
    )  # fmt: skip
    return Row(
        case_id=f"allocator-{name}-{size}", experiment="kv_fragmentation", variant=name, target=target.name,
        origin=Origin.MEASURED, status=RowStatus.PASSED, axes={"slots": size, "step_slots": STEP_SLOTS},
        timing=timed, metrics={"us_per_slot": median_us / STEP_SLOTS},
        repro=f"workbench bench kv --target {target.name}",
    )  # fmt: skip


def _step_latencies_us(name: str, size: int) -> Iterator[float]:
    """Host time of alloc(17), then free of an older step's slots, turn by turn."""
    from workbench.kv.policies import policy

    allocator = policy(name).make(size)
    held = [allocator.alloc(STEP_SLOTS) for _ in range(size // STEP_SLOTS // 8)]
    for turn in range(TURNS):
        old = held[turn * 7919 % len(held)]
        if old is None:
            raise ValueError(f"policy {name!r} refused a step in a nearly empty pool of {size} slots")
        start = time.perf_counter_ns()
        slots = allocator.alloc(STEP_SLOTS)
        allocator.free(old)
        yield (time.perf_counter_ns() - start) / 1e3
        held[turn * 7919 % len(held)] = slots


def sweep_layouts(target: HardwareTarget, options: SweepOptions, pool_bytes: int, context: int) -> list[Row]:
    """Every layout at one context and pool size, timed together, then the copy in the same pool."""
    dtype = "fp32" if target.backend == "cpu" else "bf16"
    shape = VerifyShape(1, options.heads, options.q_len, context, dtype, mask_layout="causal")
    layers = timing.pools_needed(shape.bytes, target)
    row_bytes = shape.width * (4 if dtype == "fp32" else 2)
    slots = pool_bytes // (layers * row_bytes) - SPARE_SLOTS - 1
    axes = {"pool_gb": round(pool_bytes / 1e9, 3), "context": context}
    if slots < 2 * context or pool_bytes > 0.9 * target.memory_bytes:
        return [_skipped(target, axes, slots, context)]
    bench = LayoutBench(shape, target, slots, variant=options.variant, pool_layers=layers, seed=options.seed)
    cases = [_case(name, context, slots, options.seed) for name in options.layouts]
    rows = bench.measure(cases, n=options.samples, budget_s=20.0)
    copy_tokens = min(slots // 2, COPY_BYTES // bench.pool.token_bytes)
    rows.append(measure_copy(bench.pool, copy_tokens, target, n=options.samples, seed=options.seed))
    del bench, cases
    gc.collect()  # the next pool needs the room
    return rows


def _case(name: str, context: int, slots: int, seed: int) -> LayoutCase:
    from workbench.kv.fragmentation import make_layout

    layout, _, place = name.partition("@")
    if place not in ("", "far"):
        raise ValueError(f"layout {name!r}: only @far is known behind a layout")
    reach = context * int(layout.partition(":")[2]) if layout.startswith("interleaved") else context
    first = slots - reach + 1 if place else 1
    return LayoutCase(
        layout, make_layout(layout, context, slots, first=first, seed=seed), "synthetic",
        {"place": "far"} if place else {},
    )  # fmt: skip


def _skipped(target: HardwareTarget, axes: dict, slots: int, context: int) -> Row:
    return Row(
        case_id=f"layouts-{axes['pool_gb']}GB-{context}", experiment="kv_fragmentation", variant="synthetic",
        target=target.name, origin=Origin.MEASURED, status=RowStatus.SKIPPED, axes=axes,
        reason=f"{slots} slots per layer are too few for {context} tokens, or the pool exceeds the memory",
    )  # fmt: skip
