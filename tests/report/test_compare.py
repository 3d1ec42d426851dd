"""A verdict knows the noise; unlike machines are refused or named; one batch alone is no error."""

import json
import random
from pathlib import Path

import pytest

from workbench.experiments import compare_runs, stored_rows
from workbench.report.compare import compare_folders, format_comparison
from workbench.report.figures import compare_runs as figures
from workbench.report.figures import theme
from workbench.rows import Row, Timing
from workbench.runs import store

MACHINE = {"cpu": "c", "gpus": [{"name": "NVIDIA H200", "driver": "580.1"}]}


def timing(median: float, spread: float, seed: int, mode: str = "graph", l2: str = "cold") -> Timing:
    generator = random.Random(seed)
    samples = tuple(sorted(median * generator.uniform(1 - spread, 1 + spread) for _ in range(25)))
    return Timing(
        mode=mode, l2=l2, n=25, median_us=samples[12], p10_us=samples[2], p90_us=samples[22], samples=samples
    )


def write_side(folder: Path, timings: dict[str, Timing], machine: dict = MACHINE, **manifest: object) -> Path:
    run = folder / "10_verify_0"
    fields = {
        "experiment": "verify",
        "variant": "v",
        "target": "h200",
        "origin": "measured",
        "status": "PASSED",
    }
    rows = [Row.model_validate({**fields, "case_id": case, "timing": t}) for case, t in timings.items()]
    store.write_rows(rows, run / "rows.parquet")
    stored = {
        "target": "h200",
        "machine": machine,
        "timer_version": "t1",
        "code": {"sha": "abcdef0123"},
    } | manifest
    (run / "manifest.json").write_text(json.dumps(stored))
    (folder / "batch.json").write_text(json.dumps({"status": "PASSED"}))
    return folder


@pytest.mark.parametrize("factor, verdict", [(1.0, "same within noise"), (1.3, "slower"), (0.7, "faster")])
def test_verdict(tmp_path: Path, factor: float, verdict: str) -> None:
    first = write_side(tmp_path / "a", {"c": timing(100, 0.02, 1)})
    second = write_side(tmp_path / "b", {"c": timing(100 * factor, 0.02, 2)})
    (pair,) = compare_folders(first, second).pairs
    assert pair.verdict == verdict and pair.low <= pair.ratio <= pair.high  # type: ignore[operator]
    assert verdict in format_comparison(compare_folders(first, second))


def test_the_same_distribution_is_rarely_called_a_change() -> None:
    """An independent oracle: false alarms over 400 pairs drawn from one distribution."""
    verdicts = [
        stored_rows.judge(timing(100, 0.3, 2 * i), timing(100, 0.3, 2 * i + 1))[3] for i in range(400)
    ]
    assert sum(verdict != "same within noise" for verdict in verdicts) <= 8


def test_wide_noise_hides_a_small_change() -> None:
    assert stored_rows.judge(timing(100, 0.4, 1), timing(105, 0.4, 2))[3] == "same within noise"


@pytest.mark.parametrize(
    "change, text",
    [
        (
            {"machine": {"cpu": "c", "gpus": [{"name": "NVIDIA B200", "driver": "580.1"}]}},
            "GPU differs: NVIDIA H200",
        ),
        (
            {"machine": {"cpu": "c", "gpus": [{"name": "NVIDIA H200", "driver": "575.9"}]}},
            "driver differs: 580",
        ),
        ({"timer_version": "t2"}, "timer version differs: t1 against t2"),
    ],
)
def test_unlike_sides_are_refused(tmp_path: Path, change: dict, text: str) -> None:
    first = write_side(tmp_path / "a", {"c": timing(100, 0.02, 1)})
    second = write_side(tmp_path / "b", {"c": timing(100, 0.02, 2)}, **change)
    with pytest.raises(ValueError, match="refused to compare") as caught:
        compare_folders(first, second)
    assert text in str(caught.value)
    assert f"NOT THE SAME CONDITIONS: {text}" in format_comparison(compare_folders(first, second, force=True))


def test_unlike_l2_gets_no_ratio(tmp_path: Path) -> None:
    first = write_side(tmp_path / "a", {"c": timing(100, 0.02, 1)})
    second = write_side(tmp_path / "b", {"c": timing(100, 0.02, 2, l2="warm")})
    (pair,) = compare_folders(first, second).pairs
    assert pair.ratio is None and pair.reason == "L2 or mode differs: graph/cold against graph/warm"


