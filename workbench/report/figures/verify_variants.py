"""Figures of notebook 10: latency against the floor, errors against their bars, projections."""

import textwrap
from collections.abc import Sequence

import plotly.graph_objects as go

from workbench.measure.correctness import REL_FRO
from workbench.report.figures import theme
from workbench.rows import Origin, Row


def main_figure(rows: Sequence[Row]) -> go.Figure:
    """Latency by shape, p10 to p90, with the floor and the published peers of each shape."""
    timed = [row for row in rows if row.timing is not None]
    labels, shared = short_labels([shape_label(row) for row in timed])
    figure = theme.new_figure(_latency_title(timed), f"shape{shared}", "latency (µs)", log_y=True, height=520)
    colour = theme.colours(row.variant for row in timed)
    for place, variant in enumerate(colour):
        own = [(row, row.timing) for row in timed if row.variant == variant and row.timing]
        figure.add_scatter(
            x=[shape_label(row) for row, _ in own],
            y=[t.median_us for _, t in own],
            error_y={
                "array": [t.p90_us - t.median_us for _, t in own],
                "arrayminus": [t.median_us - t.p10_us for _, t in own],
            },
            mode="markers",
            name=variant,
            marker={"color": colour[variant], "symbol": theme.SYMBOLS[place % len(theme.SYMBOLS)], "size": 9},
        )
    _add_floor(figure, timed)
    _add_published(figure, timed)
    return name_shapes(figure, labels)


def _latency_title(timed: Sequence[Row]) -> str:
    best = min(timed, key=lambda row: row.floor_ratio or float("inf"), default=None)
    if best is None:
        return "No variant was timed on this target"
    return f"Closest to the floor: {best.variant} at {best.floor_ratio:.3g} x on {shape_label(best)}"


def shape_label(row: Row) -> str:
    """bs1 h8 q16 46080 random: what was asked for, also for a peer that ran its own layout."""
    if "case" in row.axes:
        return str(row.axes["case"]).replace("-", " ").replace("ctx", "")
    return "bs{bs} h{heads} q{q_len} {ctx} {layout}".format(**row.axes)


def short_labels(names: Sequence[str]) -> tuple[dict[str, str], str]:
    """Each shape without the words that all of them share, on two lines, and those words for the axis."""
    words = {name: name.split() for name in names}
    counts = {len(split) for split in words.values()}
    if len(words) < 2 or len(counts) != 1:
        return {name: name for name in words}, ""
    columns = list(zip(*words.values()))
    shared = [column[0] for column in columns if len(set(column)) == 1]
    kept = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    labels = {name: " ".join(split[i] for i in kept) for name, split in words.items()}
    wrapped = {name: "<br>".join(textwrap.wrap(label, 14)) for name, label in labels.items()}
    return wrapped, f" (all: {' '.join(shared)})" if shared else ""


def name_shapes(figure: go.Figure, labels: dict[str, str]) -> go.Figure:
    """Category axis whose ticks carry the short labels."""
    return figure.update_xaxes(type="category", tickvals=list(labels), ticktext=list(labels.values()))


def _add_floor(figure: go.Figure, timed: Sequence[Row]) -> None:
    floors = {shape_label(row): row.floor_us for row in timed}
    marker = {"color": theme.GREY, "symbol": "line-ew-open", "size": 18}
    figure.add_scatter(
        x=list(floors), y=list(floors.values()), mode="markers", name="floor (computed)", marker=marker
    )


def _add_published(figure: go.Figure, timed: Sequence[Row]) -> None:
    """Peers measured elsewhere, hollow and grey: another process, no tree mask."""
    points: dict[str, dict[str, float]] = {}
    for row in timed:
        for name, value in row.metrics.items():
            if name.startswith("published_") and isinstance(value, float):
                peer = name.removeprefix("published_").removesuffix("_us")
                points.setdefault(peer, {})[shape_label(row)] = value
    for place, (peer, values) in enumerate(points.items()):
        symbol = theme.SYMBOLS[place % len(theme.SYMBOLS)] + "-open"
        figure.add_scatter(
            x=list(values), y=list(values.values()), mode="markers", name=f"{peer} (published)",
            marker={"color": theme.GREY, "symbol": symbol, "size": 8},
        )  # fmt: skip


def error_figure(rows: Sequence[Row]) -> go.Figure:
    """Relative error of every checked case against fp64, with the bar of each dtype."""
    checked = [row for row in rows if "rel_fro" in row.errors]
    worst = max((row.errors["rel_fro"] / REL_FRO[str(row.axes["dtype"])] for row in checked), default=0.0)
    title = f"The largest error uses {100 * worst:.2g} % of its bar over {len(checked)} checked cases"
    figure = theme.new_figure(title, "variant", "relative Frobenius error (1)", log_y=True)
    dtypes = list(dict.fromkeys(str(row.axes["dtype"]) for row in checked))
    for dtype, colour in theme.colours(dtypes).items():
        own = [row for row in checked if row.axes["dtype"] == dtype]
        figure.add_scatter(
            x=[row.variant for row in own], y=[row.errors["rel_fro"] for row in own],
            mode="markers", name=dtype,
            marker={"color": colour, "size": 9, "opacity": 0.7}, text=[shape_label(row) for row in own],
        )  # fmt: skip
        theme.add_floor(figure, REL_FRO[dtype], f"bar for {dtype}")
    return figure


def projection_figure(rows: Sequence[Row]) -> go.Figure:
    """Floors of the GPU targets: projected from data/targets, nothing of it was run."""
    projected = [row for row in rows if row.origin is Origin.PROJECTED and row.floor_us]
    bound = sorted({str(row.metrics["bound"]) for row in projected})
    title = f"Projected floors, not measured: {' or '.join(bound) or 'nothing'} bound on these shapes"
    labels, shared = short_labels([shape_label(row) for row in projected])
    figure = theme.new_figure(title, f"shape{shared}", "projected floor (µs)", log_y=True)
    for target, colour in theme.colours(row.target for row in projected).items():
        own = [row for row in projected if row.target == target]
        figure.add_bar(
            x=[shape_label(row) for row in own], y=[row.floor_us for row in own],
            name=f"{target} (projected)",
            marker={"color": colour, "pattern": {"shape": "/"}},
        )  # fmt: skip
    return name_shapes(figure, labels)
