"""`workbench diagnose`: what logs, traces and profiler summaries say about graph replay."""

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.app import app

if TYPE_CHECKING:
    from workbench.diagnose import Diagnosis

STATE_TEXTS = {
    "all_replayed": "graphs were replayed",
    "all_eager": "decode ran eagerly",
    "mixed": "partly replayed, partly eager",
    "unknown": "cannot be told from this",
    "not_applicable": "this says nothing about decode",
}
MARKS = {"problem": "[red]problem[/red]", "warning": "[yellow]warning[/yellow]", "info": "[dim]info[/dim]"}


@app.command()
def diagnose(
    paths: Annotated[
        list[Path], typer.Argument(help="Logs, traces, profiler summaries, or folders of them.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print the documented JSON.")] = False,
) -> None:
    """Say whether CUDA graphs were really replayed, why not, and which experiment decides.

    No line of the input is printed: it may hold addresses and keys.

    Examples:

        workbench diagnose data/samples/04-sglang-eager-until-batch-drains.log

        workbench diagnose server.log trace.json.gz --json
    """
    from workbench.diagnose import diagnose as run

    diagnosis = run(paths)
    if json:
        sys.stdout.write(json_module.dumps(diagnosis.as_dict(), indent=1, allow_nan=False) + "\n")
        return
    print_diagnosis(diagnosis)


def print_diagnosis(diagnosis: "Diagnosis") -> None:
    """The verdict first, then what was seen, causes with their decisive experiment, warnings."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    replay = diagnosis.replay
    counts = f"replayed {replay.replayed:,} / eager {replay.eager:,} / unknown {replay.unknown:,}"
    console.print(
        f"[bold]{STATE_TEXTS[replay.state]}[/bold]" + (f": {counts} ({replay.unit})" if replay.unit else "")
    )
    for source in diagnosis.sources:
        console.print(f"  {escape(source['path'])}: {source['kind']}{escape(_facts(source['summary']))}")
    if diagnosis.mean_accept_len is not None:
        console.print(f"  acceptance length {diagnosis.mean_accept_len:.2f} tokens per pass, bonus included")
    if diagnosis.mean_tok_s is not None:
        left_out = f", {diagnosis.excluded_lines} lines left out" if diagnosis.excluded_lines else ""
        console.print(f"  throughput {diagnosis.mean_tok_s:.1f} tok/s per line{left_out}")
    for finding in diagnosis.findings:
        evidence = f" ({finding.evidence})" if finding.evidence else ""
        console.print(f"{MARKS[finding.severity]} {finding.id}: {escape(finding.text + evidence)}")
    for one in diagnosis.causes:
        console.print(f"[bold]cause, {one.likelihood}[/bold] {one.id}: {escape(one.why)}")
        if one.likelihood != "excluded":
            console.print(f"    next: {escape(one.next_experiment)}")
    for warning in diagnosis.warnings:
        console.print(f"[yellow]note[/yellow] {escape(warning)}")


def _facts(summary: dict[str, Any]) -> str:
    known = {name: value for name, value in summary.items() if value not in (None, 0, [], {})}
    return " (" + ", ".join(f"{name} {value}" for name, value in known.items()) + ")" if known else ""
