"""Figure of notebook 90: ratios with their bounds, or what is stored when there is nothing to compare."""

import plotly.graph_objects as go

from workbench.report.figures import theme
from workbench.rows import Row

VERDICT_COLOURS = {
    "faster": theme.GREEN,
    "same within noise": theme.BLUE,
    "slower": theme.VERMILLION,
    "not comparable": theme.GREY,
}
MAX_CASES = 60


def main_figure(rows: list[Row]) -> go.Figure:
    """Ratio of medians per case (second over first, log scale); else the number of stored rows."""
    cases = [row for row in rows if row.variant == "case" and row.metrics.get("ratio")]
    return _ratios(cases) if cases else _stored([row for row in rows if row.variant == "stored"])


def _ratios(cases: list[Row]) -> go.Figure:
    changed = sum(row.metrics["verdict"] != "same within noise" for row in cases)
    title = f"{changed} of {len(cases)} compared cases differ beyond their noise"
    shown = sorted(cases, key=lambda row: abs(float(row.metrics["ratio"] or 1) - 1), reverse=True)[:MAX_CASES]
    figure = theme.new_figure(title, "second over first, median latency (ratio)", "case", log_x=True)
    for verdict, colour in VERDICT_COLOURS.items():
        some = [row for row in shown if row.metrics["verdict"] == verdict]
        ratio = [float(row.metrics["ratio"] or 0) for row in some]
        high = [float(row.metrics["high"] or 0) - r for row, r in zip(some, ratio)]
        low = [r - float(row.metrics["low"] or 0) for row, r in zip(some, ratio)]
        if some:
            figure.add_scatter(
                x=ratio,
                y=[row.case_id for row in some],
                mode="markers",
                name=verdict,
                marker={"color": colour, "size": 9},
                error_x={"type": "data", "array": high, "arrayminus": low, "color": colour},
            )
    figure.add_vline(x=1, line={"dash": "dash", "color": theme.GREY})
    figure.update_layout(height=260 + 22 * len(shown))
    return figure


def _stored(rows: list[Row]) -> go.Figure:
    total = sum(int(row.metrics["rows"] or 0) for row in rows)
    title = f"One batch is stored: {total} rows, nothing to compare with yet"
    figure = theme.new_figure(title, "experiment", "stored rows (count)")
    names = [str(row.axes["of"]) for row in rows]
    timed = [int(row.metrics["timed"] or 0) for row in rows]
    untimed = [int(row.metrics["rows"] or 0) - count for row, count in zip(rows, timed)]
    figure.add_bar(x=names, y=timed, name="with a timing", marker_color=theme.BLUE)
    figure.add_bar(x=names, y=untimed, name="without", marker_color=theme.SKY)
    figure.update_layout(barmode="stack")
    return figure.update_yaxes(rangemode="tozero")
