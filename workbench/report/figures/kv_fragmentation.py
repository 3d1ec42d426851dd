"""Figures of notebook 30: what scatter costs, how pools wear, who owns which slot."""

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.experiments.kv_findings import compare_tiers
from workbench.report.figures import theme
from workbench.rows import Row

STRIP_POLICIES = ("fifo", "need_sort", "best_fit_runs", "paged64")
STRIP_COLUMNS = 128
FREE_COLOUR = "#EEEEEE"


def main_figure(rows: list[Row]) -> go.Figure:
    """Latency of every layout over its gap rate, with the fitted cost and the noise of one layout."""
    fit = next((row for row in rows if row.variant == "regression"), None)
    figure = theme.new_figure(_cost_title(fit), "gaps between neighbouring tokens (%)", "latency p10 (µs)")
    timed = [row for row in rows if row.timing and row.variant not in ("tiers", "copy_rows", "whole_step")]
    palette = _palette(rows)
    for variant, colour in palette.items():
        some = [row for row in timed if row.variant == variant and row.timing]
        figure.add_scatter(
            x=[100 * _number(row, "gap_rate") for row in some],
            y=[row.timing.p10_us for row in some if row.timing],
            mode="markers",
            name=variant,
            text=[row.case_id for row in some],
            marker={"color": colour, "size": 9, "symbol": "circle" if variant != "synthetic" else "x"},
            hovertemplate="%{text}<br>%{x:.1f} % gaps, %{y:.1f} µs",
        )
    if fit is not None and timed:
        _add_fit(figure, fit, max(_number(row, "tokens") for row in timed))
    return figure


def _palette(rows: Sequence[Row]) -> dict[str, str]:
    """A policy has one colour in every figure; made layouts are black."""
    made = {row.variant: theme.BLACK for row in rows if row.variant == "synthetic"}
    return theme.colours(row.variant for row in rows if "age" in row.axes) | made


def _cost_title(fit: Row | None) -> str:
    if fit is None:
        return "Too few layouts to say what scatter costs"
    share = _number(fit, "effect_us") / _number(fit, "base_us")
    where = "above" if fit.metrics["above_noise"] else "not above"
    return (
        f"By the fit the most scattered layout costs one call {share:+.1%} on {fit.target}: {where} the noise"
    )


def _add_fit(figure: go.Figure, fit: Row, tokens: float) -> None:
    base, noise = _number(fit, "base_us"), _number(fit, "noise_us")
    slope_us = _number(fit, "ns_per_gap") / 1e3 * tokens
    line = {"color": theme.GREY, "dash": "dash"}
    figure.add_scatter(x=[0, 100], y=[base, base + slope_us], mode="lines", name="fit, gaps only", line=line)
    figure.add_hrect(
        y0=base - noise / 2, y1=base + noise / 2, fillcolor=theme.GREY, opacity=0.15, line_width=0
    )


def wear_figure(rows: list[Row]) -> go.Figure:
    """Gaps and backward steps of the whole pool over its age, by policy."""
    aged = [row for row in rows if "age" in row.axes]
    figure = make_subplots(rows=1, cols=2, subplot_titles=("gaps", "backward steps"), horizontal_spacing=0.12)
    palette = _palette(aged)
    for column, name in enumerate(("pool_gap_rate", "pool_descent_rate"), start=1):
        for variant, colour in palette.items():
            some = sorted(
                (row for row in aged if row.variant == variant), key=lambda row: _number(row, "wraps")
            )
            figure.add_scatter(
                x=[_number(row, "wraps") for row in some],
                y=[100 * _number(row, name) for row in some],
                name=variant,
                legendgroup=variant,
                showlegend=column == 1,
                mode="lines+markers",
                line={"color": colour},
                row=1,
                col=column,
            )
    figure.update_xaxes(title_text="age of the pool (wraps)")
    figure.update_yaxes(title_text="neighbouring tokens (%)")
    figure.update_layout(title_text=_wear_title(aged), height=430)
    return theme.apply_theme(figure)


