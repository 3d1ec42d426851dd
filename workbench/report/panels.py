"""Live panels: ipywidgets controls over an ordinary figure output that is redrawn in place.

Widgets do not survive the export to HTML. The figure of a panel is not one: it stays in the notebook as the
static twin, showing what was drawn last (in a batch run: the starting values, without controls).
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.experiments import explore
from workbench.report import notebook
from workbench.report.figures import explore as figures

if TYPE_CHECKING:
    import plotly.graph_objects as go


def show_panel(draw: Callable[..., "go.Figure"], controls: dict[str, Any]) -> Any:
    """Show `draw(**values)` below its controls and redraw it when one changes. Returns the controls' box."""
    from IPython.display import display

    values = {name: control.value for name, control in controls.items()}
    live = notebook.RUN_DIR_VARIABLE not in os.environ
    box = _box(controls) if live else None
    if box is not None:
        display(box)
    handle = display(notebook.figure_bundle(draw(**values)), raw=True, display_id=True)

    def redraw(change: dict[str, Any]) -> None:
        now = {name: control.value for name, control in controls.items()}
        handle.update(_bundle_or_error(draw, now), raw=True)

    for control in controls.values():
        control.observe(redraw, names="value")
    return box


def show_splits(params: explore.Params) -> Any:
    """Panel: latency of a verify variant over the split count, timed on the fly."""
    from workbench.attention import variants
    from workbench.report.figures.nsplit_sweep import main_figure

    device = "cpu" if params.target == "cpu" else "cuda"
    names = [v.name for v in variants() if v.splits and device in v.devices and v.backend != "peer"]
    controls = {
        "variant": _choice("variant", names, params.variant),
        "ctx": _slider("ctx", params.ctx, 256, 16384, 256),
        "q_len": _slider("q_len", params.q_len, 1, 32, 1),
    }
    return show_panel(lambda **values: main_figure(explore.sweep_splits(_with(params, values))), controls)


def show_tree(params: explore.Params) -> Any:
    """Panel: the draft tree for a budget, a depth and a certainty of the drafter."""
    controls = {
        "budget": _slider("budget", params.budget, 1, 64, 1),
        "depth": _slider("depth", params.depth, 1, 15, 1),
        "peak": _slider("peak", params.peak, 0.0, 6.0, 0.25),
        "seed": _slider("seed", params.seed, 0, 20, 1),
    }
    return show_panel(
        lambda **values: figures.tree_figure(explore.build_tree(_with(params, values))), controls
    )


def show_pool(params: explore.Params) -> Any:
    """Panel: who holds which slot after the pool was worn by a workload."""
    from workbench.kv.policies import policies
    from workbench.kv.workload import names

    controls = {
        "policy": _choice("policy", [policy.name for policy in policies()], params.policy),
        "workload": _choice("workload", names(), params.workload),
        "slots": _slider("slots", params.slots, 12288, 131072, 4096),
    }
    return show_panel(
        lambda **values: figures.strip_figure(explore.wear_pool(_with(params, values))), controls
    )


def _with(params: explore.Params, values: dict[str, Any]) -> explore.Params:
    """The parameters with some replaced, validated again."""
    return explore.Params.model_validate(params.model_dump() | values)


def _bundle_or_error(draw: Callable[..., "go.Figure"], values: dict[str, Any]) -> dict[str, Any]:
    """The figure, or the one-line message of a combination that is not possible."""
    try:
        return notebook.figure_bundle(draw(**values))
    except ValueError as error:
        return {"text/plain": f"not possible: {error}"}


def _slider(name: str, value: float, low: float, high: float, step: float) -> Any:
    import ipywidgets

    kind = ipywidgets.IntSlider if isinstance(step, int) else ipywidgets.FloatSlider
    return kind(value=value, min=low, max=high, step=step, description=name, continuous_update=False)


def _choice(name: str, options: list[str], value: str) -> Any:
    import ipywidgets

    return ipywidgets.Dropdown(options=options, value=value, description=name)


def _box(controls: dict[str, Any]) -> Any:
    import ipywidgets

    return ipywidgets.HBox(list(controls.values()), layout={"flex_flow": "row wrap"})
