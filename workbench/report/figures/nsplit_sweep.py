"""Figures of notebook 20: latency, drift and partial traffic by split count."""

from collections.abc import Sequence

import plotly.graph_objects as go

from workbench.experiments.split_regret import Regret, regrets
from workbench.report.figures import theme
from workbench.rows import Origin, Row


def main_figure(rows: Sequence[Row]) -> go.Figure:
    """Latency over split counts per variant and shape; a star marks what auto picks."""
    title = _regret_title(regrets(list(rows)))
    figure = theme.new_figure(title, "nsplit (splits)", "latency (µs)", log_x=True, log_y=True)
    lines = theme.colours(series(row) for row in rows if row.timing)
    for name, colour in lines.items():
        own = [row for row in rows if row.timing and series(row) == name]
        fixed = sorted((row for row in own if row.axes["nsplit"] != "auto"), key=lambda row: split_count(row))
        figure.add_scatter(
            x=[split_count(row) for row in fixed], y=[row.timing.median_us for row in fixed if row.timing],
            name=name, mode="lines+markers", line={"color": colour},
        )  # fmt: skip
        auto = [row for row in own if row.axes["nsplit"] == "auto"]
        figure.add_scatter(
            x=[split_count(row) for row in auto], y=[row.timing.median_us for row in auto if row.timing],
            name=f"auto: {name}", mode="markers", showlegend=False,
            marker={"color": colour, "symbol": "star", "size": 15},
        )  # fmt: skip
    return mark_counts(figure, rows)


def _regret_title(found: Sequence[Regret]) -> str:
    """Only a regret above the noise is one."""
    if not found:
        return "No split count was timed here"
    real = [one for one in found if not one.is_noise]
    untold = sum(not one.is_told for one in found)
    few = f"; {untold} with too few samples" if untold else ""
    if not real:
        told = f"{len(found) - untold} of {len(found)}"
        return f"On {told} sweeps auto is the fastest plan, or not told apart from it{few}"
    worst = max(real, key=lambda one: one.share)
    return (
        f"auto is slower than the best split count on {len(real)} of {len(found)} sweeps,"
        f" at most by {worst.share:.1%} ({series(worst.auto)}){few}"
    )


def mark_counts(figure: go.Figure, rows: Sequence[Row]) -> go.Figure:
    """Ticks at the split counts that were tried."""
    return figure.update_xaxes(tickvals=sorted({split_count(row) for row in rows if "nsplit" in row.axes}))


def series(row: Row) -> str:
    """Legend entry: one variant on one shape."""
    return f"{row.variant} q{row.axes['q_len']} {row.axes['ctx']} {row.axes['dtype']}"


def split_count(row: Row) -> int:
    """The number of splits the plan had."""
    return int(row.metrics.get("plan_nsplit") or row.axes["nsplit"] or 1)


def drift_figure(rows: Sequence[Row]) -> go.Figure:
    """Error against fp64 over split counts: partial results are rounded and merged in another order."""
    checked = [row for row in rows if "rel_fro" in row.errors and row.axes["nsplit"] != "auto"]
    groups = {
        name: [row for row in checked if series(row) == name] for name in dict.fromkeys(map(series, checked))
    }
    spread = max((_spread(group) for group in groups.values()), default=1.0)
    title = f"The split count changes the error against fp64 by a factor of at most {spread:.2g}"
    figure = theme.new_figure(
        title, "nsplit (splits)", "relative Frobenius error (1)", log_x=True, log_y=True
    )
    for name, colour in theme.colours(groups).items():
        ordered = sorted(groups[name], key=split_count)
        figure.add_scatter(
            x=[split_count(row) for row in ordered], y=[row.errors["rel_fro"] for row in ordered],
            name=name, mode="lines+markers", line={"color": colour},
        )  # fmt: skip
    return mark_counts(figure, checked)


def _spread(group: Sequence[Row]) -> float:
    errors = [row.errors["rel_fro"] for row in group]
    return max(errors) / min(errors) if min(errors) > 0 else 1.0


def traffic_figure(rows: Sequence[Row]) -> go.Figure:
    """Derived: bytes of partial results, written and read once, over the least bytes of the call."""
    derived = [row for row in rows if row.origin is Origin.DERIVED]
    most = max((float(row.metrics["share_of_least_bytes"] or 0) for row in derived), default=0.0)
    title = f"Derived: partial results add up to {100 * most:.3g} % to the least bytes"
    figure = theme.new_figure(title, "nsplit (splits)", "partial traffic (% of least bytes)", log_x=True)
    for name, colour in theme.colours(series(row) for row in derived).items():
        own = sorted((row for row in derived if series(row) == name), key=split_count)
        figure.add_scatter(
            x=[split_count(row) for row in own],
            y=[100 * float(row.metrics["share_of_least_bytes"] or 0) for row in own],
            name=name, mode="lines+markers", line={"color": colour, "dash": "dot"},
        )  # fmt: skip
    return mark_counts(figure, derived)
