"""The page of a batch: its runs in order, how each ended, what it found, and where its report is."""

from pathlib import Path
from typing import Any

from workbench.report.html import FOLDER
from workbench.rows import RunStatus
from workbench.runs.manifest import (
    REPORT_FILE,
    RunManifest,
    final_status,
    is_alive,
    read_batch,
    read_run,
    run_folders,
)

INDEX_FILE = "index.html"


def render_index(batch: Path) -> Path:
    """Write index.html of a batch folder from the manifests in it; returns its path."""
    from jinja2 import Environment, FileSystemLoader

    manifest = read_batch(batch)
    runs = [_run_line(folder) for folder in run_folders(batch)]
    started = {run["folder"].removeprefix(".partial-") for run in runs}
    waiting = [name for name in manifest.runs if name not in started]
    template = Environment(loader=FileSystemLoader(FOLDER), autoescape=True).get_template("index.html.j2")
    page = template.render(
        batch=manifest,
        status=_batch_status(manifest.status, batch),
        runs=runs,
        waiting=waiting,
        commit=(manifest.code.get("sha", "")[:12] or "no git")
        + (" (dirty)" if manifest.code.get("dirty") else ""),
        machine=_machine(batch),
    )
    path = batch / INDEX_FILE
    path.write_text(page, encoding="utf-8")
    return path


def _run_line(folder: Path) -> dict[str, Any]:
    try:
        manifest = read_run(folder)
    except ValueError as error:
        return {"folder": folder.name, "name": folder.name, "status": "DAMAGED", "reason": str(error)}
    return {
        "folder": folder.name,
        "name": Path(manifest.notebook).stem,
        "status": final_status(manifest, folder).value,
        "reason": manifest.reason or _unfinished_reason(manifest, folder),
        "elapsed": "" if manifest.elapsed_s is None else f"{manifest.elapsed_s:.1f}",
        "given": ", ".join(
            f"{name}={manifest.parameters[name]}" for name in manifest.given if name != "target"
        ),
        "rows": ", ".join(f"{count} {status}" for status, count in manifest.rows_by_status.items()),
        "findings": manifest.findings,
        "report": f"{folder.name}/{REPORT_FILE}" if (folder / REPORT_FILE).is_file() else "",
        "notebook": f"{folder.name}/{manifest.notebook}" if (folder / manifest.notebook).is_file() else "",
    }


def _unfinished_reason(manifest: RunManifest, folder: Path) -> str:
    if final_status(manifest, folder) is RunStatus.KILLED:
        return "the process that ran the batch is gone; this run never finished"
    return ""


def _batch_status(status: RunStatus, folder: Path) -> str:
    return "KILLED" if status is RunStatus.RUNNING and not is_alive(folder) else status.value


def _machine(batch: Path) -> str:
    """Processor and GPUs of the first run that recorded them."""
    for folder in run_folders(batch):
        try:
            found = read_run(folder).machine
        except ValueError:
            continue  # its own line says so
        if found:
            return ", ".join(
                [*(gpu["name"] for gpu in found.get("gpus", [])), f"{found['cpu']}, {found['cores']} cores"]
            )
    return "not recorded yet"
