"""`workbench bench verify` and `bench splits`: correct first, then a table against floor and peers."""

import ast
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.app import bench

if TYPE_CHECKING:
    from workbench.attention.variants import Variant
    from workbench.experiments.verify_cases import VerifyCase
    from workbench.rows import Row
    from workbench.targets import HardwareTarget

MODES, L2_STATES = ("graph", "eager"), ("cold", "warm")
SWEEP = "1,2,4,6,8,11,16,22,32,33,44,64,66,96,128,132"
Target = Annotated[str, typer.Option(help="Hardware target; this machine's by default.")]
Shapes = Annotated[str, typer.Option(help="table, quick, random, cpu, or case names with commas between.")]
Seed = Annotated[int, typer.Option(help="Seed of inputs, sampling order and random shapes.")]
Samples = Annotated[int, typer.Option(help="Samples per variant and shape.", min=3)]
SweepSamples = Annotated[
    int, typer.Option(help="Samples per plan; fewer than 6 cannot tell a regret from noise.", min=6)
]
BudgetS = Annotated[float, typer.Option(help="Most seconds of sampling per shape.", min=0)]
MaxS = Annotated[float, typer.Option(help="Most seconds in all; later shapes become SKIPPED rows.", min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print the rows as JSON lines instead of the table.")]
Out = Annotated[Path | None, typer.Option(help="Write the rows to this Parquet file.")]
Mode = Annotated[str, typer.Option(help="graph or eager; cpu always uses the host clock.")]
L2 = Annotated[str, typer.Option(help="cold (rotating pools of 4 x L2) or warm.")]


@bench.command()
def verify(
    target: Target = "",
    shapes: Shapes = "",
    variants: Annotated[str, typer.Option(help="Only these, with commas between.")] = "",
    peers: Annotated[bool, typer.Option("--peers", help="Also time other libraries' kernels.")] = False,
    nsplit: Annotated[str, typer.Option(help="auto or a number.")] = "auto",
    tunables: Annotated[list[str] | None, typer.Option(help="name=value; may be repeated.")] = None,
    mode: Mode = "graph",
    l2: L2 = "cold",
    samples: Samples = 20,
    budget_s: BudgetS = 2.0,
    max_s: MaxS = 240.0,
    utilisation: Annotated[bool, typer.Option(help="Read DRAM and tensor utilisation (GPM).")] = True,
    once: Annotated[bool, typer.Option("--once", help="One launch per variant, for ncu and nsys.")] = False,
    seed: Seed = 0,
    json: Json = False,
    out: Out = None,
) -> None:
    """Check and time every verify-attention variant.

    Examples:

        workbench bench verify --target cpu

        workbench bench verify --shapes table --peers --tunables block_n=32 --out rows.parquet

        workbench bench verify --variants triton_split --shapes bs1-h8-q16-ctx46080-random-tree-bf16

        ncu --nvtx --nvtx-include "triton_split@auto/" workbench bench verify --once --variants triton_split
    """
    from workbench.experiments.verify_bench import Bench, BenchOptions, make_candidates

    chosen = choose_target(target)
    table = choose_variants(variants, peers)
    values, count = parse_tunables(tunables or [], table), parse_nsplit(nsplit)
    options = BenchOptions(
        choose_one(mode, MODES), choose_one(l2, L2_STATES), samples, budget_s, utilisation, seed=seed
    )
    runner = Bench(chosen, options, deadline=time.monotonic() + max_s)
    rows: list[Row] = []
    for case, wanted in choose_work(shapes, table, chosen.backend, seed):
        print(f"step: {case.name}", file=sys.stderr, flush=True)
        candidates = make_candidates(case, wanted, count, values)
        if once:
            runner.launch_once(case, candidates)
        else:
            rows += runner.run(case, candidates)
    if not once:
        finish(rows, json, out)


@bench.command()
def splits(
    target: Target = "",
    variants: Annotated[str, typer.Option(help="Only these, with commas between.")] = "",
    shapes: Shapes = "",
    random: Annotated[int, typer.Option(help="Unlisted random shapes to add.", min=0)] = 20,
    counts: Annotated[str, typer.Option(help="Split counts of the sweep, with commas between.")] = SWEEP,
    mode: Mode = "graph",
    l2: L2 = "cold",
    samples: SweepSamples = 12,
    budget_s: BudgetS = 1.0,
    max_s: MaxS = 300.0,
    seed: Seed = 0,
    json: Json = False,
    out: Out = None,
) -> None:
    """Compare nsplit=auto with the best of its sweep.

    Examples:

        workbench bench splits --variants triton_split --shapes table

        workbench bench splits --target cpu --counts 1,2,4,8 --random 0
    """
    from workbench.cli.verify_tables import splits_table
    from workbench.experiments.nsplit_sweep import sweep
    from workbench.experiments.split_regret import regrets
    from workbench.experiments.verify_bench import Bench, BenchOptions
    from workbench.experiments.verify_cases import random_cases

    swept = parse_counts(counts)
    chosen = choose_target(target)
    table = [v for v in choose_variants(variants, False) if v.splits and chosen.backend in v.devices]
    options = BenchOptions(
        choose_one(mode, MODES),
        choose_one(l2, L2_STATES),
        samples,
        budget_s,
        seed=seed,
        experiment="nsplit_sweep",
    )
    runner = Bench(chosen, options, deadline=time.monotonic() + max_s)
    work = list(choose_work(shapes, table, chosen.backend, seed))
    if chosen.backend == "cuda":
        work += [(case, table) for case in random_cases(random, seed)]
    rows: list[Row] = []
    for case, wanted in work:
        for variant in wanted:
            print(f"step: {variant.name} on {case.name}", file=sys.stderr, flush=True)
            rows += sweep(case, variant, swept, runner)
    if not json:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 120).print(splits_table(regrets(rows)))
    finish(rows, json, out, quiet=not json)


def finish(rows: "list[Row]", json: bool, out: Path | None, quiet: bool = False) -> None:
    """Print and store the rows; exit code 1 when a variant was wrong or failed."""
    from workbench.cli.verify_tables import print_rows
    from workbench.rows import RowStatus
    from workbench.runs.store import write_rows

    if not quiet:
        print_rows(rows, json)
    if out is not None:
        write_rows(rows, out)
        print(f"{len(rows)} rows in {out}", file=sys.stderr)
    fine = (RowStatus.PASSED, RowStatus.UNSUPPORTED, RowStatus.SKIPPED)
    bad = [row for row in rows if row.status not in fine]
    for row in bad:
        print(f"{row.status} {row.case_id}: {row.reason}", file=sys.stderr)
    if bad:
        raise typer.Exit(1)


def choose_target(name: str) -> "HardwareTarget":
    """The target asked for, which must be this machine's; this machine's without a name."""
    from workbench import targets

    chosen = targets.load(name) if name else targets.detect()
    targets.require_hardware(chosen)
    return chosen


def choose_variants(names: str, peers: bool) -> "list[Variant]":
    """The variants named, or all of the table, peers only when asked for; ValueError for an unknown name."""
    from workbench.attention.variants import find, variants

    if names:
        return [find(name.strip()) for name in names.split(",")]
    return [v for v in variants() if peers or v.backend != "peer"]


def choose_work(
    shapes: str, variants: "list[Variant]", backend: str, seed: int
) -> "Iterable[tuple[VerifyCase, list[Variant]]]":
    """Cases and who runs them: a list by name, or case names."""
    from workbench.experiments import verify_cases
    from workbench.experiments.verify_variants import plan_cases

    lists = {
        "table": verify_cases.table_cases,
        "quick": verify_cases.quick_cases,
        "cpu": verify_cases.cpu_cases,
        "random": lambda: verify_cases.random_cases(20, seed),
    }
    shapes = shapes or ("cpu" if backend == "cpu" else "quick")
    if shapes in lists:
        return plan_cases(lists[shapes](), variants, backend)
    return [(verify_cases.parse_case(name.strip()), variants) for name in shapes.split(",")]


def parse_tunables(pairs: list[str], variants: "list[Variant]") -> dict[str, Any]:
    """{"block_n": 32} from ["block_n=32"]. Raises ValueError for a name no chosen variant has."""
    known = sorted({name for variant in variants for name in variant.tunables})
    values = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        if name not in known or not text:
            raise ValueError(
                f"--tunables {pair}: write name=value with one of {', '.join(known) or 'no names'}"
            )
        values[name] = _parse_value(text)
    return values


def _parse_value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(text.lower(), text)


def parse_nsplit(text: str) -> int | str:
    """ "auto" or a number of at least 1."""
    return text if text == "auto" else parse_count(text)


def parse_count(text: str) -> int:
    """A split count. Raises ValueError that shows what was given."""
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"nsplit={text!r}: expected auto or an integer of at least 1")
    return int(text)


def parse_counts(text: str) -> list[int]:
    """Split counts with commas between, each once. Raises ValueError unless all are at least 1."""
    from workbench.experiments.parameters import read_counts

    return read_counts(text, f"--counts {text!r}: give split counts of at least 1 with commas between")


def choose_one(value: str, allowed: tuple[str, ...]) -> Any:
    """`value` when it is one of `allowed`. Raises ValueError that lists them."""
    if value not in allowed:
        raise ValueError(f"{value!r}: choose one of {', '.join(allowed)}")
    return value
