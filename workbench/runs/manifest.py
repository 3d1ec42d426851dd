"""The manifest of a run and of a batch: the only place that says how a run ended."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workbench.rows import RunStatus

MANIFEST_VERSION = 1
MANIFEST_FILE = "manifest.json"
BATCH_FILE = "batch.json"
REPORT_FILE = "report.html"
PARTIAL_PREFIX = ".partial-"


class RunManifest(BaseModel):
    """One run. Written by the parent process: RUNNING first, the final status last."""

    model_config = ConfigDict(extra="forbid")
    schema_version: int = MANIFEST_VERSION
    run_id: str
    batch_id: str
    notebook: str
    experiment: str
    target: str
    status: RunStatus
    reason: str = ""
    cell: int | None = None  # the notebook cell that raised or ran out of time, counted from 1
    signal: str = ""
    started_utc: str
    ended_utc: str = ""
    elapsed_s: float | None = None
    argv: list[str] = Field(default_factory=list)
    repro: str = ""
    seed: int | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)  # resolved
    given: list[str] = Field(default_factory=list)  # names that were not left at their defaults
    schema_sha256: str = ""
    code: dict[str, Any] = Field(default_factory=dict)
    notebook_sha256: str = ""
    kernels_sha256: dict[str, str] = Field(default_factory=dict)
    timer_version: str = ""
    machine: dict[str, Any] = Field(default_factory=dict)
    software: dict[str, str] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    lock_sha256: str = ""
    steps: list[tuple[str, float]] = Field(default_factory=list)  # name, seconds since the start
    findings: list[str] = Field(default_factory=list)
    rows_by_status: dict[str, int] = Field(default_factory=dict)
    files_sha256: dict[str, str] = Field(default_factory=dict)


class BatchManifest(BaseModel):
    """One batch: its runs in order, and how far it got."""

    model_config = ConfigDict(extra="forbid")
    schema_version: int = MANIFEST_VERSION
    batch_id: str
    target: str
    status: RunStatus
    reason: str = ""
    started_utc: str
    ended_utc: str = ""
    argv: list[str] = Field(default_factory=list)
    code: dict[str, Any] = Field(default_factory=dict)
    runs: dict[str, RunStatus] = Field(default_factory=dict)  # folder name -> status


def now_utc() -> str:
    """The time as ISO 8601 with seconds, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_json(path: Path, model: BaseModel) -> None:
    """Write strict JSON to a temporary name, then rename: a reader never sees half a file."""
    text = json.dumps(model.model_dump(mode="json"), indent=1, allow_nan=False, ensure_ascii=False)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_run(folder: Path) -> RunManifest:
    """The manifest of a run folder. Raises FileNotFoundError or ValueError that names the file."""
    return RunManifest.model_validate(_read_json(folder / MANIFEST_FILE, RunManifest))


def read_batch(folder: Path) -> BatchManifest:
    """The manifest of a batch folder. Raises FileNotFoundError or ValueError that names the file."""
    return BatchManifest.model_validate(_read_json(folder / BATCH_FILE, BatchManifest))


def run_folders(batch: Path) -> list[Path]:
    """Run folders of a batch in notebook order, unfinished ones (`.partial-...`) included."""
    found = [path.parent for path in batch.glob(f"*/{MANIFEST_FILE}")]
    return sorted(found, key=lambda path: path.name.removeprefix(PARTIAL_PREFIX))


def final_status(manifest: RunManifest, folder: Path) -> RunStatus:
    """The status to report: RUNNING in a folder that nobody writes any more means KILLED."""
    if manifest.status is RunStatus.RUNNING and not is_alive(folder):
        return RunStatus.KILLED
    return manifest.status


def mark_alive(folder: Path) -> None:
    """Leave the writer's process id in an unfinished folder."""
    (folder / ".pid").write_text(str(os.getpid()))


def is_alive(folder: Path) -> bool:
    """True while the process that writes this folder runs."""
    try:
        os.kill(int((folder / ".pid").read_text()), 0)
    except PermissionError:
        return True
    except (FileNotFoundError, ValueError, ProcessLookupError):
        return False
    return True


def _read_json(path: Path, model: type[BaseModel]) -> BaseModel:
    if not path.is_file():
        raise FileNotFoundError(
            f"no {path.name} in {path.parent}: give the folder of a {path.stem.replace('manifest', 'run')}"
        )
    try:
        return model.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} is damaged ({error.errors()[0]['msg']}): run it again") from error
