"""Every sample case: the listed part of the answer, as data/samples/README.md says to compare it."""

import json
from pathlib import Path

import pytest

from workbench.diagnose import diagnose

SAMPLES = Path(__file__).resolve().parents[2] / "data" / "samples"
EXPECTED = sorted(SAMPLES.glob("*.expected.json"))
LISTS = ("state_one_of", "must_find", "must_not_find")


def input_of(expected: Path) -> Path:
    stem = expected.name.removesuffix(".expected.json")
    return next(path for path in SAMPLES.glob(f"{stem}.*") if path != expected)


def differences(expected, actual, path="$"):
    """Where `actual` lacks a listed value, compared as the README of the samples says."""
    if isinstance(expected, dict):
        if not isinstance(actual, dict):
            return [f"{path}: {actual!r} is no object"]
        found = [
            d
            for key, value in expected.items()
            for d in differences(value, actual.get(key, "missing"), f"{path}.{key}")
        ]
        return found
    if path.endswith("captured_bs"):
        return [] if sorted(expected) == sorted(actual) else [f"{path}: {actual} instead of {expected}"]
    if isinstance(expected, list):
        if len(actual) != len(expected):
            return [f"{path}: {len(actual)} entries instead of {len(expected)}"]
        return [
            d for i, (e, a) in enumerate(zip(expected, actual)) for d in differences(e, a, f"{path}[{i}]")
        ]
    if isinstance(expected, float):
        close = isinstance(actual, int | float) and abs(actual - expected) <= 0.011
        return [] if close else [f"{path}: {actual!r} instead of {expected!r}"]
    return (
        []
        if expected == actual and type(expected) is type(actual)
        else [f"{path}: {actual!r} instead of {expected!r}"]
    )


def test_all_cases_are_here():
    assert len(EXPECTED) == 34


@pytest.mark.parametrize("path", EXPECTED, ids=lambda path: path.name.removesuffix(".expected.json"))
def test_case(path):
    expected = json.loads(path.read_text())
    diagnosis = diagnose([input_of(path)]).as_dict()
    actual = json.loads(json.dumps(diagnosis, allow_nan=False))
    listed = {key: value for key, value in expected.items() if key not in LISTS}
    assert differences(listed, actual) == []
    if "state_one_of" in expected:
        assert actual["replay"]["state"] in expected["state_one_of"]
    ids = {f["id"] for f in actual["findings"]} | {
        c["id"] for c in actual["causes"] if c["likelihood"] != "excluded"
    }
    assert set(expected.get("must_find", ())) <= ids
    assert not set(expected.get("must_not_find", ())) & ids
