"""What notebooks call: run an experiment with live steps, then show its findings, figures and rows."""

import html
import json
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from workbench.rows import Row
from workbench.runs import store
from workbench.targets import ROOT

if TYPE_CHECKING:
    import plotly.graph_objects as go

RUN_DIR_VARIABLE = "WORKBENCH_RUN_DIR"  # set by the parent of a batch run
RUN_ID_VARIABLE = "WORKBENCH_RUN_ID"
STEP_PREFIX = "step: "
UNUSED_BUTTONS = ["lasso2d", "select2d", "autoScale2d"]  # nothing is selected; leave the title its room


class Experiment(Protocol):
    """A module of workbench.experiments."""

    __name__: str

    def run(self, params: Any, step: Any = ...) -> list[Row]: ...


def run(experiment: Experiment, params: Any) -> list[Row]:
    """Run `experiment`, print each named step, save its rows into the run folder, return them."""
    folder = run_folder(experiment.__name__.rsplit(".", 1)[-1])
    started = time.perf_counter()
    rows = experiment.run(params, step=announce)
    run_id = os.environ.get(RUN_ID_VARIABLE, folder.name)
    rows = [row.model_copy(update={"run_id": run_id}) for row in rows]
    store.write_rows(rows, folder / store.ROWS_FILE)
    announce(f"saved {len(rows)} rows after {time.perf_counter() - started:.1f} s")
    return rows


def announce(name: str) -> None:
    """Print a named step; the parent process of a batch run shows it live."""
    print(f"{STEP_PREFIX}{name}", flush=True)


def run_folder(name: str) -> Path:
    """The folder of this run: the batch's, or a fresh one under papermill_runs/interactive/."""
    if RUN_DIR_VARIABLE in os.environ:
        return Path(os.environ[RUN_DIR_VARIABLE])
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")[:18]
    folder = ROOT / "papermill_runs" / "interactive" / f"{stamp}_{name}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def show_findings(findings: Sequence[str]) -> None:
    """Show the sentences computed from this run's rows; a batch run also keeps them for its index page."""
    if RUN_DIR_VARIABLE in os.environ:
        path = Path(os.environ[RUN_DIR_VARIABLE]) / "findings.json"
        path.write_text(json.dumps(list(findings), ensure_ascii=False), encoding="utf-8")
    items = "".join(f"<li>{html.escape(text)}</li>" for text in findings)
    _display(f'<ul class="findings">{items}</ul>', "\n".join(f"- {text}" for text in findings))


def show(figure: "go.Figure") -> None:
    """Show a figure live and, without a second copy of plotly.js, in the exported report."""
    from IPython.display import display

    display(figure_bundle(figure), raw=True)


def figure_bundle(figure: "go.Figure") -> dict[str, Any]:
    """MIME type -> content. ValueError for a figure without a finding as its title or without units."""
    from workbench.report.figures import theme

    theme.require_words(figure)
    title = str(figure.layout.title.text)
    label = html.escape(title, quote=True)
    figure = theme.finish(figure)
    config = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": UNUSED_BUTTONS}
    division = figure.to_html(full_html=False, include_plotlyjs=False, include_mathjax=False, config=config)
    return {
        "text/html": f'<figure role="img" aria-label="{label}" class="plot">{division}</figure>',
        "application/vnd.plotly.v1+json": json.loads(figure.to_json()),
        "text/plain": f"figure: {title}",
    }


def show_table(rows: Sequence[Row], columns: Sequence[str], limit: int = 200) -> None:
    """Show `columns` of the rows' flat form; projected and derived rows are marked as such."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in ("origin", *columns))
    body = "".join(_table_row(row, columns) for row in rows[:limit])
    note = f"<p>{len(rows) - limit} more rows in rows.parquet</p>" if len(rows) > limit else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    _display(f'<div class="rows" tabindex="0">{table}</div>{note}', f"{len(rows)} rows: {', '.join(columns)}")


def show_facts(rows: Sequence[Row]) -> None:
    """Show rows without a timing as one line per metric: row, name, value."""
    lines = [(row.variant, name, _cell(value)) for row in rows for name, value in row.metrics.items()]
    lines += [(row.variant, row.status.value, row.reason) for row in rows if row.reason]
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in line) + "</tr>" for line in lines
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("of", "fact", "value"))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    _display(f'<div class="rows" tabindex="0">{table}</div>', "\n".join(": ".join(line) for line in lines))


def _table_row(row: Row, columns: Sequence[str]) -> str:
    flat = row.flat()
    cells = "".join(f"<td>{html.escape(_cell(flat.get(name)))}</td>" for name in columns)
    return f'<tr class="{row.origin.value} {row.status.value}"><td>{row.origin.value}</td>{cells}</tr>'


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _display(text_html: str, plain: str) -> None:
    from IPython.display import display

    display({"text/html": text_html, "text/plain": plain}, raw=True)
