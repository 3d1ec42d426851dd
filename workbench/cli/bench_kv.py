"""`workbench bench kv`: the allocator's cost, latency by layout and pool size, the relocation copy."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli.app import bench

if TYPE_CHECKING:
    from workbench.rows import Row

LAYOUTS = "contiguous,contiguous@far,sorted,random,runs:16,runs:64,reversed"


@bench.command()
def kv(
    target: Annotated[str, typer.Option(help="Hardware target; this machine's by default.")] = "",
    layouts: Annotated[str, typer.Option(help="Layouts, with commas; @far: the end of the pool.")] = LAYOUTS,
    context: Annotated[str, typer.Option(help="Tokens attended to, with commas.")] = "",
    pool_gb: Annotated[str, typer.Option(help="Pool sizes in GB, with commas.")] = "",
    heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 8,
    q_len: Annotated[int, typer.Option(help="Tree rows.", min=1)] = 16,
    variant: Annotated[str, typer.Option(help="Verify-attention variant.")] = "auto",
    samples: Annotated[int, typer.Option(help="Samples per layout.", min=3)] = 15,
    seed: Annotated[int, typer.Option(help="Seed of rows, layouts and sampling order.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON lines.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the rows to this Parquet file.")] = None,
) -> None:
    """Time the allocator, the kernel under each layout and pool size, and the relocation copy.

    Examples:

        workbench bench kv --target cpu

        workbench bench kv --context 46080,131072 --pool-gb 2,16,60 --out rows.parquet

        workbench bench kv --layouts contiguous,random --variant triton_split --json
    """
    from workbench.experiments.kv_sweep import SweepOptions, allocator_rows, sweep_layouts
    from workbench.targets import detect, load, require_hardware

    chosen = load(target) if target else detect()
    require_hardware(chosen)
    on_cpu = chosen.backend == "cpu"
    contexts = parse_numbers(context or ("2048" if on_cpu else "16384,46080"), "--context")
    sizes = parse_numbers(pool_gb or ("0.08" if on_cpu else "2,16,60"), "--pool-gb")
    options = SweepOptions(
        [name.strip() for name in layouts.split(",")], heads, q_len, variant, samples, seed
    )
    print("step: allocator", file=sys.stderr, flush=True)
    rows = allocator_rows(chosen)
    for size in sizes:
        for tokens in contexts:
            print(f"step: {size:g} GB, {tokens:g} tokens", file=sys.stderr, flush=True)
            rows += sweep_layouts(chosen, options, int(size * 1e9), int(tokens))
    finish(rows, json, out)


def parse_numbers(text: str, option: str) -> list[float]:
    """[2.0, 60.0] from "2,60". Raises ValueError that shows what was given."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option} {text}: write numbers with commas between, such as 2,16") from error
    if min(values) <= 0:
        raise ValueError(f"{option} {text}: every number must be above 0")
    return values


def finish(rows: "list[Row]", json: bool, out: Path | None) -> None:
    """Print and store the rows; exit code 1 when a result was wrong."""
    from workbench.rows import RowStatus
    from workbench.runs.store import write_rows

    if json:
        for row in rows:
            print(row.model_dump_json())
    else:
        print_table(rows)
    if out is not None:
        write_rows(rows, out)
        print(f"{len(rows)} rows in {out}", file=sys.stderr)
    if any(row.status not in (RowStatus.PASSED, RowStatus.SKIPPED) for row in rows):
        raise typer.Exit(1)


def print_table(rows: "list[Row]") -> None:
    """One line per row: what, how long, how fast, how scattered."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "case", "pool GB", "context", "median µs", "p10", "p90", "GB/s", "gaps", "2 MB pages", "status"
    )
    for row in rows:
        timed = row.timing
        table.add_row(
            row.case_id,
            _text(row.axes.get("pool_gb")),
            _text(row.axes.get("context")),
            *(f"{value:.2f}" for value in ((timed.median_us, timed.p10_us, timed.p90_us) if timed else ())),
            *([""] * (0 if timed else 3)),
            _text(row.metrics.get("gbps") or row.metrics.get("copy_gbps")),
            _text(row.metrics.get("gap_rate")),
            _text(row.metrics.get("pages_2mb")),
            f"{row.status} {row.reason}".strip(),
        )
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def _text(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
