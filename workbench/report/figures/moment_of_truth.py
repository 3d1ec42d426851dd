"""Figures of notebook 60: the ledger before and after, what each hypothesis could explain, every verdict."""

from collections.abc import Sequence

import plotly.graph_objects as go

from workbench.experiments.moment_of_truth import STAGES, number, select, stage_shares
from workbench.report.figures import theme
from workbench.rows import Row


def main_figure(rows: Sequence[Row]) -> go.Figure:
    """Stages of a step before and after the fix."""
    runs = [*select(list(rows), "before"), *select(list(rows), "after")]
    figure = theme.new_figure(_main_title(runs), "time per step (µs)", "run", height=340)
    for stage, colour in (theme.colours(STAGES) | {"unattributed": theme.GREY}).items():
        figure.add_bar(
            y=[_run_label(row) for row in runs], x=[stage_shares(row)[stage] for row in runs],
            orientation="h", name=stage, marker={"color": colour},
        )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_yaxes(type="category", autorange="reversed")
    return figure


def _run_label(row: Row) -> str:
    """before or after; a run whose results are wrong says so where its time is drawn."""
    return str(row.axes["run"]) + ("" if row.timing else f"<br>({row.status.lower()}: no measurement)")


def _main_title(runs: Sequence[Row]) -> str:
    if len(runs) < 2:
        return "No run of a fault is in these rows"
    before, after = runs[0], runs[-1]
    return (
        f"{before.variant}: {number(before, 'replay_share'):.0%} of the steps replayed before the fix,"
        f" {number(after, 'replay_share'):.0%} after"
    )


def hypotheses_figure(rows: Sequence[Row]) -> go.Figure:
    """The most that each hypothesis could explain, against the step."""
    stated = sorted(select(list(rows), "hypothesis"), key=lambda row: number(row, "explains_us"))
    largest = stated[-1].variant if stated else "nothing"
    title = f"Before the experiment, {largest} could explain the most"
    figure = theme.new_figure(title, "time it could explain per step, derived (µs)", "hypothesis", height=340)
    figure.add_bar(
        y=[row.variant for row in stated], x=[number(row, "explains_us") for row in stated], orientation="h",
        marker={"color": theme.SKY, "pattern": {"shape": "/"}}, name="derived",
        text=[str(row.metrics["because"]) for row in stated],
    )  # fmt: skip
    for row in select(list(rows), "before"):
        figure.add_vline(
            x=number(row, "ledger_step_us"),
            line={"dash": "dash", "color": theme.GREY},
            annotation_text="the step",
            annotation_position="top",
        )
    figure.update_yaxes(type="category")
    return figure


def verdicts_figure(rows: Sequence[Row]) -> go.Figure:
    """What every fault leaves of replay, coloured by what found it; a cross marks a wrong verdict."""
    verdicts = select(list(rows), "verdict")
    right = sum(bool(row.metrics["is_right"]) for row in verdicts)
    title = f"{right} of {len(verdicts)} verdicts are right"
    figure = theme.new_figure(title, "steps that say replayed (%)", "fault", height=180 + 22 * len(verdicts))
    for found_by, colour in theme.colours(str(row.metrics["found_by"]) for row in verdicts).items():
        own = [row for row in verdicts if row.metrics["found_by"] == found_by]
        how = "exclusion" if found_by == "nothing" else found_by
        figure.add_scatter(
            y=[row.variant for row in own], x=[100 * number(row, "replay_share") for row in own],
            mode="markers", name=f"found by {how}", text=[str(row.metrics["because"]) for row in own],
            marker={
                "color": colour, "size": 12,
                "symbol": ["circle" if row.metrics["is_right"] else "x" for row in own],
            },
        )  # fmt: skip
    figure.update_yaxes(type="category", autorange="reversed")
    figure.update_xaxes(range=[-4, 104])
    return figure
