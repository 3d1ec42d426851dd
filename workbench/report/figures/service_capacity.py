"""Figures of the capacity plan: the bracket of pool sizes, the ledger, the projected step floors."""

import plotly.graph_objects as go

from workbench.report.figures import theme
from workbench.rows import Origin, Row


def main_figure(rows: list[Row]) -> go.Figure:
    """Every combination's pool, worst to best, with the observed pool and the wanted context as lines."""
    plans = sorted(
        (row for row in rows if row.case_id.startswith("plan/")),
        key=lambda row: float(str(row.metrics["pool_tokens"])),
    )
    worst, best = plans[0].metrics["pool_tokens"], plans[-1].metrics["pool_tokens"]
    figure = theme.new_figure(
        f"The KV pool holds {worst:,} to {best:,} tokens, depending on what is left open (derived)",
        "assumption combination (rank)",
        "KV pool (tokens)",
    )
    shades = theme.colours(sorted({str(row.axes["drafter_kv"]) for row in plans}))
    for kind, colour in shades.items():
        own = [(i, row) for i, row in enumerate(plans, 1) if row.axes["drafter_kv"] == kind]
        figure.add_bar(
            x=[i for i, _ in own],
            y=[row.metrics["pool_tokens"] for _, row in own],
            hovertext=[row.variant for _, row in own],
            marker_color=colour,
            name=f"drafter KV {kind}",
        )
    figure.update_layout(barmode="overlay", bargap=0.15)
    theme.add_floor(figure, float(str(plans[0].metrics["context"])), "wanted context", "bottom left")
    observed = plans[0].metrics.get("observed_tokens")
    if observed:
        line, text = {"color": theme.BLACK}, f"observed {observed:,}"
        figure.add_hline(y=observed, line=line, annotation_text=text, annotation_position="top left")
    return figure


def ledger_figure(rows: list[Row]) -> go.Figure:
    """Where one rank's memory goes under the chosen assumptions."""
    terms = [row for row in rows if row.case_id.startswith("term/") and row.axes["kind"] != "per token"]
    largest = max(terms, key=lambda row: row.bytes or 0)
    figure = theme.new_figure(
        f"{largest.variant.capitalize()} take {largest.metrics['gib']:.1f} GiB of each card (derived)",
        "memory (GiB)",
        "",
        height=120 + 36 * len(terms),
    )
    for kind, colour in theme.colours(str(row.axes["kind"]) for row in terms).items():
        own = [row for row in terms if row.axes["kind"] == kind]
        figure.add_bar(
            y=[row.variant for row in own],
            x=[row.metrics["gib"] for row in own],
            hovertext=[str(row.metrics["source"]) for row in own],
            orientation="h",
            marker_color=colour,
            name=kind,
        )
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def roofline_figure(rows: list[Row]) -> go.Figure:
    """Projected floor of one verify step over context, per target."""
    floors = [row for row in rows if row.origin is Origin.PROJECTED]
    at = max(int(str(row.axes["context"])) for row in floors)
    fastest = min((row for row in floors if row.axes["context"] == at), key=lambda row: row.floor_us or 0)
    floor_ms = (fastest.floor_us or 0) / 1e3
    figure = theme.new_figure(
        f"Projected: a step at {at:,} tokens takes {floor_ms:.1f} ms or more ({fastest.variant})",
        "context (tokens)",
        "projected step floor (ms)",
        log_x=True,
    )
    for name, colour in theme.colours(row.variant for row in floors).items():
        own = [row for row in floors if row.variant == name]
        figure.add_scatter(
            x=[row.axes["context"] for row in own],
            y=[(row.floor_us or 0) / 1e3 for row in own],
            mode="lines+markers",
            line={"color": colour, "dash": "dot"},
            name=f"{name} (projected)",
        )
    figure.update_yaxes(rangemode="tozero")
    return figure
