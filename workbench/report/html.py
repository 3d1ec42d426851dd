"""One self-contained HTML file per run: no outside URL, one plotly.js, code behind a toggle."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from workbench.report.bundle import plotly_script
from workbench.rows import RunStatus
from workbench.runs.manifest import REPORT_FILE, RunManifest, final_status, read_run

FOLDER = Path(__file__).resolve().parent
TEMPLATE = "report.html.j2"
MAX_BYTES = 3_000_000
ANSI = re.compile(r"\x1b\[[0-9;]*m")
OUTSIDE = re.compile(
    r"""<(?:script|link|img|iframe|source|video|audio)\b[^>]*\b(?:src|href)\s*=\s*["']?(?:https?:)?//""", re.I
)


def render_report(folder: Path, manifest: RunManifest | None = None) -> Path:
    """Write report.html of a run folder, whatever its status. ValueError for a report that is not offline."""
    manifest = manifest or read_run(folder)
    notebook = folder / manifest.notebook
    html = export(notebook, _banner(folder, manifest))
    require_offline(html, notebook.name)
    path = folder / REPORT_FILE
    path.write_text(html, encoding="utf-8")
    return path


def export(notebook: Path, banner: dict[str, Any]) -> str:
    """The notebook as one HTML text. FileNotFoundError or ValueError names a missing or damaged notebook."""
    import nbformat

    if not notebook.is_file():
        raise FileNotFoundError(f"no notebook {notebook}: give the folder of a run")
    try:
        content = nbformat.read(notebook, as_version=4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError, UnicodeDecodeError) as error:
        raise ValueError(f"{notebook} is not a notebook ({type(error).__name__}): run it again") from error
    content.cells = [
        cell for cell in content.cells if "papermill-error-cell-tag" not in cell.metadata.get("tags", [])
    ]
    has_figure = any(
        "plotly-graph-div" in _html(output) for cell in content.cells for output in cell.get("outputs", [])
    )
    resources = {
        "workbench": banner
        | {"plotly": plotly_script() if has_figure else "", "messages": _messages(content)},
        "metadata": {"name": notebook.stem},
    }
    html, _ = _exporter().from_notebook_node(content, resources=resources)
    return html


def require_offline(html: str, name: str) -> None:
    """Raise ValueError when the file would load something from elsewhere or is larger than 3 MB."""
    found = OUTSIDE.search(html)
    if found:
        raise ValueError(f"report of {name} loads an outside file ({found.group()[:120]}): inline it")
    if len(html.encode()) > MAX_BYTES:
        raise ValueError(
            f"report of {name} has {len(html.encode()):,} bytes, more than {MAX_BYTES:,}: show fewer points"
        )


@cache
def _exporter() -> Any:
    from nbconvert.exporters import HTMLExporter

    exporter = HTMLExporter(
        template_name="lab",
        extra_template_paths=[str(FOLDER)],
        template_file=TEMPLATE,
        embed_images=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    return exporter


def _banner(folder: Path, manifest: RunManifest) -> dict[str, Any]:
    """What the top of the report states about the run."""
    status = final_status(manifest, folder)
    code = manifest.code
    commit = (
        (code["sha"][:12] or "no git") + (" with uncommitted changes" if code["dirty"] else "")
        if code
        else "unknown"
    )
    gpus = [gpu["name"] for gpu in manifest.machine.get("gpus", [])] if manifest.target != "cpu" else []
    return {
        "status": status.value,
        "passed": status is RunStatus.PASSED,
        "reason": manifest.reason,
        "facts": [
            ("target", manifest.target),
            ("commit", commit),
            ("run", manifest.run_id),
            ("started", manifest.started_utc),
            ("elapsed", f"{manifest.elapsed_s} s" if manifest.elapsed_s is not None else "not finished"),
            (
                "machine",
                ", ".join(
                    [*gpus, manifest.machine.get("cpu", "unknown"), f"{manifest.machine.get('cores')} cores"]
                ),
            ),
            (
                "rows",
                ", ".join(f"{count} {name}" for name, count in manifest.rows_by_status.items()) or "none",
            ),
            ("again", manifest.repro),
        ],
        "parameters": [
            (name, json.dumps(value, ensure_ascii=False), name in manifest.given)
            for name, value in manifest.parameters.items()
        ],
        "software": ", ".join(f"{name} {version}" for name, version in manifest.software.items()),
    }


def _messages(content: Any) -> str:
    """Everything the cells wrote to stderr, in order; the template shows it at the end of the page."""
    return "".join(
        ANSI.sub("", "".join(output["text"]))
        for cell in content.cells
        for output in cell.get("outputs", [])
        if output.get("name") == "stderr"
    )


def _html(output: Any) -> str:
    """The output's HTML, or "" for streams, errors and other kinds."""
    value = output.get("data", {}).get("text/html", "")
    return "".join(value)
