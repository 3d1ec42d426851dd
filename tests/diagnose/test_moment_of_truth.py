"""Notebook 60's experiment: before, hypotheses, cause, after, from rows only."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

from workbench.decode.shadow import ShadowReport
from workbench.experiments import fault_runs, moment_of_truth
from workbench.report.figures import moment_of_truth as figures
from workbench.report.figures import theme
from workbench.rows import Origin, RowStatus

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "samples" / "04-sglang-eager-until-batch-drains.log"


@pytest.fixture(scope="module")
def rows():
    params = moment_of_truth.Params(lines=6, every_fault=False, inputs=str(SAMPLE))
    return moment_of_truth.run(params, step=lambda name: None)


def test_the_fix_restores_replay(rows):
    [before], [after] = moment_of_truth.select(rows, "before"), moment_of_truth.select(rows, "after")
    assert before.metrics["replay_share"] < 0.5 and after.metrics["replay_share"] == 1.0
    assert before.metrics["log_lines"] == 6 and before.metrics["log_false"] >= 4
    assert before.metrics["concluded"] == "verify_width_mismatch"
    assert before.timing.mode == "host" and before.timing.n >= 8


def test_hypotheses_are_derived_and_carry_no_timing(rows):
    stated = moment_of_truth.select(rows, "hypothesis")
    assert {row.variant for row in stated} >= {"tree build", "mask", "scattered KV", "launches"}
    assert all(row.origin is Origin.DERIVED and row.timing is None for row in stated)
    assert all(row.metrics["explains_us"] >= 0 for row in stated)


def test_findings_hold_the_rows_numbers_and_the_users_verdict(rows):
    told = " ".join(moment_of_truth.findings(rows))
    [before] = moment_of_truth.select(rows, "before")
    assert f"{before.metrics['log_false']} of 6 decode log lines say False" in told
    assert "1 of 1 injected faults are named" in told
    assert "Your files: mixed, replayed 6 / eager 3 / unknown 1" in told


def test_a_wrong_verdict_is_an_incorrect_row_and_said_so(rows):
    [verdict] = moment_of_truth.select(rows, "verdict")
    wrong = verdict.model_copy(update={"status": RowStatus.INCORRECT, "reason": "injected a, concluded b"})
    told = moment_of_truth.findings([wrong])
    assert "0 of 1 injected faults are named without being told." in told
    assert "Wrong verdict for tree_cut: injected a, concluded b." in told


def report(**wrong) -> ShadowReport:
    fields = {"step": 3, "replayed": True, "wrong_requests": [], "logits_error": 0.0, "kv_error": 0.0}
    return ShadowReport(**fields | {"stray_slots": []} | wrong)


@pytest.mark.parametrize(
    "reports, status, reason",
    [
        ([report()], RowStatus.PASSED, ""),
        ([report(), report(wrong_requests=[1])], RowStatus.INCORRECT, "step 3"),
        ([report(logits_error=0.5)], RowStatus.INCORRECT, "step 3"),
        ([], RowStatus.SKIPPED, "no step was recomputed"),
    ],
)
def test_a_run_counts_only_when_the_shadow_check_agreed(reports, status, reason):
    found, why = fault_runs.shadow_verdict(types.SimpleNamespace(shadow=reports))
    assert found is status and reason in why and bool(why) == (status is not RowStatus.PASSED)


def test_the_shadow_check_ran_before_and_after(rows):
    for run in ("before", "after"):
        [row] = moment_of_truth.select(rows, run)
        assert row.status is RowStatus.PASSED and row.timing is not None


def test_findings_and_figure_of_a_wrong_run_give_no_time(rows):
    [before], [after] = moment_of_truth.select(rows, "before"), moment_of_truth.select(rows, "after")
    told = " ".join(moment_of_truth.findings([before, after]))
    assert f"from {before.timing.median_us:.0f} to {after.timing.median_us:.0f} µs" in told
    assert any(verdict in told for verdict in ("same within noise", "faster", "slower"))
    wrong = {"status": RowStatus.INCORRECT, "reason": "step 3: KV differs", "timing": None}
    untimed = [before.model_copy(update=wrong), after]
    told = " ".join(moment_of_truth.findings(untimed))
    assert "no times are compared: before is INCORRECT, step 3: KV differs" in told
    assert "(of a run whose results are wrong: no measurement) could be explained at most" in told
    assert "median step" not in told and "tokens/s" not in told
    assert "before<br>(incorrect: no measurement)" in figures.main_figure(untimed).data[0].y


@pytest.mark.parametrize("others", ["", f"{SAMPLE}, "])
def test_a_wrong_path_is_refused_before_anything_runs(tmp_path, others):
    with pytest.raises(ValueError, match=r"no file '.*gone\.log' of inputs=.*: give paths"):
        moment_of_truth.Params(inputs=f"{others}{tmp_path / 'gone.log'}")
    with pytest.raises(ValueError, match="no file '' of inputs=','"):
        moment_of_truth.Params(inputs=",")
    assert moment_of_truth.Params(inputs=f"{others}{tmp_path}").inputs.endswith(str(tmp_path))


def test_a_path_that_vanished_is_told_before_anything_is_decoded(tmp_path):
    path, steps = tmp_path / "gone.log", []
    path.touch()
    params = moment_of_truth.Params(inputs=str(path))
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"gone\.log"):
        moment_of_truth.run(params, step=steps.append)
    assert steps == ["diagnose your files"]


def test_figures_state_their_finding(rows):
    for make in (figures.main_figure, figures.hypotheses_figure, figures.verdicts_figure):
        theme.require_words(make(rows))


@pytest.mark.parametrize("name", ["gremlin", ""])
def test_an_unknown_fault_is_no_parameter(name):
    with pytest.raises(ValueError, match=f"fault '{name}': choose one of .*tree_cut"):
        moment_of_truth.Params(fault=name)


def test_the_experiment_is_imported_without_torch():
    code = "import sys, workbench.experiments.moment_of_truth; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_every_verdict_of_the_default_run_is_right():
    rows = moment_of_truth.run(moment_of_truth.Params(lines=4), step=lambda name: None)
    verdicts = moment_of_truth.select(rows, "verdict")
    assert len(verdicts) >= 25
    assert [row.reason for row in verdicts if row.status is not RowStatus.PASSED] == []
