"""Figures of notebook 50: where a tree pays, how deep drafts are accepted, where a step's time goes."""

from collections.abc import Sequence

import plotly.graph_objects as go

from workbench.experiments.speculative_verdict import number
from workbench.measure.ledger import STAGES
from workbench.report.figures import theme
from workbench.rows import Origin, Row

EXECUTION_SYMBOLS = {"eager": "circle-open", "split_graph": "diamond", "step_graph": "circle"}


def main_figure(rows: Sequence[Row]) -> go.Figure:
    """Tokens per step gained over step time added, one point per pair of arms; above the line it pays."""
    derived = [row for row in rows if row.origin is Origin.DERIVED]
    figure = theme.new_figure(
        _title(derived),
        "step time ratio (1)",
        "tokens per step ratio (1)",
        log_x=True,
        log_y=True,
        height=520,
    )
    ends = [number(row, name) for row in derived for name in ("step_ratio", "accept_ratio")] or [1.0]
    span = [min(*ends, 0.8), max(*ends, 1.25)]
    line = {"color": theme.GREY, "dash": "dash"}
    figure.add_scatter(x=span, y=span, mode="lines", name="break-even", line=line, hoverinfo="skip")
    palette = theme.colours(row.variant for row in derived)
    for variant, colour in palette.items():
        for execution, symbol in EXECUTION_SYMBOLS.items():
            some = [r for r in derived if r.variant == variant and r.axes["execution"] == execution]
            if some:
                _add_points(figure, some, f"{variant}, {execution}", {"color": colour, "symbol": symbol})
    return figure


def _add_points(figure: go.Figure, rows: list[Row], name: str, marker: dict[str, str]) -> None:
    figure.add_scatter(
        x=[number(row, "step_ratio") for row in rows],
        y=[number(row, "accept_ratio") for row in rows],
        mode="markers",
        name=name,
        marker=marker | {"size": 12},
        text=[f"{row.case_id}<br>{number(row, 'speedup'):.2f}x, pays: {row.metrics['pays']}" for row in rows],
        hovertemplate="%{text}<extra></extra>",
    )


def _title(derived: list[Row]) -> str:
    trees = [row for row in derived if row.variant == "tree over chain" and row.axes["execution"] != "eager"]
    trees = trees or [row for row in derived if row.variant == "tree over chain"]
    if not trees:
        return "No tree and chain were both measured here"
    best = max(trees, key=lambda row: number(row, "speedup"))
    words = {"yes": "pays over", "no": "does not pay over", "undecided": "is not told apart from"}
    return (
        f"At best the tree {words[str(best.metrics['pays'])]} the chain: {number(best, 'speedup'):.2f}x "
        f"({best.axes['execution']}, budget {best.axes['budget']}, temperature {best.axes['temperature']:g})"
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
