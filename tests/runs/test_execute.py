"""A run ends with the status that is true, whatever the executed notebook claims."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_notebooks import ROWS

from workbench.report.index import render_index
from workbench.report.slim import slim
from workbench.rows import RunStatus
from workbench.runs import execute, store
from workbench.runs.manifest import final_status, read_batch, read_run, run_folders
from workbench.runs.sweep import PlannedRun
from workbench.runs.verify import report_note, verify_folder

MakeRun = Callable[..., PlannedRun]
OpenBatch = Callable[..., execute.Batch]


def test_passed_run_is_complete(make_run: MakeRun, open_batch: OpenBatch) -> None:
    batch = open_batch()
    run = make_run("10_fine", ROWS, x=7)
    execute.run_batch(batch, [run])
    folder = batch.folder / run.folder_name
    manifest = read_run(folder)
    assert manifest.status is RunStatus.PASSED and not manifest.reason
    assert manifest.parameters == {"target": "cpu", "seed": 0, "x": 7} and manifest.given == ["x"]
    assert manifest.findings == ["x is 7"] and manifest.rows_by_status == {"PASSED": 1}
    assert manifest.repro == "workbench run 10_fine --target cpu -p x=7"
    assert {path.name for path in folder.iterdir()} - {"source.patch"} == {
        *("manifest.json", "10_fine.ipynb", "report.html", "rows.parquet", "stdout.log")
    }
    assert (folder / "source.patch").exists() == manifest.code["dirty"]
    assert [row.run_id for row in store.read_rows(folder / "rows.parquet")] == [manifest.run_id]
    assert ("step", "count") in batch.progress.seen  # type: ignore[attr-defined]
    assert not any(verify_folder(batch.folder).values())


def test_failures_are_told_apart(make_run: MakeRun, open_batch: OpenBatch) -> None:
    runs = [
        make_run("10_raises", "x", "1 / 0", "print('never')"),
        make_run("20_dies", "import os; os.kill(os.getpid(), 9)", "print('never')"),
        make_run("30_leaves", "import os; os._exit(3)", ROWS),
        make_run("40_sleeps", "import time; time.sleep(60)"),
        make_run("50_forgets", "print('no rows')"),
    ]
    batch = open_batch(cell_timeout_s=4)
    execute.run_batch(batch, runs)
    found = {Path(m.notebook).stem: m for m in batch.runs}
    assert {name: m.status.value for name, m in found.items()} == {
        "10_raises": "FAILED",
        "20_dies": "KILLED",
        "30_leaves": "KILLED",
        "40_sleeps": "TIMEOUT",
        "50_forgets": "FAILED",
    }
    assert found["10_raises"].reason == "cell 4 raised ZeroDivisionError: division by zero"
    assert found["20_dies"].signal == "SIGKILL" and found["20_dies"].cell == 3
    assert found["30_leaves"].signal == "exit code 3"
    assert found["40_sleeps"].reason == "cell 3 ran longer than its limit of 4 s"
    assert "rows.parquet" in found["50_forgets"].reason
    stored = json.loads((batch.folder / runs[1].folder_name / "20_dies.ipynb").read_text())
    claims = {cell["metadata"]["papermill"]["status"] for cell in stored["cells"]}
    assert claims == {"completed"}, "papermill calls the cells of a dead kernel completed: never trust it"
    assert read_batch(batch.folder).status is RunStatus.FAILED
    index = (batch.folder / "index.html").read_text()
    for run, manifest in zip(runs, batch.runs):
        report = (batch.folder / run.folder_name / "report.html").read_text()
        assert f"<strong>{manifest.status.value}</strong>" in report
        assert manifest.status.value in index and run.folder_name in index
    assert not any(verify_folder(batch.folder).values())


@pytest.mark.parametrize(
    "status, is_failure", [("RUNTIME_ERROR", True), ("COMPILE_ERROR", True), ("UNSUPPORTED", False)]
)
def test_a_run_whose_cases_broke_off_has_not_passed(
    make_run: MakeRun, open_batch: OpenBatch, status: str, is_failure: bool
) -> None:
    rows = ROWS.replace("status='PASSED'", f"status='{status}', reason='no such layout'")
    batch = open_batch()
    execute.run_batch(batch, [make_run("10_breaks", rows)])
    (manifest,) = batch.runs
    assert manifest.rows_by_status == {status: 1}
    if is_failure:
        assert manifest.status is RunStatus.FAILED
        assert manifest.reason == f"1 of 1 rows are {status}: v, a: no such layout"
    else:
        assert manifest.status is RunStatus.PASSED
    assert not any(verify_folder(batch.folder).values())


def test_slim_batch_is_sound_and_its_index_links_to_what_is_there(
    make_run: MakeRun, open_batch: OpenBatch
) -> None:
    batch = open_batch()
    runs = [make_run("10_fine", ROWS), make_run("20_fine", ROWS)]
    execute.run_batch(batch, runs)
    first, second = (batch.folder / run.folder_name for run in runs)
    assert slim(batch.folder, keep=["20"]) == [first / "report.html"]
    assert not (first / "report.html").exists() and (second / "report.html").exists()
    assert not any(verify_folder(batch.folder).values())
    assert report_note(first) == f"report not stored here: `workbench report {first}` renders it"
    assert report_note(second) == ""
    page = (batch.folder / "index.html").read_text()
    links = re.findall(r'href="([^"]+)"', page)
    assert links == [f"{first.name}/10_fine.ipynb", f"{second.name}/report.html"]
    assert all((batch.folder / link).is_file() for link in links)
    assert f"workbench report {first.name}" in page
    with pytest.raises(ValueError, match=r"no run '77' in .*choose from 10_fine_"):
        slim(batch.folder, keep=["77"])
    (second / "report.html").write_text("newer")
    assert report_note(second) == "report.html was rendered again after the run"


def test_a_damaged_manifest_is_told_and_the_others_are_checked(
    make_run: MakeRun, open_batch: OpenBatch
) -> None:
    batch = open_batch()
    runs = [make_run("10_fine", ROWS), make_run("20_fine", ROWS)]
    execute.run_batch(batch, runs)
    (batch.folder / runs[0].folder_name / "manifest.json").write_text("{")
    found = verify_folder(batch.folder)
    assert "manifest.json is damaged" in found[runs[0].folder_name][0]
    assert found[runs[1].folder_name] == [] and found["batch.json"] == []
    render_index(batch.folder)
    assert "DAMAGED" in (batch.folder / "index.html").read_text()


def test_skipped_run_is_not_a_failure(make_run: MakeRun, open_batch: OpenBatch) -> None:
    run = make_run("10_fine", ROWS)
    skipped = PlannedRun(run.notebook, "cpu", run.params, skip_reason="needs two GPUs")
    batch = open_batch()
    assert execute.run_batch(batch, [skipped]).status is RunStatus.PASSED
    assert batch.runs[0].status is RunStatus.SKIPPED and batch.runs[0].reason == "needs two GPUs"


def test_interrupt_marks_this_run_and_the_waiting_ones(make_run: MakeRun, open_batch: OpenBatch) -> None:
    batch = open_batch()
    runs = [
        make_run("10_slow", "print('step: asleep')\nimport time; time.sleep(60)"),
        make_run("20_next", ROWS),
    ]
    timer = threading.Timer(4, signal.raise_signal, [signal.SIGINT])
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        execute.run_batch(batch, runs)
    assert time.monotonic() - started < 30
    assert [m.status.value for m in batch.runs] == ["INTERRUPTED", "SKIPPED"]
    stored = read_batch(batch.folder)
    assert stored.status is RunStatus.INTERRUPTED
    assert [status.value for status in stored.runs.values()] == ["INTERRUPTED", "SKIPPED"]
    assert not any(verify_folder(batch.folder).values()), "an interrupted batch is a sound record"
    assert [folder.name for folder in run_folders(batch.folder)] == [run.folder_name for run in runs]
    assert "INTERRUPTED" in (batch.folder / runs[0].folder_name / "report.html").read_text()


def test_killed_parent_leaves_a_run_that_reads_as_killed(make_run: MakeRun, open_batch: OpenBatch) -> None:
    batch = open_batch()
    run = make_run("10_slow", ROWS)
    folder = batch.folder / f".partial-{run.folder_name}"
    folder.mkdir()
    manifest = execute.opening_manifest(batch, run, {})
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    (folder / ".pid").write_text(gone.stdout.decode())
    execute.write_json(folder / "manifest.json", manifest)
    assert final_status(read_run(folder), folder) is RunStatus.KILLED
    (folder / ".pid").write_text(str(os.getpid()))
    assert final_status(read_run(folder), folder) is RunStatus.RUNNING
    assert any("never finished" in text for text in verify_folder(folder)[folder.name])


def test_full_disk_leaves_earlier_runs_alone(
    make_run: MakeRun, open_batch: OpenBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, run = open_batch(), make_run("10_fine", ROWS)
    execute.run_batch(first, [PlannedRun(run.notebook, "cpu", run.params, skip_reason="not needed")])
    before = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "stdout.log")

    second = open_batch()
    monkeypatch.setattr(execute, "run_child", refuse)
    with pytest.raises(OSError, match="No space left"):
        execute.run_batch(second, [run])
    assert {path: path.read_bytes() for path in before} == before
    partial = second.folder / f".partial-{run.folder_name}"
    assert read_run(partial).status is RunStatus.RUNNING and not (second.folder / run.folder_name).exists()


def test_two_batches_in_one_second_do_not_meet(open_batch: OpenBatch) -> None:
    assert len({open_batch().folder for _ in range(3)}) == 3
