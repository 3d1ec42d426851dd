"""How every figure looks: Okabe-Ito colours, a title that states the finding, axes that name their unit."""

import math
import re
import textwrap
from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go

# Okabe and Ito's palette: told apart by readers with any colour vision.
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, YELLOW, BLACK = OKABE_ITO
GREY = "#7F7F7F"  # floors, limits and anything that is not a measurement
LOG_AXIS = {"type": "log", "tickformat": ",~g"}  # 10,000, not 10k
SMALL = {"tickformat": "~e", "nticks": 6}  # 1e-6, not 1µ
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "star", "x", "hexagon")
TITLE_CHARACTERS = 90  # per line; the toolbar stands to the right of the title
TITLE_LINE, LEGEND_LINE = 23, 20  # pixels
LEGEND_CHARACTERS = 140  # per line of the legend, its symbols included
UNIT = re.compile(r"[(\[][^()\[\]]+[)\]]")  # "latency (µs)"


def new_figure(
    title: str, x: str, y: str, *, log_x: bool = False, log_y: bool = False, height: int = 420
) -> go.Figure:
    """An empty figure. `title` is the finding as a sentence; `x` and `y` end in a unit: "latency (µs)"."""
    figure = go.Figure()
    figure.update_layout(title_text=title, height=height)
    figure.update_xaxes(title_text=x, **(LOG_AXIS | {"dtick": "D2"} if log_x else {}))
    figure.update_yaxes(title_text=y, **((LOG_AXIS | (SMALL if "error" in y else {})) if log_y else {}))
    return apply_theme(figure)


def apply_theme(figure: go.Figure) -> go.Figure:
    """Fonts, colours, margins and grid on a figure built elsewhere (`make_subplots`); returns it."""
    figure.update_layout(
        template="plotly_white",
        colorway=OKABE_ITO,
        font={"family": "system-ui, sans-serif", "size": 14},
        title={"x": 0, "xanchor": "left", "y": 1, "yanchor": "top", "pad": {"t": 12}, "font": {"size": 16}},
        margin={"l": 70, "r": 20, "t": 70, "b": 60},
        legend={"orientation": "h", "yref": "container", "yanchor": "bottom", "y": 0, "x": 0},
        legend_traceorder="normal",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="closest",
    )
    figure.update_xaxes(automargin=True, zeroline=False)
    figure.update_yaxes(automargin=True, zeroline=False)
    return figure


def finish(figure: go.Figure) -> go.Figure:
    """Wrap the title and make room for it above and for the legend below the plot; returns the figure.

    The plot keeps the height that was asked for: a second line of either makes the figure taller.
    """
    lines = textwrap.wrap((figure.layout.title.text or "").replace("<br>", " "), TITLE_CHARACTERS)
    above = TITLE_LINE * max(0, len(lines) - 1)
    below = LEGEND_LINE * max(0, _legend_lines(figure) - 1)
    has_subplot_titles = any(one.yref == "paper" and (one.y or 0) > 0.95 for one in figure.layout.annotations)
    return figure.update_layout(
        title={"text": "<br>".join(lines), "pad": {"t": 12 + above // 2}},  # two lines stand around one
        margin={"t": 70 + above + (TITLE_LINE if has_subplot_titles else 0)},
        height=(figure.layout.height or 420) + above + below,
    )


def _legend_lines(figure: go.Figure) -> int:
    names = [trace.name for trace in figure.data if trace.name and trace.showlegend is not False]
    widest = max((len(name) for name in names), default=0) + 8  # entries stand in columns, with a symbol
    return -(-len(names) // max(1, LEGEND_CHARACTERS // widest))


def colours(names: Iterable[str]) -> dict[str, str]:
    """name -> colour, the same name always getting the same place in order; grey beyond eight."""
    return {name: OKABE_ITO[i] if i < len(OKABE_ITO) else GREY for i, name in enumerate(dict.fromkeys(names))}


def add_floor(figure: go.Figure, y: float, label: str, position: str = "top left") -> go.Figure:
    """A dashed grey line for a limit that was computed, not measured."""
    figure.add_hline(
        y=y, line={"dash": "dash", "color": GREY}, annotation_text=label, annotation_position=position
    )
    if figure.layout.yaxis.type == "log":  # lines are placed by value there, annotations by its logarithm
        figure.layout.annotations[-1].y = math.log10(y)
    return figure


def require_words(figure: go.Figure) -> go.Figure:
    """Raise ValueError unless the figure has a title and every numeric axis with a title names a unit."""
    title = figure.layout.title.text or ""
    if len(title.split()) < 3:
        raise ValueError(f"figure title {title!r} states no finding: write a sentence computed from the rows")
    axes = [*figure.select_xaxes(), *figure.select_yaxes()]
    if axes and not any(axis.title.text for axis in axes):
        raise ValueError(f"figure {title!r} has no axis titles: name quantity and unit, as in 'latency (µs)'")
    for axis in axes:
        text = axis.title.text or ""
        if text and not UNIT.search(text) and not _is_categorical(figure, axis):
            raise ValueError(
                f"axis {text!r} of figure {title!r} has no unit: write it as {text + ' (unit)'!r}"
            )
    return figure


def _is_categorical(figure: go.Figure, axis: Any) -> bool:
    """True where the data along `axis` are names, or its ticks are replaced by names."""
    if axis.type in ("category", "multicategory", "date") or axis.ticktext is not None:
        return True
    letter, number = axis.plotly_name[0], axis.plotly_name[5:]
    for trace in figure.data:
        if (getattr(trace, f"{letter}axis", None) or letter) == letter + number:
            values = getattr(trace, letter, None)
            return values is not None and any(isinstance(value, str | bool) for value in values)
    return False


def format_us(value_us: float) -> str:
    """A latency for a sentence: 0.42 µs, 17 µs, 3.1 ms."""
    if not math.isfinite(value_us):
        return "n/a"
    if value_us >= 1e6:
        return f"{value_us / 1e6:.3g} s"
    return f"{value_us / 1e3:.3g} ms" if value_us >= 1e3 else f"{value_us:.3g} µs"
