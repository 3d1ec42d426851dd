"""Check a stored run: does its manifest tell the truth about the files beside it?"""

from collections import Counter
from pathlib import Path

from workbench.rows import RunStatus
from workbench.runs import provenance, store
from workbench.runs.execute import PATCH_FILE
from workbench.runs.manifest import (
    BATCH_FILE,
    MANIFEST_FILE,
    REPORT_FILE,
    RunManifest,
    final_status,
    read_batch,
    read_run,
    run_folders,
)


def verify_folder(folder: Path) -> dict[str, list[str]]:
    """Run folder name -> problems found, for one run or a whole batch; an empty list is a sound run."""
    if (folder / BATCH_FILE).is_file():
        found = {path.name: _verify_or_say_why(path) for path in run_folders(folder)}
        return found | {BATCH_FILE: _verify_batch(folder)}
    return {folder.name: verify_run(folder)}


def _verify_or_say_why(folder: Path) -> list[str]:
    """A damaged manifest is that run's problem and does not keep the others from being checked."""
    try:
        return verify_run(folder)
    except ValueError as error:
        return [str(error)]


def report_note(folder: Path) -> str:
    """What to know about a run's report: rendered from the other files, it may be absent, or newer."""
    try:
        digest = read_run(folder).files_sha256.get(REPORT_FILE)
    except (FileNotFoundError, ValueError):
        return ""
    path = folder / REPORT_FILE
    if not path.is_file():
        return f"report not stored here: `workbench report {folder}` renders it"
    is_first = provenance.file_sha256(path) == digest
    return "" if is_first else f"{REPORT_FILE} was rendered again after the run"


def verify_run(folder: Path) -> list[str]:
    """Every way in which the folder and its manifest disagree, one line each."""
    manifest = read_run(folder)
    status = final_status(manifest, folder)
    problems = []
    if manifest.status is RunStatus.RUNNING:
        problems.append(f"status RUNNING: the run never finished ({status})")
    if status not in (RunStatus.PASSED, RunStatus.SKIPPED) and not manifest.reason:
        problems.append(f"status {status} without a reason")
    problems += _verify_files(folder, manifest)
    problems += _verify_rows(folder, manifest)
    if (
        bool(manifest.code.get("dirty")) != (folder / PATCH_FILE).is_file()
        and status is not RunStatus.SKIPPED
    ):
        problems.append(f"{PATCH_FILE} and the dirty flag of {MANIFEST_FILE} disagree")
    return problems


def _verify_files(folder: Path, manifest: RunManifest) -> list[str]:
    problems = []
    for name, digest in manifest.files_sha256.items():
        path = folder / name
        if name == REPORT_FILE:
            continue  # rendered from the rest, at any time and by a newer renderer too
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif provenance.file_sha256(path) != digest:
            problems.append(f"{name} was changed after the run (its sha256 differs)")
    known = {*manifest.files_sha256, MANIFEST_FILE, REPORT_FILE}
    problems += [
        f"{path.name} is not in the manifest" for path in sorted(folder.iterdir()) if path.name not in known
    ]
    return problems


def _verify_rows(folder: Path, manifest: RunManifest) -> list[str]:
    path = folder / store.ROWS_FILE
    if not path.is_file():
        return [f"{store.ROWS_FILE} is missing"] if manifest.status is RunStatus.PASSED else []
    try:
        rows = store.read_rows(path)
    except ValueError as error:
        return [str(error)]
    problems = [
        f"row {row.case_id} belongs to run {row.run_id!r}" for row in rows if row.run_id != manifest.run_id
    ]
    counts = dict(Counter(row.status.value for row in rows))
    if counts != manifest.rows_by_status:
        problems.append(f"rows by status are {counts}, the manifest says {manifest.rows_by_status}")
    return problems


def _verify_batch(folder: Path) -> list[str]:
    batch = read_batch(folder)
    stored = {path.name: _status(path) for path in run_folders(folder)}
    problems = [f"{name} is listed but has no folder" for name in batch.runs if name not in stored]
    for name, status in stored.items():
        if status is not None and batch.runs.get(name) is not status:
            problems.append(f"{name} is {status}, {BATCH_FILE} says {batch.runs.get(name)}")
    if batch.status is RunStatus.RUNNING:
        problems.append("the batch never finished")
    return problems


def _status(folder: Path) -> RunStatus | None:
    """None where the manifest is damaged, which is told with the run."""
    try:
        return read_run(folder).status
    except ValueError:
        return None
