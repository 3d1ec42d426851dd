"""What a traced stretch of decode steps says: launches per step, and how long the device idled."""

from typing import Any

from workbench.measure import trace

SKIPPED_STEPS = 3  # warm-up steps of every round


def summarise_trace(traced: trace.Trace) -> dict[str, Any]:
    """Means over the traced steps but the first three; idle share over the stretch from first to last."""
    records = trace.steps(traced)[SKIPPED_STEPS:]
    if not records:
        return {}
    n = len(records)
    found: dict[str, Any] = {
        "launches_per_step": sum(r.eager_launches for r in records) / n,
        "graph_launches_per_step": sum(r.graph_launches for r in records) / n,
        "kernels_per_step": sum(r.kernels_in_graphs + r.kernels_eager for r in records) / n,
        "kernels_in_graphs_per_step": sum(r.kernels_in_graphs for r in records) / n,
        "traced_steps": n,
    }
    return found | (_idle(traced) if traced.on_device else {})


def _idle(traced: trace.Trace) -> dict[str, Any]:
    """Device time between the first and last kernel of the later steps: busy, gaps, node distances."""
    begin_us = traced.steps[SKIPPED_STEPS].end_us
    busy = trace.union(
        span
        for span in [*traced.kernels, *traced.copies]
        if begin_us <= span.start_us <= traced.steps[-1].end_us
    )
    if not busy:
        return {}
    window = busy[-1][1] - busy[0][0]
    idle = trace.gaps(busy, busy[0][0], busy[-1][1])
    node_us = window - trace.length(busy) - idle
    return {
        "idle_share": idle / window,
        "node_gap_share": node_us / window,
        "busy_share": trace.length(busy) / window,
    }
