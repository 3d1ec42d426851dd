"""Figures of notebook 40: the step's ledger per mode, and the launch paths."""

from collections.abc import Sequence

import plotly.graph_objects as go

from workbench.experiments.eager_vs_graph import MODEL_TITLES, MODES, groups
from workbench.measure.ledger import STAGES
from workbench.report.figures import theme
from workbench.rows import Row

MODE_TITLES = {"eager": "eager", "split_graph": "two graphs", "step_graph": "one graph"}


def main_figure(rows: Sequence[Row]) -> go.Figure:
    """Step time by stage, one bar per mode, grouped by model and context; the rest is shown in grey."""
    found = groups(rows)
    figure = theme.new_figure(_title(found), "model, context and mode", "step (ms)")
    bars = [(key, mode, modes[mode]) for key, modes in found.items() for mode in MODES if mode in modes]
    labels = [
        [f"{MODEL_TITLES.get(model, model)}, {context}" for (model, context), _, _ in bars],
        [MODE_TITLES[mode] for _, mode, _ in bars],
    ]
    colours = theme.colours(STAGES)
    for stage in STAGES:
        values = [float(row.metrics.get(f"{stage}_us") or 0) / 1e3 for _, _, row in bars]
        if any(values):
            figure.add_bar(x=labels, y=values, name=stage, marker_color=colours[stage])
    figure.add_bar(x=labels, y=[_rest_ms(row) for _, _, row in bars], name="rest", marker_color=theme.GREY)
    figure.update_xaxes(type="multicategory")
    return figure.update_layout(barmode="stack")


def _rest_ms(row: Row) -> float:
    """What no stage claims of the median step period: gaps between steps and the unattributed part."""
    assert row.timing is not None
    claimed_us = sum(float(row.metrics.get(f"{stage}_us") or 0) for stage in STAGES)
    return max(0.0, row.timing.median_us - claimed_us) / 1e3


def _title(found: dict[tuple[str, int], dict[str, Row]]) -> str:
    ratios = [
        modes["eager"].timing.median_us / modes["step_graph"].timing.median_us
        for modes in found.values()
        if modes.keys() >= {"eager", "step_graph"} and modes["eager"].timing and modes["step_graph"].timing
    ]
    if not ratios:
        return "No step could be timed in both modes"
    low, high = min(ratios), max(ratios)
    return f"One graph makes a step {low:.2f} to {high:.2f} times as fast as eager launches"


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
