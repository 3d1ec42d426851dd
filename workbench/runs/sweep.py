"""What to run: notebooks of a target with validated parameters, decided before anything starts."""

import difflib
import importlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from workbench import targets
from workbench.runs.provenance import sha256
from workbench.targets import ROOT

NOTEBOOKS = ROOT / "notebooks"
NUMBERED = re.compile(r"^\d\d_")


@dataclass(frozen=True)
class PlannedRun:
    """One notebook with every parameter resolved."""

    notebook: Path
    target: str
    params: BaseModel
    skip_reason: str = ""

    @property
    def name(self) -> str:
        return self.notebook.stem

    @property
    def experiment(self) -> str:
        return NUMBERED.sub("", self.name)

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """Resolved values as plain JSON types."""
        return self.params.model_dump(mode="json")

    @property
    def given(self) -> list[str]:
        """Names whose value differs from the default."""
        defaults = type(self.params)().model_dump(mode="json")
        return [name for name, value in self.parameters.items() if value != defaults[name]]

    @property
    def folder_name(self) -> str:
        """`<NN_name>_<param8>`: the hash tells parameter sets of one notebook apart."""
        return f"{self.name}_{sha256(json.dumps(self.parameters, sort_keys=True))[:8]}"


def batch_notebooks(folder: Path = NOTEBOOKS) -> list[Path]:
    """The numbered notebooks in order; `explore` and other live ones are not part of a batch."""
    return sorted(path for path in folder.glob("*.ipynb") if NUMBERED.match(path.name))


def find_notebook(name: str, folder: Path = NOTEBOOKS) -> Path:
    """The notebook by path, name, number ("20") or experiment name. ValueError lists the known ones."""
    if name.endswith(".ipynb") and Path(name).is_file():
        return Path(name).resolve()
    known = sorted(folder.glob("*.ipynb"))
    for path in known:
        if name in (path.name, path.stem, NUMBERED.sub("", path.stem), path.stem[:2]):
            return path
    raise ValueError(f"no notebook {name!r}: choose one of {', '.join(path.stem for path in known)}")


def params_model(notebook: Path) -> type[BaseModel]:
    """The experiment's typed parameters for `notebook`."""
    return _experiment(notebook).Params


def _experiment(notebook: Path) -> Any:
    module_name = f"workbench.experiments.{NUMBERED.sub('', notebook.stem)}"
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise ValueError(
            f"notebook {notebook.name} has no experiment: add {module_name} with a Params model"
        ) from error


def plan_run(notebook: Path, target: str, given: Mapping[str, Any] | None = None) -> PlannedRun:
    """Validate one run completely: target, hardware, notebook form, parameter names and types."""
    asked = (given or {}).get("target", target)
    if asked != target:
        raise ValueError(f"parameter target={asked!r} differs from --target {target}: write --target {asked}")
    targets.require_hardware(targets.load(target))
    require_parameters_cell(notebook)
    params = resolve(params_model(notebook), notebook.stem, {**(given or {}), "target": target})
    skip_reason = getattr(_experiment(notebook), "skip_reason", None)  # an experiment may decline
    return PlannedRun(notebook, target, params, skip_reason(params) if skip_reason else "")


def plan_batch(
    target: str, given: Mapping[str, Any] | None = None, folder: Path = NOTEBOOKS
) -> list[PlannedRun]:
    """Every numbered notebook for `target`; a parameter goes to each notebook that knows it."""
    notebooks = batch_notebooks(folder)
    if not notebooks:
        raise ValueError(f"no numbered notebook in {folder}: add one such as 10_name.ipynb")
    known = {name for path in notebooks for name in params_model(path).model_fields}
    for name in given or {}:
        if name not in known:
            raise ValueError(f"unknown parameter {name!r}: no notebook has it{_suggest(name, known)}")
    return [
        plan_run(
            path, target, {k: v for k, v in (given or {}).items() if k in params_model(path).model_fields}
        )
        for path in notebooks
    ]


def expand_grid(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values: one dict per run."""
    return [dict(zip(grid, values)) for values in itertools.product(*grid.values())]


def resolve(model: type[BaseModel], notebook: str, given: Mapping[str, Any]) -> BaseModel:
    """A parameter model from values or command-line words. ValueError on one line names value and fix."""
    for name in given:
        if name not in model.model_fields:
            raise ValueError(f"unknown parameter {name!r} of {notebook}{_suggest(name, model.model_fields)}")
    values = {name: _parse(model.model_fields[name].annotation, value) for name, value in given.items()}
    try:
        params = model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "parameters"
        why = first["msg"].removeprefix("Value error, ")
        raise ValueError(
            f"parameter {name}={given.get(name)!r} of {notebook} is refused: {why}"
            f" (its type is {type_name(model, name)})"
        ) from error
    for name, value in params.model_dump().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"parameter {name}={value} of {notebook} is not finite: give a number")
    return params


def type_name(model: type[BaseModel], field: str) -> str:
    """The annotation as a reader writes it: `int`, `list[int]`, `Literal['a', 'b']`."""
    if field not in model.model_fields:
        return "unknown"
    annotation = model.model_fields[field].annotation
    plain = (
        annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    )
    return plain.replace("typing.", "")


def parse_assignments(words: Sequence[str]) -> dict[str, str]:
    """`name=value` words as a dict. ValueError names a word without `=`."""
    pairs: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name.strip():
            raise ValueError(f"parameter {word!r} is not name=value: write -p {name.strip() or 'name'}=VALUE")
        if name.strip() in pairs:
            raise ValueError(f"parameter {name.strip()!r} is given twice: keep one -p")
        pairs[name.strip()] = value
    return pairs


def require_parameters_cell(notebook: Path) -> None:
    """Raise ValueError for a notebook into which no parameter could be injected."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{notebook} is not a notebook ({error}): restore it from git") from error
    if not any("parameters" in cell.get("metadata", {}).get("tags", []) for cell in cells):
        raise ValueError(
            f"{notebook.name} has no cell tagged 'parameters': tag one, or its values would be ignored"
        )


def _parse(annotation: Any, value: Any) -> Any:
    """A command-line word in the type its field wants; other values unchanged."""
    if not isinstance(value, str) or annotation is str:
        return value
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError:
        parsed = value
    if _wants_sequence(annotation) and not isinstance(parsed, list | dict | None):
        return [_parse(None, part.strip()) for part in value.split(",")]
    return parsed


def _wants_sequence(annotation: Any) -> bool:
    """True for list, tuple and their unions with None: `-p splits=1,2` is then a list."""
    options = [one for one in get_args(annotation) if one is not type(None)]
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return len(options) == 1 and _wants_sequence(options[0])
    return origin in (list, tuple) or annotation in (list, tuple)


def _suggest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    listed = ", ".join(sorted(known))
    return f": did you mean {close[0]!r}?" if close else f": choose one of {listed}"
