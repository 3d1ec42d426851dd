"""Rows survive the file exactly; a damaged or absent file is named."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import rows_file
from workbench.rows import GpuState, Row, Timing
from workbench.runs import store

SCALAR = st.one_of(st.booleans(), st.integers(-(2**53), 2**53), st.text(max_size=8), st.none())
FINITE = st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.dictionaries(st.sampled_from(["nsplit", "kv_len", "layout", "bs"]), SCALAR | FINITE)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    has_timing = draw(st.booleans())
    samples = tuple(draw(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=5)))
    timing = Timing(mode="graph", l2="cold", n=len(samples), median_us=3, p10_us=2, p90_us=4, samples=samples)
    errors = draw(st.dictionaries(st.sampled_from(["rel_fro", "max_abs"]), FINITE | st.just(math.inf)))
    return Row(
        case_id=draw(st.text(min_size=1, max_size=8)),
        experiment="e",
        variant="v",
        target="cpu",
        origin="measured",
        status="PASSED" if has_timing else draw(st.sampled_from(["PASSED", "SKIPPED"])),
        reason="because",
        axes=draw(NAMES),
        metrics=draw(NAMES),
        errors=errors,
        timing=timing if has_timing else None,
        gpu=GpuState(clock_max_mhz=1500) if draw(st.booleans()) else None,
        bytes=draw(st.none() | st.integers(0, 2**60)),
    )


@given(st.lists(rows(), max_size=6))
def test_rows_survive(tmp_path_factory: pytest.TempPathFactory, written: list[Row]) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    store.write_rows(written, path)
    assert store.read_rows(path) == written
    assert [entry.name for entry in path.parent.iterdir()] == ["rows.parquet"]


def row(case: str, **axes: object) -> Row:
    fields = {"experiment": "e", "variant": "v", "target": "cpu", "origin": "measured", "status": "PASSED"}
    return Row.model_validate({**fields, "case_id": case, "axes": axes})


def test_nan_is_kept_as_an_error_and_absent_as_a_metric(tmp_path: Path) -> None:
    fields = row("a").model_dump() | {"errors": {"rel_fro": math.nan}, "metrics": {"x": math.nan}}
    path = store.write_rows([Row.model_validate(fields)], tmp_path / "rows.parquet")
    read = store.read_rows(path)[0]
    assert math.isnan(read.errors["rel_fro"]) and read.metrics["x"] is None


def test_query_unites_files_with_different_columns(tmp_path: Path) -> None:
    paths = [
        store.write_rows([row("a", nsplit=1), row("b", nsplit="auto")], tmp_path / "one" / "rows.parquet"),
        store.write_rows([row("c", budget=16)], tmp_path / "two" / "rows.parquet"),
    ]
    assert store.find_rows(tmp_path) == paths
    found = store.query_rows(paths, "select case_id, axis_nsplit, axis_budget from rows order by case_id")
    assert [tuple(one.values()) for one in found] == [("a", "1", None), ("b", "auto", None), ("c", None, 16)]


def test_unfinished_runs_are_not_found(tmp_path: Path) -> None:
    store.write_rows([row("a")], tmp_path / ".partial-10_x" / "rows.parquet")
    assert store.find_rows(tmp_path) == []
    with pytest.raises(FileNotFoundError, match="no rows file to query"):
        store.connect([])


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "column", "row"])
def test_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = store.write_rows([row("a")], tmp_path / "rows.parquet")
    data = path.read_bytes()
    if damage in ("column", "row"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        values = {"case_id": ["a"]} | ({"row_json": ['{"case_id": "a"}']} if damage == "row" else {})
        pq.write_table(pa.table(values), path)
    else:
        path.write_bytes({"empty": b"", "cut": data[: len(data) // 2], "text": b"not parquet"}[damage])
    with pytest.raises(ValueError, match="is damaged") as caught:
        store.read_rows(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no rows file"):
        store.read_rows(tmp_path / "rows.parquet")


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.write_rows([row("old")], tmp_path / "rows.parquet")

    def fill_disk(*_: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(rows_file.os, "replace", fill_disk)
    with pytest.raises(OSError, match="No space left"):
        store.write_rows([row("new")], path)
    assert [one.case_id for one in store.read_rows(path)] == ["old"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.parquet"]
