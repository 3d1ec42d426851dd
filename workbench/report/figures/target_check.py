"""Figure of notebook 00: measured rates as a share of what the target file assumes."""

import plotly.graph_objects as go

from workbench.report.figures import theme
from workbench.rows import Row


def main_figure(rows: list[Row]) -> go.Figure:
    """One bar per rate, 100 % = the target's number, with the spread of the samples."""
    rates = [row for row in rows if row.metrics.get("target_rate")]
    shares = [100 * float(row.metrics["rate"] or 0) / float(row.metrics["target_rate"] or 1) for row in rates]
    least = min(zip(shares, rates), key=lambda pair: pair[0])
    name, target = least[1].variant.capitalize(), least[1].target
    title = f"{name} is the furthest from target {target}: {least[0]:.0f} % of its rate"
    figure = theme.new_figure(title, "share of the target's rate (%)", "rate", height=320)
    labels = [f"{row.variant} ({float(row.metrics['rate'] or 0):.4g} {row.metrics['unit']})" for row in rates]
    times = [row.timing for row in rates if row.timing]
    best = [share * (one.median_us / one.p10_us - 1) for share, one in zip(shares, times)]
    worst = [share * (1 - one.median_us / one.p90_us) for share, one in zip(shares, times)]
    spread = {"type": "data", "array": best, "arrayminus": worst}
    figure.add_bar(
        y=labels, x=shares, orientation="h", marker_color=theme.BLUE, error_x=spread, name="p10 to p90"
    )
    line = {"dash": "dash", "color": theme.GREY}
    figure.add_vline(x=100, line=line, annotation_text="nominal", annotation_position="top")
    return figure
