"""Execute planned runs one after the other: written aside, status from this process, renamed when final."""

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from workbench import targets
from workbench.rows import RowStatus, RunStatus
from workbench.runs import provenance, store
from workbench.runs.child import OUTCOME_FILE
from workbench.runs.machine import machine
from workbench.runs.manifest import (
    BATCH_FILE,
    MANIFEST_FILE,
    PARTIAL_PREFIX,
    BatchManifest,
    RunManifest,
    mark_alive,
    now_utc,
    write_json,
)
from workbench.runs.process import JOB_FILE, Outcome, child_environment, run_child
from workbench.runs.sweep import PlannedRun
from workbench.targets import ROOT

RUNS_ROOT = ROOT / "papermill_runs"
PATCH_FILE = "source.patch"
FINDINGS_FILE = "findings.json"
STEP_PREFIX = "step: "
CELL_TIMEOUT_S = 1800
GOOD = (RunStatus.PASSED, RunStatus.SKIPPED)
BROKEN = (RowStatus.RUNTIME_ERROR, RowStatus.COMPILE_ERROR)


class Progress(Protocol):
    """What a batch reports while it works."""

    def begin(self, name: str) -> None: ...
    def step(self, name: str) -> None: ...
    def finish(self, manifest: RunManifest) -> None: ...


@dataclass
class Batch:
    """One batch being written: its folder, its manifest, and the renderers given by the caller."""

    folder: Path
    manifest: BatchManifest
    render_run: Callable[[Path, RunManifest], Path]  # run folder, final manifest -> report.html
    render_index: Callable[[Path], Path]
    progress: Progress
    cell_timeout_s: int = CELL_TIMEOUT_S
    runs: list[RunManifest] = field(default_factory=list)

    def save(self) -> None:
        """Write batch.json and the index page as they stand."""
        write_json(self.folder / BATCH_FILE, self.manifest)
        self.render_index(self.folder)


def open_batch(target: str, root: Path = RUNS_ROOT, **renderers: Any) -> Batch:
    """A fresh batch folder `<target>/<UTC>_<sha7>[-dirty]` whose manifest says RUNNING."""
    code = provenance.code_state()
    base = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}_{provenance.commit_label(code)}"
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        folder = root / target / (base + suffix)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        break
    manifest = BatchManifest(
        batch_id=f"{target}/{folder.name}",
        target=target,
        status=RunStatus.RUNNING,
        started_utc=now_utc(),
        argv=provenance.argv(),
        code=code,
    )
    mark_alive(folder)
    return Batch(folder, manifest, **renderers)


def run_batch(batch: Batch, planned: Sequence[PlannedRun]) -> BatchManifest:
    """Execute every run; one that fails does not stop the rest. Ctrl-C marks the rest and is raised again."""
    batch.manifest.runs = {run.folder_name: RunStatus.RUNNING for run in planned}
    batch.save()
    waiting = list(planned)
    try:
        while waiting:
            run = waiting.pop(0)
            manifest = skip_run(batch, run, run.skip_reason) if run.skip_reason else run_one(batch, run)
            batch.manifest.runs[run.folder_name] = manifest.status
            batch.save()
    except KeyboardInterrupt as interrupt:
        for run in waiting:
            skip_run(batch, run, "the batch was interrupted before")
        batch.manifest.runs |= {f"{Path(m.run_id).name}": m.status for m in batch.runs}
        close_batch(batch, RunStatus.INTERRUPTED, str(interrupt) or "Ctrl-C")
        raise
    bad = [name for name, status in batch.manifest.runs.items() if status not in GOOD]
    reason = f"{len(bad)} of {len(planned)} runs did not pass: {', '.join(bad)}" if bad else ""
    close_batch(batch, RunStatus.FAILED if bad else RunStatus.PASSED, reason)
    return batch.manifest


def run_one(batch: Batch, run: PlannedRun) -> RunManifest:
    """Execute one run in `.partial-<name>`, then rename the folder. Ctrl-C leaves an INTERRUPTED run."""
    folder = batch.folder / f"{PARTIAL_PREFIX}{run.folder_name}"
    folder.mkdir()
    mark_alive(folder)
    target = targets.load(run.target)
    environment = child_environment(target, folder, f"{batch.manifest.batch_id}/{run.folder_name}")
    manifest = opening_manifest(batch, run, environment)
    _write_patch(folder, manifest)
    write_json(folder / MANIFEST_FILE, manifest)
    batch.progress.begin(run.name)
    started = time.monotonic()

    def take_line(line: str) -> None:
        if line.startswith(STEP_PREFIX):
            manifest.steps.append((line.removeprefix(STEP_PREFIX), round(time.monotonic() - started, 2)))
            batch.progress.step(manifest.steps[-1][0])

    try:
        outcome = run_child(_job(batch, run, folder), folder, environment, take_line)
    except KeyboardInterrupt:
        _finish_run(batch, run, folder, manifest, _interrupted(folder), started)
        raise
    return _finish_run(batch, run, folder, manifest, outcome, started)


def skip_run(batch: Batch, run: PlannedRun, reason: str) -> RunManifest:
    """A run that was not started: a folder with a manifest that says why."""
    folder = batch.folder / f"{PARTIAL_PREFIX}{run.folder_name}"
    folder.mkdir()
    manifest = opening_manifest(batch, run, {})
    outcome = Outcome("SKIPPED", reason)
    return _finish_run(batch, run, folder, manifest, outcome, time.monotonic())


