"""environment.yml, pyproject.toml, Makefile and the tracked files agree and name no machine."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SEVEN = {"jupyterlab", "torch", "triton", "cupy-cuda12x", "plotly", "papermill", "ipywidgets"}
NAME = re.compile(r"^[A-Za-z0-9._-]+")
BINARY = {".safetensors", ".parquet", ".gz", ".sqlite", ".png", ".npz", ".bin"}
FOREIGN = re.compile(
    r"https?://[^\s\"')]*(?:/simple\b|pypi\.|artifactory|nexus|devpi)|(?<![\w.])/(?:home|Users|root|work)/(?!alice|user)\w+"
)


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def without_marker(requirement: str) -> str:
    return requirement.split(";")[0].strip()


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_conda_environment_in_step_with_pyproject() -> None:
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in listed if isinstance(entry, dict))
    wanted = [without_marker(one) for one in project()["dependencies"]]
    wanted += [without_marker(one) for one in project()["optional-dependencies"]["gpu-cu12"]]
    assert sorted(pip) == sorted(wanted)
    assert {NAME.match(one).group() for one in pip} >= SEVEN  # type: ignore[union-attr]


def test_constraints_pin_what_they_promise() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert "torch==2.13.0" in pins
    known = {NAME.match(one).group() for one in project()["dependencies"]}  # type: ignore[union-attr]
    assert {NAME.match(pin).group() for pin in pins} <= known  # type: ignore[union-attr]


def test_extras() -> None:
    assert set(project()["optional-dependencies"]) >= {"gpu-cu12", "gpu-cu13", "dev", "cluster"}


def test_no_machine_in_tracked_files() -> None:
    found = []
    for path in tracked_files():
        if path.suffix in BINARY or path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{path.relative_to(ROOT)}: {hit.group()[:80]}" for hit in FOREIGN.finditer(text)]
    assert not found


def test_continuous_integration_calls_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text().rstrip().endswith("make test")
    rules = (ROOT / "Makefile").read_text()
    assert all(
        f"\n{name}:" in rules for name in ("reproduce", "test", "test-all", "lab", "wheelhouse", "clean")
    )
