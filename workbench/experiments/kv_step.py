"""Whole decode steps on a fresh and on worn pools: the same tokens, from slots somewhere else."""

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


def measure_steps(
    worn: "dict[str, Churn]", target: HardwareTarget, pool_slots: int, prompt_tokens: int, new_tokens: int
) -> list[Row]:
    """A row per pool: fresh, worn by each page_size=1 policy, and fresh again for the noise."""
    from workbench.kv.allocator import TokenKVAllocator
    from workbench.model.weights import load_pair

    pair = load_pair("tiny", device="cuda" if target.backend == "cuda" else "cpu")
    pools: list[tuple[str, dict[str, Scalar], SlotPolicy]] = [
        ("contiguous", {"repeat": 0}, TokenKVAllocator(pool_slots)),
        *((f"churned:{name}", {}, worn[name].allocator) for name in ("fifo", "need_sort") if name in worn),
        ("contiguous", {"repeat": 1}, TokenKVAllocator(pool_slots)),
    ]
    rows: list[Row] = []
    expected: list[int] | None = None
    for layout, axes, allocator in pools:
        score = _preview(allocator, prompt_tokens)
        result = _decode(pair, target, allocator, prompt_tokens, new_tokens)
        expected = expected or result.tokens[0]
        case: dict[str, Scalar] = {"layout": layout, "prompt_tokens": prompt_tokens, "pool_slots": pool_slots}
        rows.append(_row(result, result.tokens[0] == expected, score, target, case | axes))
    return rows


def _preview(allocator: Any, tokens: int) -> LayoutScore:
    """Score of the slots that the prompt will get."""
    state = allocator.backup_state()
    score = layout_score(allocator.alloc(tokens))
    allocator.restore_state(state)
    return score


def _decode(pair: Any, target: HardwareTarget, allocator: Any, prompt_tokens: int, new_tokens: int) -> Any:
    from workbench.decode.loop import SpeculativeDecoder

    prompt = [32 + (7 * i) % 90 for i in range(prompt_tokens)]
    decoder = SpeculativeDecoder(
        *pair, mode="step_graph" if target.backend == "cuda" else "eager", budget=BUDGET, max_batch=1,
        max_context=prompt_tokens + new_tokens + 64, allocator=allocator,
    )  # fmt: skip
    return decoder.generate([prompt], max_new_tokens=new_tokens)


def _row(
    result: Any, is_same: bool, score: LayoutScore, target: HardwareTarget, axes: dict[str, Scalar]
) -> Row:
    samples = tuple(record.step_us for record in result.ledger.records[WARM_STEPS:])
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
        timing=timed if is_same else None, metrics=score.metrics(),
        repro=f"workbench run 30_kv_fragmentation --target {target.name}",
    )  # fmt: skip
