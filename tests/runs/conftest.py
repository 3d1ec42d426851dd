"""Small notebooks whose only purpose is to end in a known way."""

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from tiny_notebooks import Recorder, TinyParams

from workbench.runs import execute
from workbench.runs.sweep import PlannedRun


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., PlannedRun]:
    """make_run(name, *code cells, x=...) -> a planned run of a new notebook."""

    def make(name: str, *sources: str, **parameters: int) -> PlannedRun:
        notebook = nbformat.v4.new_notebook()
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        parameters_cell = "target: str = 'cpu'  # t\nseed: int = 0  # s\nx: int = 1  # a number"
        notebook.cells = [
            nbformat.v4.new_code_cell(parameters_cell, metadata={"tags": ["parameters"]}),
            *(nbformat.v4.new_code_cell(source) for source in sources),
        ]
        path = tmp_path / f"{name}.ipynb"
        nbformat.write(notebook, path)
        return PlannedRun(path, "cpu", TinyParams(**parameters))

    return make


@pytest.fixture
def open_batch(tmp_path: Path) -> Callable[..., execute.Batch]:
    """open_batch(**options) -> an empty batch below tmp_path with the real renderers."""
    from workbench.report.html import render_report
    from workbench.report.index import render_index

    def make(**options: object) -> execute.Batch:
        settings = {
            "render_run": render_report,
            "render_index": render_index,
            "progress": Recorder(),
            "cell_timeout_s": 60,
            **options,
        }
        return execute.open_batch("cpu", tmp_path / "papermill_runs", **settings)

    return make
