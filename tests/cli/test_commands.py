"""The command line as a user meets it: one-line errors, exit codes, help of a notebook, a real run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workbench.cli import one_line
from workbench.runs import sweep
from workbench.runs.manifest import read_batch, read_run, run_folders

ROOT = Path(__file__).resolve().parents[2]


def call(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workbench.cli", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"} | environment,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (["run", "77"], "no notebook '77': choose one of"),
        (["run", "00", "-t", "h300"], "unknown target 'h300': choose one of b200, cpu"),
        (
            ["run", "00", "-p", "sampels=3"],
            "unknown parameter 'sampels' of 00_target_check: did you mean 'samples'?",
        ),
        (["run", "00", "-p", "samples=few"], "parameter samples='few' of 00_target_check is refused"),
        (["run", "00", "-p", "samples=1"], "should be greater than or equal to 3"),
        (["run", "20", "-p", "target=h200"], "differs from --target cpu: write --target h200"),
        (["run", "60", "-p", "fault=nonsense"], "fault 'nonsense': choose one of"),
        (["run", "60", "-p", "fault="], "fault '': choose one of"),
        (["run", "60", "-p", "inputs=no/such.log"], "no file 'no/such.log' of inputs="),
        (["bench", "splits", "--counts", "a"], "--counts 'a': give split counts"),
        (["report", "notebooks", "--slim"], "no run in notebooks"),
        (["report", "notebooks", "--keep", "60"], "--keep 60 needs --slim"),
        (["reproduce", "-p", "sede=1"], "unknown parameter 'sede'"),
        (["report", "no/such/folder"], "no run in no/such/folder"),
        (["verify-run", "no/such/folder"], "no manifest.json in no/such/folder"),
        (["compare", "no/such/folder", "."], "no folder no/such/folder"),
    ],
)
def test_mistakes_end_in_one_line(words: list[str], message: str) -> None:
    done = call(*words)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and done.stderr.startswith("workbench: ")


def test_help_lists_commands_and_parameters() -> None:
    done = call("--help")
    assert done.returncode == 0
    for name in ("doctor", "reproduce", "run", "bench", "report", "compare", "verify-run", "worker", "lab"):
        assert name in done.stdout, name
    done = call("run", "00", "--help")
    assert done.returncode == 0
    for name, field in sweep.params_model(sweep.find_notebook("00")).model_fields.items():
        assert name in done.stdout and str(field.description) in done.stdout
    assert "int" in done.stdout and "'cpu'" in done.stdout


def test_run_verify_and_render_again(tmp_path: Path) -> None:
    done = call("run", "00", "-p", "samples=3", "--runs", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "1/1 00_target_check: time copy" in done.stdout and "PASSED" in done.stdout
    index = Path(done.stdout.split("reports: ")[1].strip())
    assert index.is_file() and index.is_relative_to(tmp_path / "cpu")
    (folder,) = run_folders(index.parent)
    assert read_run(folder).parameters["samples"] == 3
    assert call("verify-run", str(index.parent)).returncode == 0
    (folder / "report.html").unlink()
    done = call("verify-run", str(folder))
    assert done.returncode == 0 and f"`workbench report {folder}` renders it" in done.stdout
    assert call("report", str(index.parent)).returncode == 0
    assert (folder / "report.html").is_file()
    (folder / "rows.parquet").write_bytes(b"PAR1 damaged")
    done = call("verify-run", str(folder))
    assert done.returncode == 1 and "rows.parquet was changed" in done.stdout and "is damaged" in done.stdout
    done = call("compare", str(folder / "rows.parquet"), str(folder))
    assert done.returncode == 2 and f"rows file {folder / 'rows.parquet'} is damaged" in done.stderr


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_interrupted_batch_is_marked(tmp_path: Path, number: int, code: int) -> None:
    command = [sys.executable, "-m", "workbench.cli", "reproduce", "--only", "00,90", "--runs", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "starting its kernel" in line:
            break
    time.sleep(0.5)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code and "interrupted" in errors and "Traceback" not in errors
    (batch,) = (tmp_path / "cpu").iterdir()
    stored = read_batch(batch)
    assert stored.status.value == "INTERRUPTED"
    assert stored.reason == ("SIGTERM" if number == signal.SIGTERM else "Ctrl-C")
    assert [status.value for status in stored.runs.values()] == ["INTERRUPTED", "SKIPPED"]
    assert [read_run(folder).status.value for folder in run_folders(batch)] == ["INTERRUPTED", "SKIPPED"]


def test_errors_of_the_system_read_well() -> None:
    full = OSError(28, "No space left on device", "/data/rows.parquet")
    assert one_line(full).startswith("the disk is full while writing /data/rows.parquet: free some space")
    assert one_line(PermissionError(13, "Permission denied", "/data")) == "Permission denied: /data"
    assert one_line(ValueError("two\n  lines")) == "two lines"


def test_doctor_reports_this_machine() -> None:
    done = call("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == int(any(check["verdict"] == "bad" for check in checks.values()))
    assert "python" in checks["software"]["value"] and {"target", "checkout", "free disk", "kernels"} <= set(
        checks
    )