def test_sides_without_rows_or_common_cases(tmp_path: Path) -> None:
    first = write_side(tmp_path / "a", {"c": timing(100, 0.02, 1)})
    other = write_side(tmp_path / "b", {"d": timing(100, 0.02, 1)})
    with pytest.raises(ValueError, match="no timed case in common"):
        compare_folders(first, other)
    with pytest.raises(FileNotFoundError, match="no folder"):
        compare_folders(first, tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no rows\.parquet below"):
        compare_folders(first, tmp_path / "empty")


def test_one_batch_alone_is_described(tmp_path: Path) -> None:
    write_side(tmp_path / "h200" / "20260101T000000Z_abc", {"c": timing(100, 0.02, 1)})
    rows = compare_runs.run(compare_runs.Params(target="h200", runs_root=str(tmp_path)), step=lambda _: None)
    assert [row.metrics for row in rows] == [{"rows": 1, "timed": 1}]
    assert any("nothing to compare with" in text for text in compare_runs.findings(rows))
    theme.require_words(figures.main_figure(rows))


def test_no_batch_at_all_is_described(tmp_path: Path) -> None:
    rows = compare_runs.run(compare_runs.Params(target="h200", runs_root=str(tmp_path)), step=lambda _: None)
    assert compare_runs.findings(rows)[0] == "This batch stores 0 rows of 0 experiments."
    theme.require_words(figures.main_figure(rows))


def test_batch_before_and_other_target(tmp_path: Path) -> None:
    write_side(tmp_path / "h200" / "20260101T000000Z_abc", {"c": timing(100, 0.02, 1)})
    write_side(tmp_path / "h200" / "20260102T000000Z_abc", {"c": timing(130, 0.02, 2)})
    b200 = {"cpu": "c", "gpus": [{"name": "NVIDIA B200", "driver": "580.1"}]}
    write_side(tmp_path / "b200" / "20260101T000000Z_abc", {"c": timing(50, 0.02, 3)}, machine=b200)
    rows = compare_runs.run(compare_runs.Params(target="h200", runs_root=str(tmp_path)), step=lambda _: None)
    cases = {row.axes["kind"]: row.metrics["verdict"] for row in rows if row.variant == "case"}
    assert cases == {"run against run": "slower", "b200 against h200": "slower"}
    found = " ".join(compare_runs.findings(rows))
    assert (
        "20260101T000000Z_abc): 1 slower." in found
        and "b200 against h200: NOT the same conditions (GPU differs" in found
    )
    theme.require_words(figures.main_figure(rows))


def test_baseline_is_the_batch_that_shares_most(tmp_path: Path) -> None:
    """A later single run must not hide the last full batch."""
    for name in ("20260101T000000Z_full", "20260103T000000Z_now"):
        folder = write_side(tmp_path / "h200" / name, {"c": timing(100, 0.02, 1)})
        store.write_rows([], folder / "20_nsplit_0" / "rows.parquet")
    write_side(tmp_path / "h200" / "20260102T000000Z_one", {"c": timing(130, 0.02, 2)})
    rows = compare_runs.run(compare_runs.Params(target="h200", runs_root=str(tmp_path)), step=lambda _: None)
    assert [row.axes["first"] for row in rows if row.variant == "case"] == ["20260101T000000Z_full"]


def checked_side(name: str, load: float | None) -> stored_rows.Side:
    """A side with notebook 00's row about neighbours."""
    row = Row.model_validate({
        "case_id": "state/neighbours", "experiment": "target_check", "variant": "neighbours", "target": "cpu",
        "origin": "measured", "status": "PASSED",
        "metrics": {} if load is None else {"load_average": load, "cores": 2},
    })  # fmt: skip
    return stored_rows.Side(name, [row])


def test_the_load_of_both_sides_is_told() -> None:
    idle, busy, silent = checked_side("a", 0.2), checked_side("b", 1.8), checked_side("c", None)
    assert stored_rows.load_remark(idle, busy) == "load per core when notebook 00 ran: 0.10 against 0.90"
    assert stored_rows.load_remark(silent, busy).endswith("unknown against 0.90")
    assert stored_rows.load_remark(silent, silent) == ""
    rows = compare_runs._compare("cpu", idle, busy, "run against run")
    assert any("0.10 against 0.90" in text for text in compare_runs._kind_findings("run against run", rows))
