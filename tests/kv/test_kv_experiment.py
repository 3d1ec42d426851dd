"""Notebook 30's experiment, its figures and its command, at a small size."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from workbench import targets
from workbench.experiments import kv_fragmentation as experiment
from workbench.experiments.kv_bench import LayoutBench, LayoutCase, measure_copy
from workbench.kv.fragmentation import make_layout
from workbench.kv.pool import KVPool
from workbench.report.figures import kv_fragmentation as figures
from workbench.report.figures import theme
from workbench.rows import Origin, Row, RowStatus
from workbench.shapes import VerifyShape

SMALL = experiment.Params(
    workload="long_decode_small",
    pool_slots=24_576,
    context=512,
    heads=2,
    ages=[0.4, 1.5],
    samples=3,
    budget_s=1.0,
)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    steps: list[str] = []
    rows = experiment.run(SMALL, steps.append)
    assert len(steps) == 6 and all(steps)
    return rows


def test_every_policy_age_and_layout_has_a_correct_row(rows: list[Row]) -> None:
    aged = [row for row in rows if "age" in row.axes]
    assert {(row.variant, row.axes["age"]) for row in aged} == {
        (name, age) for name in experiment.POLICIES for age in (0.4, 1.5)
    }
    assert all(row.status is RowStatus.PASSED for row in rows), [row.reason for row in rows]
    assert len({row.case_id for row in rows}) == len(rows)
    for row in aged:
        assert row.timing and row.metrics["tokens"] == 512 and row.errors["rel_fro"] < 1e-5
        assert len(str(row.metrics["strip"])) == experiment.STRIP_SLOTS


def test_the_settings_differ_only_after_the_first_trip(rows: list[Row]) -> None:
    cells = {(row.variant, row.axes["age"]): row.metrics for row in rows if "age" in row.axes}
    assert cells["fifo", 0.4]["strip"] == cells["need_sort", 0.4]["strip"]
    assert cells["fifo", 1.5]["strip"] != cells["need_sort", 1.5]["strip"]
    assert cells["need_sort", 1.5]["pool_descent_rate"] < cells["fifo", 1.5]["pool_descent_rate"]
    assert cells["need_sort", 0.4]["pool_gap_rate"] > 0  # gaps come first


def test_relocation_ran_in_rounds_and_removed_gaps(rows: list[Row]) -> None:
    plans = [row for row in rows if row.variant == "relocation_plan"]
    assert plans and all(row.origin is Origin.DERIVED and row.timing is None for row in plans)
    assert int(plans[0].metrics["rows"]) > 0
    assert int(plans[0].metrics["gaps_after"]) < int(plans[0].metrics["gaps_before"])
    layouts = {row.axes["layout"]: row.metrics["gap_rate"] for row in rows if row.variant == "tiers"}
    assert layouts["relocated:fifo"] < layouts["churned:fifo"] / 2


def test_whole_steps_give_the_same_tokens_on_every_pool(rows: list[Row]) -> None:
    steps = [row for row in rows if row.variant == "whole_step"]
    assert [row.axes["layout"] for row in steps] == [
        "contiguous",
        "churned:fifo",
        "churned:need_sort",
        "contiguous",
    ]
    assert all(row.timing and row.timing.n > 3 for row in steps)
    assert steps[1].metrics["gap_rate"] > steps[0].metrics["gap_rate"] == 0


def test_findings_say_what_the_rows_say(rows: list[Row]) -> None:
    told = " ".join(experiment.findings(rows))
    fit = next(row for row in rows if row.variant == "regression")
    assert ("Scatter costs time" in told) == bool(fit.metrics["above_noise"])
    assert "the same slots" in told and "need_sort sorted" in told and "Tier 1, round 1" in told
    assert (
        "nothing can be said" in experiment.findings([row for row in rows if row.variant != "regression"])[0]
    )


@pytest.mark.parametrize(
    "draw", [figures.main_figure, figures.wear_figure, figures.strip_figure, figures.tier_figure]
)
def test_figures_draw_and_state_a_finding(rows: list[Row], draw) -> None:
    figure = theme.require_words(draw(rows))
    assert len(figure.data) > 0 and len(figure.to_json()) < 400_000


def test_a_wrong_layout_is_not_timed() -> None:
    shape = VerifyShape(1, 2, 2, 128, "fp32", mask_layout="causal")
    bench = LayoutBench(shape, targets.load("cpu"), 1000)
    good = LayoutCase("contiguous", torch.arange(1, 129))
    bad = LayoutCase("random", make_layout("random", 128, 1000, seed=4))
    bench.fill(good.slots)
    rows = bench.measure([good, bad], n=3, budget_s=1, fill=False)
    assert rows[0].timing and rows[0].status is RowStatus.PASSED
    assert rows[1].timing is None and rows[1].status is RowStatus.INCORRECT and rows[1].reason
    with pytest.raises(ValueError, match="case_id"):
        bench.measure([good, good], n=3, budget_s=1)


def test_the_copy_is_checked_and_compared() -> None:
    row = measure_copy(KVPool(2, 600, 40, torch.float32), 200, targets.load("cpu"), n=3)
    assert row.status is RowStatus.PASSED and row.bytes == 2 * 200 * 2 * 160
    assert row.metrics["copy_gbps"] > 0 and row.metrics["share_of_device_copy"] > 0


def test_notebook_parameters_are_those_of_the_experiment() -> None:
    cells = json.loads((targets.ROOT / "notebooks" / "30_kv_fragmentation.ipynb").read_text())["cells"]
    source = next(cell for cell in cells if "parameters" in cell["metadata"].get("tags", []))["source"]
    scope: dict = {}
    exec("".join(source), scope)
    fields = experiment.Params.model_fields
    assert {name: scope[name] for name in fields} == {name: field.default for name, field in fields.items()}
    assert set(scope["__annotations__"]) == set(fields)


def test_bench_kv_prints_and_writes_rows(tmp_path: Path) -> None:
    from workbench.cli import load_commands
    from workbench.runs.store import read_rows

    out = tmp_path / "rows.parquet"
    sizes = ["--context", "256", "--pool-gb", "0.01", "--samples", "3", "--q-len", "2"]
    arguments = ["bench", "kv", "--target", "cpu", *sizes, "--out"]
    result = CliRunner().invoke(load_commands(), [*arguments, str(out)])
    assert result.exit_code == 0, result.output
    stored = read_rows(out)
    allocators = [row for row in stored if row.case_id.startswith("allocator-fifo")]
    assert len(allocators) == 2 and all(row.timing.median_us < 30 for row in allocators)
    assert any(row.axes.get("place") == "far" and row.timing for row in stored)
    with pytest.raises(ValueError, match="--pool-gb x"):
        CliRunner().invoke(load_commands(), ["bench", "kv", "--pool-gb", "x"], catch_exceptions=False)
