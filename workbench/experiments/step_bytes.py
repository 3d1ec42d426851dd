"""Bytes that one decode step has to read: this model's, and those of the real one it stands for. Derived."""

from typing import Any

from workbench.model.presets import PRESETS, StepReads, compare_reads, step_reads
from workbench.rows import Origin, Row, RowStatus
from workbench.targets import HardwareTarget

NAME = "eager_vs_graph"


def derive_reads(case: Any, models: tuple[Any, Any], target: HardwareTarget) -> list[Row]:
    """One DERIVED row of a StepCase on a preset, none for other models (they stand for nothing).

    Expected bytes of the verify pass under even routing: own_* and, for a preset with a real model, real_*:
    total, KV, experts, distinct experts per layer, and the time the target's memory needs for the total.
    """
    preset, (model, drafter) = PRESETS.get(case.model), models
    if preset is None:
        return []
    tokens, kv_tokens = case.bs * (case.budget + 1), case.bs * case.context
    metrics: dict[str, Any] = {"verify_tokens": tokens, "kv_tokens": kv_tokens}
    own = step_reads(model.config, tokens=tokens, kv_tokens=kv_tokens)
    metrics |= _named("own", own, target)
    if drafter is not None:
        metrics["own_drafter_bytes"] = float(drafter.config.weight_bytes)
    if preset.real is not None:
        real = step_reads(
            preset.real, tokens=tokens, kv_tokens=kv_tokens, expert_bits=preset.real_expert_bits
        )
        metrics |= _named("real", real, target)
        metrics |= {"real_model": preset.real.name, "left_out": "; ".join(preset.left_out)}
        metrics["comparison"] = compare_reads(preset, tokens=tokens, kv_tokens=kv_tokens)
    row = Row(
        case_id=f"{case.model}-ctx{case.context}-bs{case.bs}-b{case.budget}-reads", experiment=NAME,
        variant="step_reads", target=target.name, origin=Origin.DERIVED, status=RowStatus.PASSED,
        axes={
            "model": case.model, "ctx": case.context, "bs": case.bs, "budget": case.budget, "part": "reads",
        },
        bytes=round(own.total), metrics=metrics,
    )  # fmt: skip
    return [row]


def _named(whose: str, reads: StepReads, target: HardwareTarget) -> dict[str, float]:
    return {
        f"{whose}_bytes": reads.total,
        f"{whose}_kv_bytes": reads.kv,
        f"{whose}_expert_bytes": reads.experts,
        f"{whose}_distinct_experts": reads.distinct_experts,
        f"{whose}_memory_us": reads.total / (target.dram_gbps * 1e3),
    }
