"""Figures of notebook 40: the step's ledger per mode, and the launch paths."""

from collections.abc import Sequence

import plotly.graph_objects as go

from workbench.experiments.eager_vs_graph import MODEL_TITLES, MODES, groups, part_us
from workbench.measure.ledger import STAGES
from workbench.report.figures import theme
from workbench.rows import Row

LIGHT_GREY = "#C8C8C8"
PART_TITLES = {"between": "between steps"}
MODE_TITLES = {"eager": "eager", "split_graph": "two graphs", "step_graph": "one graph"}


def main_figure(rows: Sequence[Row]) -> go.Figure:
    """A typical step by part, one bar per mode, grouped by model and context; a mark is the median period.

    Parts are shown as they are: a negative one (steps that overlap) reaches below zero.
    """
    found = groups(rows)
    figure = theme.new_figure(_title(found), "model, context and mode", "step (ms)")
    bars = [(key, mode, modes[mode]) for key, modes in found.items() for mode in MODES if mode in modes]
    labels = [
        [f"{MODEL_TITLES.get(model, model)}, {context}" for (model, context), _, _ in bars],
        [MODE_TITLES[mode] for _, mode, _ in bars],
    ]
    colours = theme.colours(STAGES) | {"unattributed": theme.GREY, "between": LIGHT_GREY}
    for part in (*STAGES, "unattributed", "between"):
        values = [part_us(row, part) / 1e3 for _, _, row in bars]
        if any(values):
            figure.add_bar(x=labels, y=values, name=PART_TITLES.get(part, part), marker_color=colours[part])
    if bars:
        _mark_medians(figure, labels, [row for _, _, row in bars])
    figure.update_xaxes(type="multicategory")
    return figure.update_layout(barmode="relative")


def _mark_medians(figure: go.Figure, labels: list[list[str]], rows: Sequence[Row]) -> None:
    """The median step period with its 10th and 90th percentile: what title and text speak of."""
    timings = [row.timing for row in rows if row.timing is not None]
    figure.add_scatter(
        x=labels,
        y=[t.median_us / 1e3 for t in timings],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [(t.p90_us - t.median_us) / 1e3 for t in timings],
            "arrayminus": [(t.median_us - t.p10_us) / 1e3 for t in timings],
        },
        mode="markers",
        marker={"symbol": "diamond", "color": theme.BLACK, "size": 9},
        name="median period, p10 to p90",
    )


def _title(found: dict[tuple[str, int], dict[str, Row]]) -> str:
    ratios = [
        modes["eager"].timing.median_us / modes["step_graph"].timing.median_us
        for modes in found.values()
        if modes.keys() >= {"eager", "step_graph"} and modes["eager"].timing and modes["step_graph"].timing
    ]
    if not ratios:
        return "No step could be timed in both modes"
    low, high = min(ratios), max(ratios)
    return f"By its median, a step as one graph is {low:.2f} to {high:.2f} times as fast as launched eagerly"


def launch_figure(rows: Sequence[Row]) -> go.Figure:
    """Host time of the same launches through each path."""
    paths = sorted(
        (row for row in rows if row.axes.get("part") == "launch_path" and row.timing is not None),
        key=lambda row: row.timing.median_us if row.timing else 0.0,
    )
    count = paths[0].axes["launches"] if paths else 0
    title = f"{count} launches of one small kernel cost least through {paths[0].variant}" if paths else ""
    figure = theme.new_figure(title or "No launch path could be timed", "launch path", "host time (µs)")
    figure.add_bar(
        x=[row.variant for row in paths],
        y=[row.timing.median_us for row in paths if row.timing],
        marker_color=theme.BLUE,
        showlegend=False,
    )
    return figure
