"""`workbench bench step`: the decode step eager, as two graphs and as one, at given contexts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli.app import bench

if TYPE_CHECKING:
    from workbench.rows import Row

COLUMNS = (
    ("step ms", "median_us", 1e-3, ".2f"), ("launches", "launches_per_step", 1, ".0f"),
    ("graphs", "graph_launches_per_step", 1, ".0f"), ("kernels", "kernels_per_step", 1, ".0f"),
    ("idle %", "idle_share", 100, ".1f"), ("node gaps %", "node_gap_share", 100, ".1f"),
    ("host us", "host_us", 1, ".0f"), ("p90", "host_p90_us", 1, ".0f"),
    ("draft", "draft_us", 1, ".0f"), ("tree", "tree_us", 1, ".0f"),
    ("verify", "verify_us", 1, ".0f"),
    ("unattr. %", "unattributed_share", 100, ".1f"), ("warm-up s", "warmup_s", 1, ".2f"),
    ("capture s", "capture_s", 1, ".2f"),
)  # fmt: skip


@bench.command()
def step(
    target: Annotated[str, typer.Option(help="Hardware target; this machine's by default.")] = "",
    preset: Annotated[
        str,
        typer.Option(
            help="auto, or models with commas between: tiny, narrow61, k2-rank, k2-rank-shared, dsv2-lite, "
            "a checkpoint folder."
        ),
    ] = "auto",
    contexts: Annotated[str, typer.Option(help="Prefix lengths with commas between.")] = "auto",
    budget: Annotated[int, typer.Option(help="Tree nodes besides the root.", min=1)] = 16,
    bs: Annotated[int, typer.Option(help="Requests in the batch.", min=1)] = 1,
    layout: Annotated[str, typer.Option(help="Slots of the prefix: random or contiguous.")] = "random",
    steps: Annotated[int, typer.Option(help="Timed steps per round.", min=4)] = 20,
    rounds: Annotated[int, typer.Option(help="Rounds, the three modes alternating.", min=1)] = 3,
    capture_bs: Annotated[int, typer.Option(help="Capture buckets 1..this; 0 = 2 or 8.", min=0)] = 0,
    launches: Annotated[int, typer.Option(help="Launches of the launch-path comparison.", min=1)] = 61,
    seed: Annotated[int, typer.Option(help="Seed of weights, prompts and slot layout.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print rows as JSON lines.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the rows to this Parquet file.")] = None,
) -> None:
    """Check one step against its eager recomputation, then time and trace it in three modes.

    Examples:

        workbench bench step --target cpu --preset tiny --contexts 256,1024

        workbench bench step --target h200 --preset k2-rank --contexts 4096,46080,65536 --out step.parquet
    """
    import sys

    from workbench import targets
    from workbench.experiments import eager_vs_graph
    from workbench.runs.store import write_rows

    params = eager_vs_graph.Params(
        target=target or targets.detect().name, seed=seed, models=preset, contexts=contexts, budget=budget,
        bs=bs, layout=layout, steps=steps, rounds=rounds, launches=launches, capture_bs=capture_bs,
    )  # fmt: skip
    rows = eager_vs_graph.run(params, step=lambda name: print(f"step: {name}", file=sys.stderr, flush=True))
    if out is not None:
        write_rows(rows, out)
    if json:
        for row in rows:
            print(row.model_dump_json())
        return
    print_tables(rows)
    for sentence in eager_vs_graph.findings(rows):
        print(f"- {sentence}")


def print_tables(rows: "list[Row]") -> None:
    """The steps, then launch paths and captures, one line each."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="decode step")
    for name in ("case", "status", *(title for title, *_ in COLUMNS)):
        table.add_column(name, justify="left" if name in ("case", "status") else "right")
    for row in rows:
        if "mode" in row.axes:
            table.add_row(row.case_id, row.status.value, *(_cell(row, *column[1:]) for column in COLUMNS))
    console = Console(width=210)
    console.print(table)
    for row in rows:
        if row.variant == "capture" and row.metrics:
            mb = float(row.metrics["reserved_bytes"] or 0) / 1e6
            console.print(
                f"{row.case_id}: {row.metrics['capture_s']:.2f} s after {row.metrics['warmup_s']:.2f} s of "
                f"warm-up and compiling, {mb:.0f} MB reserved"
            )
        elif row.variant == "verify_attention" and row.timing:
            console.print(
                f"{row.case_id}: {row.timing.median_us:.1f} us one layer's call alone, "
                f"{row.metrics['verify_attention_us']:.0f} us times {row.metrics['layers']} layers"
            )
        elif row.axes.get("part") == "launch_path":
            timed = (
                f"{row.timing.median_us:.0f} us host, {row.timing.span_us:.0f} us span" if row.timing else ""
            )
            console.print(f"{row.case_id}: {timed or f'{row.status.value} ({row.reason})'}")


def _cell(row: "Row", name: str, factor: float, form: str) -> str:
    if name == "launches_per_step" and row.metrics.get("trace_reason"):
        return "not traced"  # the findings below the table say why
    value = row.timing.median_us if name == "median_us" and row.timing else row.metrics.get(name)
    return format(float(value) * factor, form) if value is not None else ""
