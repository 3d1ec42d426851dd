"""Figures of the live panels: a tree as nodes and edges, a pool as a strip of slots."""

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from workbench.report.figures import theme

if TYPE_CHECKING:
    from workbench.kv.churn import Snapshot
    from workbench.tree import DraftTree

STRIP_ROWS = 32


def tree_figure(tree: "DraftTree") -> go.Figure:
    """Nodes by depth, in pop order from top to bottom; the number is the cumulative probability."""
    depths, parents = tree.depths.tolist(), tree.parents.tolist()
    chances = tree.log_probs.exp().tolist()
    places = _leaf_places(parents)
    expected = sum(chances)
    title = f"{len(tree)} nodes cover {expected:.2f} expected tokens per step if the draft is calibrated"
    figure = theme.new_figure(title, "depth (draft slots)", "place", height=480)
    edges = [(i, parent) for i, parent in enumerate(parents) if parent >= 0]
    figure.add_scatter(
        x=[x for i, parent in edges for x in (depths[parent], depths[i], None)],
        y=[y for i, parent in edges for y in (places[parent], places[i], None)],
        mode="lines",
        line={"color": theme.GREY, "width": 1},
        hoverinfo="skip",
        showlegend=False,
    )
    figure.add_scatter(
        x=depths,
        y=places,
        mode="markers",
        marker={"size": 12, "color": chances, "colorscale": "Cividis", "colorbar": {"title": "probability"}},
        text=[f"node {i}, token {token}" for i, token in enumerate(tree.token_ids.tolist())],
        customdata=chances,
        hovertemplate="%{text}<br>probability %{customdata:.3f}<extra></extra>",
        showlegend=False,
    )
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(visible=False, title_text="")
    return figure


def strip_figure(snapshot: "Snapshot") -> go.Figure:
    """Every slot of the pool, row by row, coloured by the request that holds it; free slots are blank."""
    owners = snapshot.owners()[1:]
    width = -(-len(owners) // STRIP_ROWS)
    grid = np.full(STRIP_ROWS * width, -1.0)
    grid[: len(owners)] = owners
    ranks = {owner: rank for rank, owner in enumerate(snapshot.request_ids)}
    shown = [float(ranks[int(owner)] % 7) if owner >= 0 else None for owner in grid]
    rows = [shown[i * width : (i + 1) * width] for i in range(STRIP_ROWS)]
    score = snapshot.score()
    title = (
        f"{snapshot.policy}: a run of neighbouring slots holds {score.mean_run:.1f} tokens,"
        f" {100 * snapshot.occupancy:.0f} % of the pool is in use"
    )
    figure = theme.new_figure(title, "slot within its row (slots)", "row of the pool (rows)", height=440)
    scale = [[i / 6, colour] for i, colour in enumerate(theme.OKABE_ITO[:7])]
    figure.add_heatmap(z=rows, colorscale=scale, zmin=0, zmax=6, showscale=False, hoverinfo="x+y")
    figure.update_yaxes(autorange="reversed")
    return figure


def _leaf_places(parents: list[int]) -> list[float]:
    """A vertical place per node: leaves one below the other, a parent in the middle of its children."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    places, next_leaf = [0.0] * len(parents), 0
    order = [0]
    for node in order:
        order.extend(children[node])
    leaves_first: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        leaves_first.append(node)
        stack.extend(reversed(children[node]))
    for node in leaves_first:
        if not children[node]:
            places[node], next_leaf = -float(next_leaf), next_leaf + 1
    for node in reversed(order):
        if children[node]:
            places[node] = sum(places[child] for child in children[node]) / len(children[node])
    return places
