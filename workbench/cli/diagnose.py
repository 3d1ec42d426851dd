"""`workbench diagnose`: what logs, traces and profiler summaries say about graph replay."""

import json as json_module
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Callable

    from workbench.diagnose import Diagnosis
    from workbench.diagnose.reading import Replay

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

    diagnosis = run(paths, report_progress())
    if json:
        sys.stdout.write(json_module.dumps(diagnosis.as_dict(), indent=1, allow_nan=False) + "\n")
        return
    print_diagnosis(diagnosis)


def report_progress(after_s: float = 2.0) -> "Callable[[Path, int, int], None]":
    """Says on stderr, each two seconds, how much of a large log has been read."""
    last = [time.monotonic()]

    def report(path: Path, done: int, total: int) -> None:
        if time.monotonic() - last[0] >= after_s:
            last[0] = time.monotonic()
            print(f"reading {path}: {done >> 20} of {total >> 20} MiB", file=sys.stderr, flush=True)

    return report


def print_diagnosis(diagnosis: "Diagnosis") -> None:
    """The verdict first, then what was seen, causes with their decisive experiment, warnings."""
    from rich.console import Console
    from rich.markup import escape

    from workbench.diagnose.reading import Replay

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(f"[bold]{escape(headline(diagnosis))}[/bold]")
    several = len(diagnosis.sources) > 1
    for source in diagnosis.sources:
        known = source["kind"] != "unrecognised"
        own = verdict_text(Replay(**source["replay"])) if known else "nothing recognised"
        verdict = f": {own}" if several else ""
        console.print(f"  {escape(source['path'])}{verdict}")
        console.print(f"      {source['kind']}{escape(_facts(source['summary']))}")
        if several and source["acceptance"]["mean_len"] is not None:
            console.print(f"      acceptance length {source['acceptance']['mean_len']:.2f}")
    if diagnosis.mean_accept_len is not None:
        console.print(f"  acceptance length {diagnosis.mean_accept_len:.2f} tokens per pass, bonus included")
    if diagnosis.mean_tok_s is not None:
        left_out = f", {diagnosis.excluded_lines} lines left out" if diagnosis.excluded_lines else ""
        console.print(f"  throughput {diagnosis.mean_tok_s:.1f} tok/s per line{left_out}")
    for finding in diagnosis.findings:
        evidence = f" ({finding.evidence})" if finding.evidence else ""
        console.print(
            f"{MARKS[finding.severity]} {finding.id}: {escape(_of(finding.source) + finding.text + evidence)}"
        )
    for one in diagnosis.causes:
        console.print(f"[bold]cause, {one.likelihood}[/bold] {one.id}: {escape(_of(one.source) + one.why)}")
        if one.likelihood != "excluded":
            console.print(f"    next: {escape(one.next_experiment)}")
    for warning in diagnosis.warnings:
        console.print(f"[yellow]note[/yellow] {escape(warning)}")


def headline(diagnosis: "Diagnosis") -> str:
    """The first line: the verdict with how much of the input it speaks of, or that there is none."""
    sources = diagnosis.sources
    if all(source["kind"] == "unrecognised" for source in sources):
        return f"nothing recognised in {', '.join(source['path'] for source in sources)}"
    told = verdict_text(diagnosis.replay)
    if any(finding.id == "sources_disagree" for finding in diagnosis.findings):
        return f"the sources disagree; together: {told}"
    return told


def verdict_text(replay: "Replay") -> str:
    """A state with its counts; what is not known stands beside it."""
    text, known = STATE_TEXTS[replay.state], replay.replayed + replay.eager
    if not replay.unit:
        return text
    counts = f"replayed {replay.replayed:,} / eager {replay.eager:,} / unknown {replay.unknown:,}"
    if known and replay.unknown:
        total = known + replay.unknown
        return (
            f"{text} on the {known:,} of {total:,} {replay.unit} that tell, "
            f"{replay.unknown:,} unknown: {counts}"
        )
    return f"{text}: {counts} ({replay.unit})"


def _of(source: str) -> str:
    return f"[{Path(source).name}] " if source else ""


def _facts(summary: dict[str, Any]) -> str:
    known = {name: value for name, value in summary.items() if value not in (None, 0, [], {})}
    return " (" + ", ".join(f"{name} {value}" for name, value in known.items()) + ")" if known else ""