def opening_manifest(batch: Batch, run: PlannedRun, environment: dict[str, str]) -> RunManifest:
    differing = {name: run.parameters[name] for name in run.given if name != "target"}
    return RunManifest(
        run_id=f"{batch.manifest.batch_id}/{run.folder_name}",
        batch_id=batch.manifest.batch_id,
        notebook=run.notebook.name,
        experiment=run.experiment,
        target=run.target,
        status=RunStatus.RUNNING,
        started_utc=now_utc(),
        argv=provenance.argv(),
        repro=provenance.repro_command(run.name, run.target, differing),
        seed=run.parameters.get("seed"),
        parameters=run.parameters,
        given=run.given,
        schema_sha256=provenance.sha256(json.dumps(type(run.params).model_json_schema(), sort_keys=True)),
        code=provenance.code_state(),
        notebook_sha256=provenance.file_sha256(run.notebook),
        kernels_sha256=provenance.kernel_hashes(),
        timer_version=provenance.timer_version(),
        machine=machine(),
        software=provenance.software(),
        environment=provenance.environment(environment),
        lock_sha256=provenance.lock_sha256(),
    )


def _job(batch: Batch, run: PlannedRun, folder: Path) -> dict[str, Any]:
    return {
        "notebook": str(run.notebook),
        "output": str(folder / run.notebook.name),
        "parameters": run.parameters,
        "cwd": str(ROOT),
        "cell_timeout_s": batch.cell_timeout_s,
    }


def _write_patch(folder: Path, manifest: RunManifest) -> None:
    if manifest.code["dirty"]:
        (folder / PATCH_FILE).write_text(provenance.source_patch(), encoding="utf-8")


def _interrupted(folder: Path) -> Outcome:
    """Ctrl-C, with the cell when the child could still say it."""
    path = folder / OUTCOME_FILE
    if path.is_file():
        told = Outcome(**json.loads(path.read_text(encoding="utf-8")))
        if told.status == RunStatus.INTERRUPTED:
            return told
    return Outcome("INTERRUPTED", "interrupted (Ctrl-C)")


def _finish_run(
    batch: Batch, run: PlannedRun, folder: Path, manifest: RunManifest, outcome: Outcome, started: float
) -> RunManifest:
    """Fill in the end of the manifest, render the report, write the final status last, rename the folder."""
    outcome, manifest.rows_by_status = _judge_rows(folder, outcome)
    manifest.status, manifest.reason = RunStatus(outcome.status), outcome.reason
    manifest.cell, manifest.signal = outcome.cell, outcome.signal
    manifest.ended_utc, manifest.elapsed_s = now_utc(), round(time.monotonic() - started, 2)
    manifest.findings = _take_findings(folder)
    for name in (JOB_FILE, OUTCOME_FILE, FINDINGS_FILE):
        (folder / name).unlink(missing_ok=True)
    if not (folder / run.notebook.name).exists():
        shutil.copyfile(run.notebook, folder / run.notebook.name)
    _forget_paths(folder / run.notebook.name, run.notebook.name)
    batch.render_run(folder, manifest)
    manifest.files_sha256 = {
        path.name: provenance.file_sha256(path)
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != MANIFEST_FILE and not path.name.startswith(".")
    }
    write_json(folder / MANIFEST_FILE, manifest)
    (folder / ".pid").unlink(missing_ok=True)
    os.replace(folder, batch.folder / run.folder_name)
    batch.runs.append(manifest)
    batch.progress.finish(manifest)
    return manifest


def _judge_rows(folder: Path, outcome: Outcome) -> tuple[Outcome, dict[str, int]]:
    """Row counts by status; a run that claims to have passed without readable rows, or with cases that broke
    off, has failed."""
    path = folder / store.ROWS_FILE
    try:
        rows = store.read_rows(path)
    except FileNotFoundError:
        missing = Outcome("FAILED", f"the notebook wrote no {store.ROWS_FILE}: call notebook.run in it")
        return (missing if outcome.status == RunStatus.PASSED else outcome), {}
    except ValueError as error:
        return (Outcome("FAILED", str(error)) if outcome.status == RunStatus.PASSED else outcome), {}
    counts = dict(Counter(row.status.value for row in rows))
    broken = [row for row in rows if row.status in BROKEN]
    if broken and outcome.status == RunStatus.PASSED:
        first = f"{broken[0].variant}, {broken[0].case_id}: {broken[0].reason}"
        count = f"{len(broken)} of {len(rows)} rows are {broken[0].status}"
        outcome = Outcome("FAILED", f"{count}: {first[:300]}")
    return outcome, counts


def _forget_paths(notebook: Path, name: str) -> None:
    """Replace the absolute paths that papermill stores: a run folder may be moved and shared."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    stored = content["metadata"].get("papermill", {})
    stored |= {"input_path": f"notebooks/{name}", "output_path": name}
    notebook.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _take_findings(folder: Path) -> list[str]:
    path = folder / FINDINGS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def close_batch(batch: Batch, status: RunStatus, reason: str) -> None:
    """Write the batch's final status and its index page."""
    batch.manifest.status, batch.manifest.reason, batch.manifest.ended_utc = status, reason, now_utc()
    (batch.folder / ".pid").unlink(missing_ok=True)
    batch.save()
