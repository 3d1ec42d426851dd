"""`workbench bench tree`: building draft trees on the device against the host heap."""

import json as json_lines
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli.app import bench

if TYPE_CHECKING:
    from rich.table import Table

    from workbench.rows import Row

METHODS = ("triton", "torch", "heap")
COLUMNS = ("method", "median µs", "p10", "p90", "floor µs", "x floor", "parts of the host path, µs")


@bench.command()
def tree(
    target: Annotated[str, typer.Option(help="Hardware target; this machine's by default.")] = "",
    batches: Annotated[str, typer.Option(help="Requests, with commas between.")] = "1,8",
    budgets: Annotated[str, typer.Option(help="Nodes without the root, with commas between.")] = "16,64",
    vocabs: Annotated[str, typer.Option(help="Vocabulary sizes, with commas between.")] = "163840",
    slots: Annotated[int, typer.Option(help="Draft slots L.", min=1)] = 7,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32 draft logits.")] = "bf16",
    methods: Annotated[
        str, typer.Option(help="triton, torch, heap; with commas between.")
    ] = "triton,torch,heap",
    kernels: Annotated[bool, typer.Option("--kernels", help="Also each Triton kernel alone.")] = False,
    mode: Annotated[str, typer.Option(help="graph or eager; cpu and the heap use the host clock.")] = "graph",
    l2: Annotated[str, typer.Option(help="cold (rotating pools of 4 x L2) or warm.")] = "cold",
    samples: Annotated[int, typer.Option(help="Samples per method and case.", min=3)] = 20,
    budget_s: Annotated[float, typer.Option(help="Most seconds of sampling per case.", min=0)] = 2.0,
    seed: Annotated[int, typer.Option(help="Seed of the logits and the sampling order.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON lines.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the rows to this Parquet file.")] = None,
) -> None:
    """Check and time the draft tree builders by batch, budget and vocabulary.

    The floor is reading the logits and writing the buffers once. The host path is split into dispatch of
    top-k and log-normaliser, transfer, heap, visibility and upload.

    Examples:

        workbench bench tree --target cpu --vocabs 4096

        workbench bench tree --batches 8 --budgets 64 --kernels --out rows.parquet
    """
    from workbench.cli.bench_verify import choose_one, choose_target
    from workbench.experiments.tree_bench import TreeBench, TreeCase
    from workbench.rows import RowStatus
    from workbench.runs.store import write_rows

    wanted = tuple(choose_one(m.strip(), METHODS) for m in methods.split(","))
    choose_one(dtype, ("bf16", "fp16", "fp32"))
    runner = TreeBench(
        choose_target(target), choose_one(mode, ("graph", "eager")), choose_one(l2, ("cold", "warm")),
        samples, budget_s, seed, kernels, wanted,
    )  # fmt: skip
    for vocab in parse_counts("vocabs", vocabs):
        for bs in parse_counts("batches", batches):
            for budget in parse_counts("budgets", budgets):
                case = TreeCase(bs, budget, vocab, slots, dtype)
                print(f"step: {case.name}", file=sys.stderr, flush=True)
                runner.run(case)
    print_rows(runner.rows, json)
    if out is not None:
        write_rows(runner.rows, out)
        print(f"{len(runner.rows)} rows in {out}", file=sys.stderr)
    if any(row.status not in (RowStatus.PASSED, RowStatus.UNSUPPORTED) for row in runner.rows):
        raise typer.Exit(1)


def parse_counts(name: str, text: str) -> list[int]:
    """Whole numbers of at least 1. Raises ValueError that shows what was given."""
    from workbench.experiments.parameters import read_counts

    return read_counts(text, f"--{name} {text}: give numbers of at least 1 with commas between")


def print_rows(rows: "list[Row]", as_json: bool) -> None:
    """A table, or JSON lines."""
    if as_json:
        for row in rows:
            print(json_lines.dumps(row.model_dump(mode="json")))
        return
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 140).print(build_table(rows))


def build_table(rows: "list[Row]") -> "Table":
    """A block of lines per case."""
    from rich.table import Table

    states = sorted({f"{r.variant}: {r.timing.mode}, L2 {r.timing.l2}" for r in rows if r.timing})
    table = Table(title=f"draft trees on {rows[0].target} ({'; '.join(states)})", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in (COLUMNS[0], COLUMNS[-1]) else "right")
    case = ""
    for row in rows:
        if (name := row.case_id.partition("/")[2]) != case:
            case = name
            table.add_section()
            table.add_row(f"[bold]{case}[/bold]")
        table.add_row(*_cells(row))
    return table


def _cells(row: "Row") -> list[str]:
    if row.timing is None:
        return [f"  {row.variant}", "", "", "", "", "", f"{row.status}: {row.reason}"]
    parts = ", ".join(f"{name.removesuffix('_us')} {value:.0f}" for name, value in row.metrics.items())
    floor = f"{row.floor_us:.2f}" if row.floor_us else ""
    ratio = f"{row.floor_ratio:.1f}" if row.floor_ratio else ""
    t = row.timing
    return [
        f"  {row.variant}",
        f"{t.median_us:.1f}",
        f"{t.p10_us:.1f}",
        f"{t.p90_us:.1f}",
        floor,
        ratio,
        parts,
    ]
