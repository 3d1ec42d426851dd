"""A panel redraws its own figure, survives an impossible combination, and leaves a static twin in a batch."""

from unittest.mock import MagicMock, patch

import pytest

from workbench.experiments import explore
from workbench.report import panels
from workbench.report.figures import explore as figures
from workbench.report.figures import theme


@pytest.fixture
def display() -> MagicMock:
    with patch("IPython.display.display") as fake:
        yield fake


def title_of(bundle: dict) -> str:
    return bundle["application/vnd.plotly.v1+json"]["layout"]["title"]["text"]


def test_controls_redraw_the_same_figure(display: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKBENCH_RUN_DIR", raising=False)
    box = panels.show_tree(explore.Params(budget=4))
    first = display.call_args.args[0]
    assert title_of(first).startswith("5 nodes cover") and display.call_args.kwargs["display_id"]
    next(control for control in box.children if control.description == "budget").value = 9
    update = display.return_value.update
    update.assert_called_once()
    assert title_of(update.call_args.args[0]).startswith("10 nodes cover")


def test_impossible_values_say_so_in_place(display: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKBENCH_RUN_DIR", raising=False)
    box = panels.show_pool(explore.Params())
    controls = {control.description: control for control in box.children}
    controls["slots"].min = 256
    controls["slots"].value = 256
    text = display.return_value.update.call_args.args[0]["text/plain"]
    assert text.startswith("not possible: ") and "\n" not in text


def test_batch_run_shows_the_figure_without_controls(
    display: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_RUN_DIR", "unused")
    assert panels.show_pool(explore.Params()) is None
    assert display.call_count == 1 and "plotly-graph-div" in display.call_args.args[0]["text/html"]


def test_tree_figure_places_every_node_once() -> None:
    tree = explore.build_tree(explore.Params(budget=30, seed=3))
    figure = theme.require_words(figures.tree_figure(tree))
    edges, nodes = figure.data
    assert len(nodes.x) == 31 and len(set(zip(nodes.x, nodes.y))) == 31
    assert len(edges.x) == 3 * 30


def test_strip_shows_every_slot_of_every_request() -> None:
    snapshot = explore.wear_pool(explore.Params())
    heatmap = figures.strip_figure(snapshot).data[0]
    taken = sum(value is not None for row in heatmap.z for value in row)
    assert taken == len(snapshot.indices)
