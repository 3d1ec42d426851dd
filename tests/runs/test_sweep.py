"""Parameters are refused before anything starts, on one line that names the value and the fix."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from workbench.runs import sweep
from workbench.runs.sweep import PlannedRun


class Params(BaseModel):
    model_config = ConfigDict(extra="forbid")
    target: str = Field("cpu", description="target")
    seed: int = Field(0, description="seed")
    nsplit: int | str = Field("auto", description="split count")
    splits: list[int] = Field([1, 2], description="split counts")
    backend: Literal["fa3", "mla"] = Field("fa3", description="backend")
    scale: float = Field(1.0, description="scale")
    limits: tuple[int, ...] | None = Field(None, description="limits")
    label: str = Field("a", description="label")


@pytest.mark.parametrize(
    "word, value",
    [
        ("nsplit=4", 4),
        ("nsplit=auto", "auto"),
        ("splits=[1, 8]", [1, 8]),
        ("splits=1,8", [1, 8]),
        ("splits=8", [8]),
        ("limits=3,4", (3, 4)),
        ("limits=null", None),
        ("backend=mla", "mla"),
        ("scale=3", 3.0),
        ("label=7", "7"),
        ("label=a=b", "a=b"),
    ],
)
def test_words_become_typed_values(word: str, value: object) -> None:
    params = sweep.resolve(Params, "20_x", sweep.parse_assignments([word]))
    assert getattr(params, word.partition("=")[0]) == value


@pytest.mark.parametrize(
    "word, message",
    [
        ("n_splti=3", "unknown parameter 'n_splti' of 20_x: did you mean 'nsplit'?"),
        ("zzz=3", "unknown parameter 'zzz' of 20_x: choose one of backend, label"),
        ("seed=x", "seed='x' of 20_x is refused"),
        ("backend=fa2", "backend='fa2' of 20_x is refused: Input should be 'fa3' or 'mla'"),
        ("scale=NaN", "scale=nan of 20_x is not finite"),
        ("splits=1,x", "splits='1,x' of 20_x is refused"),
    ],
)
def test_bad_values_name_value_and_fix(word: str, message: str) -> None:
    with pytest.raises(ValueError, match="20_x") as caught:
        sweep.resolve(Params, "20_x", sweep.parse_assignments([word]))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_words_without_a_sign_or_given_twice() -> None:
    with pytest.raises(ValueError, match="'seed' is not name=value: write -p seed=VALUE"):
        sweep.parse_assignments(["seed"])
    with pytest.raises(ValueError, match="'seed' is given twice"):
        sweep.parse_assignments(["seed=1", "seed=2"])


@given(
    st.integers(-1000, 1000),
    st.lists(st.integers(0, 99), min_size=1),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_value_survives_the_command_line(seed: int, splits: list[int], scale: float) -> None:
    words = [f"seed={seed}", f"splits={','.join(map(str, splits))}", f"scale={scale!r}"]
    params = sweep.resolve(Params, "20_x", sweep.parse_assignments(words))
    assert params.model_dump(include={"seed", "splits"}) == {"seed": seed, "splits": splits}
    assert math.isclose(params.model_dump()["scale"], scale)


def test_grid_is_every_combination_once() -> None:
    points = sweep.expand_grid({"a": ["1", "2"], "b": ["x", "y", "z"]})
    assert len({tuple(point.items()) for point in points}) == 6
    assert sweep.expand_grid({}) == [{}]


def test_folder_name_tells_parameter_sets_apart() -> None:
    names = {PlannedRun(Path("20_x.ipynb"), "cpu", Params(seed=seed)).folder_name for seed in (0, 1, 0)}
    assert len(names) == 2 and all(name.startswith("20_x_") and len(name) == 13 for name in names)


def test_absent_notebook_target_and_hardware() -> None:
    with pytest.raises(ValueError, match="no notebook '77': choose one of 00_target_check"):
        sweep.find_notebook("77")
    notebook = sweep.find_notebook("00")
    assert notebook == sweep.find_notebook("target_check") == sweep.find_notebook(str(notebook))
    with pytest.raises(ValueError, match="unknown target 'h300': choose one of"):
        sweep.plan_run(notebook, "h300")


def test_gpu_target_without_the_gpu_is_refused() -> None:
    from workbench import targets

    if targets.detect().backend == "cuda":
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="target 'h200' needs a NVIDIA H200; this machine is 'cpu'"):
        sweep.plan_run(sweep.find_notebook("00"), "h200")


def test_notebook_without_parameters_cell_is_refused(
    tmp_path: Path, make_run: Callable[..., PlannedRun]
) -> None:
    path = make_run("00_target_check", "1").notebook
    content = json.loads(path.read_text())
    content["cells"][0]["metadata"] = {}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="has no cell tagged 'parameters'"):
        sweep.plan_run(path, "cpu")
    path.write_text("{")
    with pytest.raises(ValueError, match="is not a notebook"):
        sweep.plan_run(path, "cpu")


def test_batch_gives_a_parameter_to_those_who_know_it() -> None:
    planned = sweep.plan_batch("cpu", {"seed": "3"})
    assert planned and all(run.parameters["seed"] == 3 for run in planned)
    assert [run.name for run in planned] == sorted(run.name for run in planned)
    with pytest.raises(ValueError, match="unknown parameter 'sede': no notebook has it: did you mean 'seed'"):
        sweep.plan_batch("cpu", {"sede": "3"})