def _wear_title(aged: Sequence[Row]) -> str:
    last = {row.variant: row for row in sorted(aged, key=lambda row: _number(row, "wraps"))}
    if "fifo" not in last or "need_sort" not in last:
        return f"How {len(last)} policies wear the pool"
    plain, sorting = last["fifo"], last["need_sort"]
    return (
        f"need_sort against the default: backward steps {_number(sorting, 'pool_descent_rate'):.2%} against"
        f" {_number(plain, 'pool_descent_rate'):.2%}, gaps {_number(sorting, 'pool_gap_rate'):.0%} against"
        f" {_number(plain, 'pool_gap_rate'):.0%}"
    )


def strip_figure(rows: list[Row], policies: Sequence[str] = STRIP_POLICIES) -> go.Figure:
    """The middle of the pool at its greatest age, one cell per slot, coloured by request."""
    last = {row.variant: row for row in rows if "strip" in row.metrics}  # rows come in order of age
    shown = [last[name] for name in policies if name in last]
    figure = make_subplots(
        rows=len(shown) or 1,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.06,
        subplot_titles=[row.variant for row in shown],
    )
    for place, row in enumerate(shown, start=1):
        figure.add_heatmap(**_cells(str(row.metrics["strip"])), showscale=False, row=place, col=1)
    figure.update_xaxes(title_text="slot within a line (slots)", row=len(shown) or 1, col=1)
    figure.update_yaxes(title_text="line (128 slots)", autorange="reversed")
    share = ", ".join(f"{row.variant} {_number(row, 'mean_run'):.1f}" for row in shown)
    figure.update_layout(title_text=f"Mean run of a request in slots: {share}", height=140 + 150 * len(shown))
    return theme.apply_theme(figure)


def _cells(strip: str) -> dict[str, object]:
    """z and colours of one strip: free slots pale, requests in the palette's order."""
    letters = sorted(set(strip) - {"."})
    number = {".": 0} | {letter: i for i, letter in enumerate(letters, start=1)}
    lines = [strip[i : i + STRIP_COLUMNS] for i in range(0, len(strip), STRIP_COLUMNS)]
    colours = [FREE_COLOUR, *(theme.OKABE_ITO[i % len(theme.OKABE_ITO)] for i in range(len(letters)))]
    top = max(1, len(colours) - 1)
    scale = [[i / top, colour] for i, colour in enumerate(colours)]
    z = [[number[letter] for letter in line] for line in lines]
    return {"z": z, "colorscale": scale, "zmin": 0, "zmax": top, "hovertemplate": "slot %{x} of line %{y}"}


def tier_figure(rows: list[Row]) -> go.Figure:
    """Both tiers and their two references, timed together: p10 with the range up to p90."""
    timed = [row for row in rows if row.variant == "tiers" and row.timing]
    figure = theme.new_figure(_tier_title(rows, timed), "layout", "latency p10 to p90 (µs)")
    colours = (theme.GREEN, theme.VERMILLION, theme.ORANGE, theme.BLUE)
    for row, colour in zip(timed, colours):
        if row.timing is not None:
            rise = row.timing.p90_us - row.timing.p10_us
            figure.add_bar(
                x=[str(row.axes["layout"])],
                y=[row.timing.p10_us],
                error_y={"type": "data", "array": [rise], "arrayminus": [0.0]},
                marker_color=colour,
                showlegend=False,
            )
    return figure


def _tier_title(rows: list[Row], timed: list[Row]) -> str:
    moved = compare_tiers(rows)
    if moved is None or not timed:
        return "No tier was timed on this run"
    word = "faster" if moved.high < 1 else "slower" if moved.low > 1 else "not told apart in time"
    return f"After relocation one attention call is {word}: {moved.words()} against the worn pool"


def _number(row: Row, name: str) -> float:
    value = row.metrics.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
