"""Figures state a finding, name units and use colours that every reader can tell apart."""

import pytest

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
