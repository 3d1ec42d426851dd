"""The commands of this area, run as a user does."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from workbench.cli import bench_verify, load_commands
from workbench.experiments.eager_vs_graph import require_models
from workbench.model.presets import PRESETS
from workbench.runs.store import read_rows

CASE = "bs1-h2-q3-ctx40-random-tree-fp32"
SAMPLES = Path(__file__).resolve().parents[2] / "data" / "samples"


def invoke(*arguments, env=None):
    return CliRunner().invoke(load_commands(), list(arguments), env=env)


def test_bench_verify_prints_a_table_and_writes_rows(tmp_path):
    out = tmp_path / "rows.parquet"
    done = invoke(
        "bench", "verify", "--target", "cpu", "--variants", "torch_split,cuda_flash", "--shapes", CASE,
        "--samples", "3", "--out", str(out),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert CASE in done.output and "not run: cuda_flash runs on cuda" in done.output
    assert [row.status.value for row in read_rows(out)] == ["PASSED", "UNSUPPORTED"]


def test_bench_verify_json_has_one_strict_row_a_line():
    done = invoke(
        "bench", "verify", "--variants", "torch_split", "--shapes", CASE, "--samples", "3", "--json"
    )
    [row] = [json.loads(line) for line in done.stdout.splitlines()]
    assert row["variant"] == "torch_split" and row["timing"]["median_us"] > 0
    assert f"--shapes {CASE}" in row["repro"]


def test_the_repro_command_of_a_row_runs():
    done = invoke(
        "bench", "verify", "--variants", "torch_split", "--shapes", CASE, "--samples", "3", "--json"
    )
    command = json.loads(done.stdout.splitlines()[0])["repro"].split()
    again = invoke(*command[1:], "--samples", "3")
    assert again.exit_code == 0, again.output


def test_a_wrong_variant_ends_with_exit_code_1(monkeypatch):
    from workbench.attention import torch_split

    monkeypatch.setattr(torch_split, "launch", lambda plan, call: call.out.zero_())
    done = invoke("bench", "verify", "--variants", "torch_split", "--shapes", CASE, "--samples", "3")
    assert done.exit_code == 1 and "INCORRECT" in done.output


def test_bench_splits_compares_auto_with_the_sweep():
    done = invoke(
        "bench", "splits", "--target", "cpu", "--variants", "torch_split", "--shapes", CASE, "--counts=1,2",
        "--samples", "6",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "regret" in done.output


@pytest.mark.parametrize("counts", ["a", "1,0", "1,", "", "auto"])
def test_bad_split_counts_are_refused_before_any_work(counts, monkeypatch):
    monkeypatch.setattr(bench_verify, "choose_target", lambda name: pytest.fail("work began"))
    done = invoke("bench", "splits", f"--counts={counts}")
    assert isinstance(done.exception, ValueError) and f"--counts {counts!r}" in str(done.exception)
    assert bench_verify.parse_counts("4, 1,4") == [4, 1], "each once"


def test_the_help_of_bench_step_names_every_preset_that_is_accepted():
    shown = invoke("bench", "step", "--help", env={"COLUMNS": "300"}).output.replace(",", " ").split()
    names = ["auto", "tiny", "narrow61", *PRESETS]
    require_models(",".join(names[1:]))
    assert set(names) <= set(shown)


def test_once_launches_without_a_table():
    done = invoke("bench", "verify", "--once", "--variants", "torch_split", "--shapes", CASE)
    assert done.exit_code == 0 and "median" not in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--variants", "gremlin"), "variant='gremlin'"),
        (("--shapes", "bs1"), "case 'bs1': write it like"),
        (("--nsplit", "0"), "nsplit='0'"),
        (("--mode", "tape"), "'tape': choose one of graph, eager"),
        (("--tunables", "block_n"), "--tunables block_n: write name=value"),
        (("--target", "h200"), "needs a NVIDIA H200"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    done = invoke("bench", "verify", *arguments)
    assert isinstance(done.exception, ValueError) and message in str(done.exception)


def test_diagnose_prints_the_verdict_first_and_json_on_request():
    path = str(SAMPLES / "04-sglang-eager-until-batch-drains.log")
    done = invoke("diagnose", path)
    assert done.exit_code == 0
    head = "partly replayed, partly eager on the 9 of 10 decode log lines that tell, 1 unknown"
    assert done.output.startswith(f"{head}: replayed 6 / eager 3 / unknown 1")
    assert "cause, likely batch_above_captured" in done.output and "next:" in done.output
    document = json.loads(invoke("diagnose", path, "--json").stdout)
    assert document["schema_version"] == 1 and document["replay"]["state"] == "mixed"
