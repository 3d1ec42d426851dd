"""Figures state a finding, name units and use colours that every reader can tell apart."""

import html
import itertools
import json
import re
import subprocess
from pathlib import Path

import plotly.graph_objects as go
import pytest

from workbench.report import notebook
from workbench.report.bundle import plotly_script
from workbench.report.figures import theme


def test_a_figure_needs_a_sentence_and_units() -> None:
    good = theme.new_figure("Graph replay is 3.1x faster", "budget (nodes)", "latency (µs)")
    good.add_scatter(x=[1, 2], y=[3, 4])
    assert theme.require_words(good) is good
    with pytest.raises(ValueError, match="states no finding"):
        theme.require_words(theme.new_figure("Latency", "budget (nodes)", "latency (µs)"))
    unitless = theme.new_figure("Graph replay is faster", "budget", "latency (µs)")
    unitless.add_scatter(x=[1, 2], y=[3, 4])
    with pytest.raises(ValueError, match=r"axis 'budget' of figure .* has no unit"):
        theme.require_words(unitless)


def test_names_on_an_axis_need_no_unit() -> None:
    figure = theme.new_figure("Graph replay is 3.1x faster", "variant", "latency (µs)")
    figure.add_bar(x=["reference", "triton_split"], y=[3, 4])
    theme.require_words(figure)


def test_subplots_are_checked_too() -> None:
    from plotly.subplots import make_subplots

    figure = theme.apply_theme(make_subplots(rows=1, cols=2))
    figure.update_layout(title_text="Two panels, one finding")
    figure.add_scatter(x=[1], y=[2], row=1, col=1)
    figure.add_scatter(x=["a"], y=[2], row=1, col=2)
    with pytest.raises(ValueError, match="has no axis titles"):
        theme.require_words(figure)
    figure.update_yaxes(title_text="latency (µs)")
    figure.update_xaxes(title_text="variant", row=1, col=2)
    theme.require_words(figure)
    figure.update_xaxes(title_text="budget", row=1, col=1)
    with pytest.raises(ValueError, match="axis 'budget'"):
        theme.require_words(figure)


def crowded_figure() -> go.Figure:
    """Two panels with titles, a title of two lines and a legend of several."""
    from plotly.subplots import make_subplots

    figure = theme.apply_theme(make_subplots(rows=1, cols=2, subplot_titles=("gaps", "backward steps")))
    figure.update_layout(title_text="A long finding with many words " * 5, height=400)
    for number in range(11):
        figure.add_bar(x=[1, 2], y=[3, 4], name=f"a variant with a long name, {number}", row=1, col=1)
        figure.add_bar(x=[1, 2], y=[3, 4], name="", showlegend=False, row=1, col=2)
    figure.update_xaxes(title_text="budget (nodes)")
    return figure.update_yaxes(title_text="latency (µs)")


def test_title_and_legend_get_room_beside_the_plot() -> None:
    plain = theme.finish(theme.new_figure("Short titles stay as they are", "budget (nodes)", "latency (µs)"))
    assert plain.layout.title.text == "Short titles stay as they are" and plain.layout.height == 420
    crowded = theme.finish(crowded_figure())
    lines = crowded.layout.title.text.split("<br>")
    assert len(lines) == 2 and max(map(len, lines)) <= theme.TITLE_CHARACTERS
    assert crowded.layout.height > 400 and crowded.layout.margin.t > plain.layout.margin.t
    assert theme.finish(crowded).layout.title.text.count("<br>") == 1


@pytest.mark.browser
def test_nothing_lies_on_the_plot(chromium: str, tmp_path: Path) -> None:
    """Title, toolbar, subplot titles, panels and legend, as a browser lays them out, do not overlap."""
    division = notebook.figure_bundle(crowded_figure())["text/html"]
    measure = """setTimeout(function () {
      function box(name) {
        return Array.from(document.querySelectorAll(name)).map(function (one) {
          var r = one.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; }); }
      document.title = JSON.stringify({title: box(".gtitle"), toolbar: box(".modebar"),
        legend: box(".legend"), heads: box(".annotation"),
        panels: box(".plotbg, .bglayer .bg, .gridlayer > g")});
    }, 500);"""
    page = tmp_path / "crowded.html"
    page.write_text(
        f'<meta charset="utf-8"><script>{plotly_script()}</script><div style="width:1040px">{division}</div>'
        f"<script>{measure}</script>"
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=9000"]
    command = [chromium, *flags, f"--user-data-dir={tmp_path}", "--window-size=1100,700", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"<title>(\{.*?)</title>", done.stdout)
    assert found, done.stderr[-500:]
    boxes = json.loads(html.unescape(found.group(1)))
    assert len(boxes["title"]) == len(boxes["legend"]) == 1 and len(boxes["heads"]) == 2 and boxes["panels"]
    parts = list(boxes)
    for first, second in itertools.combinations(parts, 2):
        for a, b in itertools.product(boxes[first], boxes[second]):
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert apart, f"{first} {a} lies on {second} {b}"


def test_a_floor_is_named_where_it_is_drawn_on_a_log_axis() -> None:
    figure = theme.new_figure("Errors stay below the bar", "variant", "relative error (1)", log_y=True)
    theme.add_floor(figure, 1e-5, "bar")
    assert figure.layout.shapes[0].y0 == 1e-5 and figure.layout.annotations[0].y == pytest.approx(-5)


def test_colours_are_okabe_ito_and_stable() -> None:
    names = [f"v{i}" for i in range(9)]
    chosen = theme.colours(names)
    assert list(chosen.values()) == [*theme.OKABE_ITO, theme.GREY]
    assert theme.colours(names[:3]) == {name: chosen[name] for name in names[:3]}


@pytest.mark.parametrize(
    "value_us, text",
    [(0.4213, "0.421 µs"), (17, "17 µs"), (3100, "3.1 ms"), (2.5e6, "2.5 s"), (float("nan"), "n/a")],
)
def test_latencies_read_well(value_us: float, text: str) -> None:
    assert theme.format_us(value_us) == text
