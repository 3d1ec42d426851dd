"""Notebooks are stripped, thin, and their parameter cell says what the experiment's model says."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.runs import sweep

NOTEBOOKS = sorted(sweep.NOTEBOOKS.glob("*.ipynb"))
BY_NAME = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[dict]:
    return [
        cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind
    ]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def test_stripped() -> None:
    command = [sys.executable, "-m", "nbstripout", "--verify", *map(str, NOTEBOOKS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run `nbstripout notebooks/*.ipynb`: {done.stdout}"


@BY_NAME
def test_thin(path: Path) -> None:
    for cell in cells(path, "code"):
        tree = ast.parse("".join(line for line in cell["source"] if not line.startswith(("%", "!"))))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert node.end_lineno is not None and node.end_lineno - node.lineno + 1 <= 5, node.name


@BY_NAME
def test_opens_with_its_question(path: Path) -> None:
    first = source(cells(path, "markdown")[0]).splitlines()[0]
    assert first.startswith("# ") and first.endswith("?"), first


@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if sweep.NUMBERED.match(path.name)], ids=lambda p: p.stem
)
def test_shows_the_answer_first(path: Path) -> None:
    code = [source(cell) for cell in cells(path, "code")]
    order = [
        "".join(code).find(call) for call in ("notebook.run(", "notebook.show(", "notebook.show_findings(")
    ]
    assert -1 not in order and order == sorted(order), "run, then the answer figure, then findings"
    assert "would refute" in " ".join(source(cell) for cell in cells(path, "markdown")).lower()


@BY_NAME
def test_parameters_cell_equals_the_model(path: Path) -> None:
    tagged = [cell for cell in cells(path, "code") if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1
    fields = sweep.params_model(path).model_fields
    written = {}
    for node in ast.parse(source(tagged[0])).body:
        assert (
            isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
        )
        written[node.target.id] = (ast.unparse(node.annotation), ast.literal_eval(node.value))
    assert list(written) == list(fields)
    for name, (annotation, default) in written.items():
        assert plain(default) == plain(fields[name].get_default(call_default_factory=True)), name
        assert annotation == ast.unparse(ast.parse(sweep.type_name(sweep.params_model(path), name))), name
    comments = [line.partition("  # ")[2] for line in source(tagged[0]).splitlines() if line.strip()]
    assert all(comments), "every parameter has a trailing comment"


def plain(value: object) -> object:
    """Lists and tuples alike: the cell writes one, the model holds the other."""
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def test_every_experiment_model_forbids_unknown_names() -> None:
    for path in NOTEBOOKS:
        model = sweep.params_model(path)
        assert model.model_config.get("extra") == "forbid", path.stem
        assert {"target", "seed"} <= set(model.model_fields), path.stem
        assert all(field.description for field in model.model_fields.values()), path.stem
