"""The parts of a typical step: stages, what no stage claims, and the time between steps.

The parts are means over the middle half of the steps (by their own clock), so that one interrupted step does
not speak for all and the parts of a step still add up to it. The time between steps is the middle half of the
periods less that of the steps: the same statistic of two clocks, negative where steps overlap.
"""

from collections.abc import Sequence

import numpy as np

from workbench.measure.ledger import STAGES, Ledger


def typical_parts(ledger: Ledger, periods_us: Sequence[float]) -> dict[str, float]:
    """typical_step_us, typical_<stage>_us, typical_unattributed_us, typical_between_us; {} without steps."""
    if not ledger.records or not periods_us:
        return {}
    middle = [ledger.records[i] for i in middle_half([r.step_us for r in ledger.records])]
    step_us = float(np.mean([r.step_us for r in middle]))
    stages = {stage: float(np.mean([r.stages_us[stage] for r in middle])) for stage in STAGES}
    period_us = float(np.mean([periods_us[i] for i in middle_half(periods_us)]))
    return {
        "typical_step_us": step_us,
        **{f"typical_{stage}_us": us for stage, us in stages.items()},
        "typical_unattributed_us": float(np.mean([r.unattributed_us for r in middle])),
        "typical_between_us": period_us - step_us,
    }


def middle_half(values: Sequence[float]) -> list[int]:
    """Indices of the values without the lowest and the highest quarter (rounded down)."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    cut = len(values) // 4
    return order[cut : len(values) - cut]
