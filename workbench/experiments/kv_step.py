"""Whole decode steps on a fresh and on worn pools: the same tokens, from slots somewhere else."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.kv.fragmentation import LayoutScore, layout_score
from workbench.measure.statistics import is_stable, quantile
from workbench.rows import Origin, Row, RowStatus, Scalar, Timing
from workbench.targets import HardwareTarget

if TYPE_CHECKING:
    from workbench.kv.churn import Churn
    from workbench.kv.policies import SlotPolicy

BUDGET = 8
WARM_STEPS = 2  # of each decode, left out
ROUNDS = 3  # decodes per pool, every second round in reverse order


@dataclass
class _PoolCase:
    """One pool, a decoder on it and what its decodes gave."""

    layout: str
    axes: dict[str, Scalar]
    decoder: Any
    score: LayoutScore
    samples: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)


def measure_steps(
    worn: "dict[str, Churn]", target: HardwareTarget, pool_slots: int, prompt_tokens: int, new_tokens: int
) -> list[Row]:
    """A row per pool: fresh twice (their difference is noise), worn by each page_size=1 policy; in turns."""
    from workbench.kv.allocator import TokenKVAllocator
    from workbench.model.weights import load_pair

    pair = load_pair("tiny", device="cuda" if target.backend == "cuda" else "cpu")
    pools: list[tuple[str, dict[str, Scalar], SlotPolicy]] = [
        ("contiguous", {"repeat": 0}, TokenKVAllocator(pool_slots)),
        *((f"churned:{name}", {}, worn[name].allocator) for name in ("fifo", "need_sort") if name in worn),
        ("contiguous", {"repeat": 1}, TokenKVAllocator(pool_slots)),
    ]
    shared: dict[str, Scalar] = {"prompt_tokens": prompt_tokens, "pool_slots": pool_slots}
    cases = [
        _PoolCase(
            layout, {"layout": layout} | shared | axes,
            _make_decoder(pair, target, allocator, prompt_tokens + new_tokens),
            _preview(allocator, prompt_tokens),
        )
        for layout, axes, allocator in pools
    ]  # fmt: skip
    for turn in range(ROUNDS):
        for case in cases[:: -1 if turn % 2 else 1]:
            _decode(case, prompt_tokens, new_tokens)
    return [_row(case, cases[0].outputs[0], target) for case in cases]


def _preview(allocator: Any, tokens: int) -> LayoutScore:
    """Score of the slots that the prompt will get."""
    state = allocator.backup_state()
    score = layout_score(allocator.alloc(tokens))
    allocator.restore_state(state)
    return score


def _make_decoder(pair: Any, target: HardwareTarget, allocator: Any, tokens: int) -> Any:
    from workbench.decode.loop import SpeculativeDecoder

    return SpeculativeDecoder(
        *pair, mode="step_graph" if target.backend == "cuda" else "eager", budget=BUDGET, max_batch=1,
        max_context=tokens + 64, allocator=allocator,
    )  # fmt: skip


def _decode(case: _PoolCase, prompt_tokens: int, new_tokens: int) -> None:
    """One decode from the pool as it was worn, which it is again behind it."""
    allocator = case.decoder.allocator
    state = allocator.backup_state()
    prompt = [32 + (7 * i) % 90 for i in range(prompt_tokens)]
    result = case.decoder.generate([prompt], max_new_tokens=new_tokens)
    allocator.restore_state(state)
    case.samples += [record.step_us for record in result.ledger.records[WARM_STEPS:]]
    case.outputs.append(result.tokens[0])


def _row(case: _PoolCase, expected: list[int], target: HardwareTarget) -> Row:
    samples, axes = tuple(case.samples), case.axes
    is_same = all(output == expected for output in case.outputs)
    timed = Timing(
        mode="graph" if target.backend == "cuda" else "host", l2="n/a", n=len(samples),
        median_us=quantile(samples, 0.5), p10_us=quantile(samples, 0.1), p90_us=quantile(samples, 0.9),
        samples=samples, stable=is_stable(samples),
    )  # fmt: skip
    tail = f"-repeat{axes['repeat']}" if "repeat" in axes else ""
    return Row(
        case_id=f"whole_step-{axes['layout']}{tail}", experiment="kv_fragmentation", variant="whole_step",
        target=target.name, origin=Origin.MEASURED,
        status=RowStatus.PASSED if is_same else RowStatus.INCORRECT,
        reason="" if is_same else "tokens differ from those of a fresh pool", axes=axes,
        timing=timed if is_same else None, metrics=case.score.metrics(),
        repro=f"workbench run 30_kv_fragmentation --target {target.name}",
    )  # fmt: skip
