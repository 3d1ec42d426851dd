"""Notebook 30's experiment, its figures and its command, at a small size."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from workbench import targets
from workbench.experiments import kv_fragmentation as experiment
from workbench.experiments.kv_bench import LayoutBench, LayoutCase, measure_copy
from workbench.experiments.kv_findings import compare_steps
from workbench.kv.fragmentation import make_layout
from workbench.kv.pool import KVPool
from workbench.report.figures import kv_fragmentation as figures
from workbench.report.figures import theme
from workbench.rows import Origin, Row, RowStatus, Timing
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
    copy = next(row for row in rows if row.variant == "copy_rows")
    moved_bytes = 2 * int(plans[0].metrics["rows"]) * SMALL.model_layers * 576 * 4
    assert plans[0].metrics["copy_us"] == pytest.approx(moved_bytes / float(copy.metrics["copy_gbps"]) / 1e3)


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
    said = experiment.findings(rows)
    told, fit = " ".join(said), next(row for row in rows if row.variant == "regression")
    assert said[0].startswith("Scatter costs time" if fit.metrics["above_noise"] else "No cost of scatter")
    assert "whole decode step" in said[0] and said[1].startswith("Moving rows (Tier 1)")
    assert "the same slots" in told and "need_sort sorted" in told and "Tier 1, round 1" in told
    assert "closes no gap" in told
    assert all("Derived" in text for text in said if "by the fit it" in text or "times one layer" in text)
    rest = [row for row in rows if row.variant != "regression"]
    assert "nothing can be said" in experiment.findings(rest)[0]


def step_row(layout: str, repeat: int, median_us: float, spread: float = 0.002) -> Row:
    samples = tuple(median_us * (1 + spread * d) for d in (-4, -3, -2, -1, 0, 1, 2, 3, 4))
    timing = Timing(mode="host", l2="n/a", n=9, median_us=median_us, p10_us=min(samples),
                    p90_us=max(samples), samples=samples)  # fmt: skip
    return Row(case_id=f"{layout}{repeat}", experiment="x", variant="whole_step", target="cpu", timing=timing,
               origin=Origin.MEASURED, status=RowStatus.PASSED,
               axes={"layout": layout, "prompt_tokens": 9})  # fmt: skip


@pytest.mark.parametrize(
    ("fresh_us", "worn_us", "spread", "visible"),
    [
        ((100.0, 100.2), 105.0, 0.002, True),
        ((100.0, 108.0), 105.0, 0.002, False),  # the two fresh pools differ by more
        ((100.0, 100.2), 105.0, 0.05, False),  # the interval holds no difference
        ((100.0, 100.2), 95.0, 0.002, True),  # faster is visible too
    ],
)
def test_a_whole_step_decides_by_interval_and_noise(
    rows: list[Row], fresh_us: tuple[float, float], worn_us: float, spread: float, visible: bool
) -> None:
    steps = [step_row("contiguous", i, us, spread) for i, us in enumerate(fresh_us)]
    steps.append(step_row("churned:fifo", 0, worn_us, spread))
    ratio = compare_steps(steps)
    assert ratio is not None and ratio.is_visible == visible
    others = [row for row in rows if row.variant != "whole_step"]
    said = experiment.findings([*others, *steps])
    assert ("not visible in a whole decode step" in said[0]) != visible
    plans = [row for row in others if row.variant == "relocation_plan"]
    if not (visible and worn_us > 100):  # whatever the fit predicts, a step shows nothing to win back
        assert "Moving rows (Tier 1) pays" not in said[1] and plans
    assert compare_steps(steps[:1]) is None


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
    assert row.metrics["beyond_cache"] is False  # 190 kB


def test_the_copy_goes_through_more_than_the_cache() -> None:
    pool = KVPool(1, 40_000, 576, torch.float32)
    row = measure_copy(pool, 5_000, targets.load("cpu"), n=3)
    assert row.metrics["beyond_cache"] is True
    assert row.metrics["device_copy_gbps"] < targets.load("cpu").dram_peak_gbps


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
