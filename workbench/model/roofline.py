"""Projected step times: bytes and flops of a rank over a target's rates. Not measured anywhere."""

from dataclasses import dataclass

from workbench.model.config import DrafterConfig, TargetConfig
from workbench.model.presets import rank_config, rank_drafter, step_reads
from workbench.shapes import VerifyShape
from workbench.targets import HardwareTarget


@dataclass(frozen=True)
class StepFloor:
    """Least time of one verify step on one rank, in parts that cannot overlap on the critical path."""

    weights_us: float
    attention_us: float
    drafter_us: float
    collectives_us: float

    @property
    def total_us(self) -> float:
        return self.weights_us + self.attention_us + self.drafter_us + self.collectives_us


def step_floor(
    model: TargetConfig,
    hardware: HardwareTarget,
    *,
    context: int,
    bs: int = 1,
    rows: int = 8,
    ranks: int = 8,
    expert_bits: float = 16.0,
    drafter: DrafterConfig | None = None,
) -> StepFloor:
    """Floor of one step of `bs` requests with `rows` verify rows each, at `context` tokens per request."""
    rank, tokens = rank_config(model, ranks), bs * rows
    reads = step_reads(rank, tokens=tokens, kv_tokens=0, expert_bits=expert_bits)
    weights_us = reads.total / (hardware.dram_gbps * 1e3)
    shape = VerifyShape(bs, rank.num_heads, rows, context + rows, "bf16", rank.latent, rank.rope)
    drafter_us = 0.0
    if drafter:
        own = rank_drafter(drafter, ranks)
        drafter_bytes = own.weight_bytes + bs * context * own.kv_bytes_per_token
        drafter_us = drafter_bytes / (hardware.dram_gbps * 1e3)
    return StepFloor(
        weights_us,
        model.num_layers * shape.floor_us(hardware),
        drafter_us,
        collective_us(model, hardware, tokens, ranks),
    )


def collective_us(model: TargetConfig, hardware: HardwareTarget, tokens: int, ranks: int) -> float:
    """Ring all-reduce of [tokens, hidden] bf16 twice per layer at the link's rate; no latency counted."""
    if ranks == 1 or not hardware.interconnect_gbps:
        return 0.0
    moved = 2 * (ranks - 1) / ranks * tokens * model.hidden_size * 2
    return 2 * model.num_layers * moved / (hardware.interconnect_gbps * 1e3)
