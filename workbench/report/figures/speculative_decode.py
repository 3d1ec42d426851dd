"""Figures of notebook 50: what pays, how deep drafts are accepted, where a step's time goes."""

from collections.abc import Sequence

import plotly.graph_objects as go

from workbench.experiments.speculative_verdict import best_trees, number, rate_words
from workbench.measure.ledger import STAGES
from workbench.report.figures import theme
from workbench.rows import Origin, Row


def main_figure(rows: Sequence[Row]) -> go.Figure:
    """Measured tokens per second of one arm over another with its interval, beside the two factors."""
    derived = [row for row in rows if row.origin is Origin.DERIVED]
    figure = theme.new_figure(
        _title(derived),
        "ratio of tokens per second (1)",
        "first arm over second",
        height=200 + 28 * len(derived),
    )
    labels = [_label(row) for row in derived]
    measured = [number(row, "tokens_per_s_ratio") for row in derived]
    figure.add_scatter(
        x=measured,
        y=labels,
        mode="markers",
        name="measured, 95 %",
        marker={"color": theme.BLUE, "size": 11},
        error_x={
            "type": "data",
            "array": [_reach(row, "tokens_per_s_high") for row in derived],
            "arrayminus": [_reach(row, "tokens_per_s_low") for row in derived],
        },
        text=[f"{row.case_id}<br>pays: {row.metrics['pays']}" for row in derived],
        hovertemplate="%{text}<br>%{x:.2f}x<extra></extra>",
    )
    figure.add_scatter(
        x=[number(row, "two_factors") for row in derived],
        y=labels,
        mode="markers",
        name="accept length over full-step time alone",
        marker={"color": theme.ORANGE, "size": 10, "symbol": "diamond-open"},
        hovertemplate="%{y}<br>%{x:.2f}x<extra></extra>",
    )
    figure.add_vline(x=1, line={"color": theme.GREY, "dash": "dash"})
    return figure.update_yaxes(type="category", autorange="reversed")


def _label(row: Row) -> str:
    axes = row.axes
    return f"{row.variant}, {axes['execution']}, B{axes['budget']}, T={axes['temperature']:g}"


def _reach(row: Row, name: str) -> float:
    """Distance of an end of the interval from the measured ratio; 0 without an interval."""
    end = row.metrics[name]
    return abs(float(end) - number(row, "tokens_per_s_ratio")) if end is not None else 0.0


def _title(derived: list[Row]) -> str:
    trees = best_trees(derived)
    if not trees:
        return "No tree and chain were both measured here"
    best = max(trees, key=lambda row: number(row, "tokens_per_s_ratio"))
    words = {"yes": "pays over", "no": "does not pay over", "undecided": "is not told apart from"}
    return (
        f"At best the tree {words[str(best.metrics['pays'])]} the chain: {rate_words(best)},"
        f" {best.axes['execution']}, budget {best.axes['budget']}, temperature {best.axes['temperature']:g}"
    )


def acceptance_figure(rows: Sequence[Row]) -> go.Figure:
    """Share of verify passes that accepted each draft position."""
    arms = [row for row in rows if "accepted_at_1" in row.metrics]
    longest = max(arms, key=lambda row: number(row, "accept_length"), default=None)
    title = "No arm drafted here"
    if longest is not None:
        words = (
            f"{longest.variant} of {longest.axes['budget']} at temperature {longest.axes['temperature']:g}"
        )
        title = f"The longest accepted paths: {words}, {number(longest, 'accept_length'):.2f} tokens per pass"
    figure = theme.new_figure(title, "draft position (index)", "accepted (% of passes)")
    palette = theme.colours(f"{row.variant} B{row.axes['budget']}" for row in arms)
    for row in arms:
        if row.axes["execution"] == arms[0].axes["execution"]:  # acceptance does not depend on the launch
            name = f"{row.variant} B{row.axes['budget']}"
            shares = [value for key, value in row.metrics.items() if key.startswith("accepted_at_")]
            figure.add_scatter(
                x=list(range(1, len(shares) + 1)),
                y=[100 * float(share or 0) for share in shares],
                mode="lines+markers",
                name=f"{name}, T={row.axes['temperature']:g}",
                line={"color": palette[name], "dash": "dash" if row.axes["temperature"] else "solid"},
            )
    return figure


def ledger_figure(rows: Sequence[Row]) -> go.Figure:
    """Mean time per step by stage, one bar per arm."""
    arms = [row for row in rows if row.timing and "verify_us" in row.metrics]
    shares = [number(row, "tree_us") / _step_us(row) for row in arms if row.variant == "tree"]
    title = (
        f"Building the tree takes at most {100 * max(shares):.1f} % of a step"
        if shares
        else "No tree was timed here"
    )
    figure = theme.new_figure(title, "arm", "time per step (µs)", height=480)
    labels = [
        f"{r.variant} {r.axes['execution']} T={r.axes['temperature']:g} B{r.axes['budget']}" for r in arms
    ]
    for stage, colour in theme.colours((*STAGES, "unattributed")).items():
        figure.add_bar(
            x=labels, y=[number(row, f"{stage}_us") for row in arms], name=stage, marker_color=colour
        )
    figure.update_layout(barmode="stack")
    return figure


def _step_us(row: Row) -> float:
    return sum(number(row, f"{stage}_us") for stage in (*STAGES, "unattributed")) or 1.0
