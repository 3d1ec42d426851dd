"""Commands around runs: reproduce, run, report, compare, verify-run, worker, lab."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli import EXIT_INTERRUPTED
from workbench.cli.app import app

if TYPE_CHECKING:
    from workbench.runs.manifest import BatchManifest
    from workbench.runs.sweep import PlannedRun

EXIT_RUN_FAILED = 1
Target = Annotated[str, typer.Option("--target", "-t", help="Hardware target, see data/targets.")]
Parameters = Annotated[
    list[str] | None, typer.Option("--parameter", "-p", help="name=value, may be repeated.")
]
CellTimeout = Annotated[int, typer.Option(help="Seconds that one cell may take.", min=1)]
Root = Annotated[Path | None, typer.Option("--runs", help="Folder of all batches (papermill_runs).")]
Scheduler = Annotated[str, typer.Option(help="Dask scheduler whose workers run the notebooks.")]


@app.command()
def reproduce(
    target: Target = "cpu",
    parameter: Parameters = None,
    only: Annotated[str, typer.Option(help="Notebook numbers or names, comma separated.")] = "",
    cell_timeout: CellTimeout = 1800,
    runs: Root = None,
    scheduler: Scheduler = "",
) -> None:
    """Execute every numbered notebook for a target and write one batch of reports.

    `workbench reproduce --target h200`; `workbench reproduce --only 00,20 -p seed=3`
    """
    from workbench.runs import sweep

    planned = sweep.plan_batch(target, sweep.parse_assignments(parameter or []))
    if only:
        wanted = {sweep.find_notebook(name.strip()) for name in only.split(",")}
        planned = [run for run in planned if run.notebook in wanted]
    _execute(planned, target, cell_timeout, runs, scheduler)


@app.command(add_help_option=False)
def run(
    context: typer.Context,
    notebook: Annotated[str, typer.Argument(help="Number, name or path, as in 20 or 20_nsplit_sweep.")] = "",
    target: Target = "cpu",
    parameter: Parameters = None,
    grid: Annotated[list[str] | None, typer.Option(help="name=v1,v2: one run per value.")] = None,
    cell_timeout: CellTimeout = 1800,
    runs: Root = None,
    scheduler: Scheduler = "",
    show_help: Annotated[
        bool, typer.Option("--help", help="This text, and the notebook's parameters.")
    ] = False,
) -> None:
    """Execute one notebook with typed parameters; `workbench run NOTEBOOK --help` lists them.

    `workbench run 20 -p seed=3`; `workbench run 50 --grid budget=4,8,16`
    """
    from workbench.runs import sweep

    if show_help or not notebook:
        typer.echo(context.get_help())
        if notebook:
            _print_parameters(sweep.find_notebook(notebook))
        raise typer.Exit(0 if show_help else 2)
    path = sweep.find_notebook(notebook)
    given = sweep.parse_assignments(parameter or [])
    axes = {name: values.split(",") for name, values in sweep.parse_assignments(grid or []).items()}
    planned = [sweep.plan_run(path, target, given | point) for point in sweep.expand_grid(axes)]
    _execute(planned, target, cell_timeout, runs, scheduler)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A run folder, a batch folder, or papermill_runs.")],
    slim: Annotated[
        bool, typer.Option("--slim", help="Delete the reports instead; they can be rendered again.")
    ] = False,
    keep: Annotated[str, typer.Option(help="With --slim: notebook numbers whose reports stay.")] = "",
) -> None:
    """Write report.html and index.html again from the notebooks and manifests of finished runs.

    `workbench report papermill_runs/cpu/20260101T120000Z_0123456`; `--slim --keep 10,60` makes the batch
    small enough to be committed.
    """
    from workbench.report.html import render_report
    from workbench.report.index import render_index
    from workbench.report.slim import slim as slim_batch
    from workbench.runs.manifest import BATCH_FILE, MANIFEST_FILE

    if keep and not slim:
        raise ValueError(f"--keep {keep} needs --slim: without it every report is written")

    manifests = sorted(folder.rglob(MANIFEST_FILE))
    batches = sorted(folder.rglob(BATCH_FILE))
    if not batches and (folder.resolve().parent / BATCH_FILE).is_file():
        batches = [folder.resolve().parent / BATCH_FILE]  # its index links to the report of this run
    if not manifests and not batches:
        raise FileNotFoundError(f"no run in {folder}: give a folder below papermill_runs")
    if slim:
        if not (folder / BATCH_FILE).is_file():
            raise ValueError(f"{folder} is not a batch: --slim takes the folder that has a {BATCH_FILE}")
        for path in batches:
            gone = slim_batch(path.parent, [name.strip() for name in keep.split(",") if name.strip()])
            typer.echo(f"{path.parent}: {len(gone)} reports deleted, index.html written again")
        return
    damaged = []
    for path in manifests:
        try:
            typer.echo(render_report(path.parent))
        except ValueError as error:
            damaged.append(error)
    for path in batches:
        typer.echo(render_index(path.parent))
    if damaged:
        raise damaged[0]


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A run, a batch, a rows file or a target's folder.")],
    second: Annotated[Path, typer.Argument(help="What to compare it with.")],
    force: Annotated[bool, typer.Option(help="Compare although machine or timer differ.")] = False,
) -> None:
    """Compare two sets of rows: ratio and a verdict that knows the noise.

    Refuses when GPU, driver or timer differ, unless --force is given; then it says so first.

    `workbench compare papermill_runs/h200/A papermill_runs/h200/B`
    """
    from workbench.report.compare import compare_folders, format_comparison

    comparison = compare_folders(first, second, force=force)
    typer.echo(format_comparison(comparison))


@app.command("verify-run")
def verify_run(folder: Annotated[Path, typer.Argument(help="A run folder or a batch folder.")]) -> None:
    """Check stored runs: manifest, hashes of every file, status, rows by the schema.

    `workbench verify-run papermill_runs/cpu/20260101T120000Z_0123456`
    """
    from workbench.runs.verify import report_note, verify_folder

    problems = 0
    for name, found in verify_folder(folder).items():
        lines = [*found, *filter(None, [report_note(folder if name == folder.name else folder / name)])]
        typer.echo(f"{'ok  ' if not found else 'BAD '} {name}" + "".join(f"\n     {text}" for text in lines))
        problems += len(found)
    if problems:
        raise typer.Exit(EXIT_RUN_FAILED)


@app.command()
def worker(
    scheduler: Annotated[str, typer.Argument(help="Address of a Dask scheduler: tcp://host:8786.")],
    target: Annotated[str, typer.Option(help="Target to announce; empty = what this machine is.")] = "",
) -> None:
    """Offer this machine to a Dask scheduler as one hardware target (needs the `cluster` extra).

    `dask scheduler` on one host; `workbench worker tcp://host:8786` on each machine; then
    `workbench reproduce --target h200 --scheduler tcp://host:8786`
    """
    from workbench.runs.cluster import serve_worker

    serve_worker(scheduler, target)


@app.command()
def lab() -> None:
    """Open JupyterLab on the notebooks folder; it looks for no updates and no news on the network.

    `workbench lab`
    """
    from workbench.runs.sweep import NOTEBOOKS

    command = [
        sys.executable,
        "-m",
        "jupyter",
        "lab",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.news_url=None",
        f"--notebook-dir={NOTEBOOKS.parent}",
        f"{NOTEBOOKS}/explore.ipynb",
    ]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def _execute(
    planned: "Sequence[PlannedRun]", target: str, cell_timeout_s: int, root: Path | None, scheduler: str
) -> None:
    """Run the plan with live progress, print table and index page; exit 1 unless all passed."""
    from workbench import targets
    from workbench.report.html import render_report
    from workbench.report.index import INDEX_FILE, render_index
    from workbench.runs import cluster, execute
    from workbench.runs.lock import hold_device
    from workbench.runs.progress import LiveProgress

    signal.signal(signal.SIGTERM, _raise_interrupt)
    device = nullcontext() if scheduler else hold_device(targets.load(target))
    with device, LiveProgress(len(planned)) as progress:
        batch = execute.open_batch(
            target,
            root or execute.RUNS_ROOT,
            render_run=render_report,
            render_index=render_index,
            progress=progress,
            cell_timeout_s=cell_timeout_s,
        )
        try:
            if scheduler:
                cluster.run_batch_on(scheduler, batch, planned)
            else:
                execute.run_batch(batch, planned)
        except KeyboardInterrupt:
            typer.echo("workbench: interrupted, the unfinished run is marked as such", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        finally:
            progress.close()
            if batch.manifest.ended_utc:
                _print_runs(batch.runs, batch.manifest, batch.folder / INDEX_FILE)
    if batch.manifest.status.value != "PASSED":
        raise typer.Exit(EXIT_RUN_FAILED)


def _print_runs(runs: Sequence[Any], manifest: "BatchManifest", index: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "notebook",
        "status",
        "seconds",
        "rows",
        "reason",
        title=f"batch {manifest.batch_id}: {manifest.status.value}",
    )
    for one in runs:
        rows = ", ".join(f"{count} {status}" for status, count in one.rows_by_status.items())
        table.add_row(
            one.notebook.removesuffix(".ipynb"),
            one.status.value,
            f"{one.elapsed_s or 0:.1f}",
            rows,
            one.reason,
        )
    Console().print(table)
    typer.echo(f"reports: {index}")


def _print_parameters(notebook: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from workbench.runs import sweep

    model = sweep.params_model(notebook)
    table = Table("parameter", "type", "default", "meaning", title=f"parameters of {notebook.stem}")
    for name, field in model.model_fields.items():
        table.add_row(name, sweep.type_name(model, name), repr(field.default), field.description or "")
    Console().print(table)


def _raise_interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
