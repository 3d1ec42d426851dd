"""`workbench doctor`: what this machine is, and what would spoil a measurement on it."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Annotated

import typer

from workbench.cli.app import app

GIB = 2**30
LEAST_DISK_GIB = 2
NEEDED = (
    "torch",
    "triton",
    "papermill",
    "plotly",
    "pyarrow",
    "duckdb",
    "nbconvert",
    "ipywidgets",
    "pydantic",
)


@dataclass(frozen=True)
class Check:
    """One line of the report. `verdict`: ok, note (worth knowing) or bad (fix it before you measure)."""

    name: str
    value: str
    verdict: str = "ok"
    fix: str = ""


@app.command()
def doctor(
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile every CUDA source for every arch.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine: software, target, GPU clocks and neighbours, compiled kernels, disk, checkout.

    `workbench doctor`; `workbench doctor --compile` needs no GPU. Exit code 1 when something is bad.
    """
    checks = [check for part in PARTS for check in part()]
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        _print(checks)
    if compile:
        from workbench.cli.doctor_compile import compile_all

        compile_all()
    if any(check.verdict == "bad" for check in checks):
        raise typer.Exit(1)


def _software() -> Iterator[Check]:
    from workbench.runs.provenance import software

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        yield Check(
            "packages", f"missing: {', '.join(missing)}", "bad", "pip install -e . -c constraints.txt"
        )
    yield Check("software", ", ".join(f"{name} {version}" for name, version in software().items()))


def _machine() -> Iterator[Check]:
    from workbench.experiments.target_check import load_problem
    from workbench.runs.machine import machine

    found = machine()
    memory_gib = found["memory_bytes"] / GIB
    yield Check(
        "processor", f"{found['cpu']}, {found['cores']} cores, {memory_gib:.0f} GiB, {found['system']}"
    )
    load = os.getloadavg()[0]
    busy = load_problem(load, found["cores"])
    fix = "wait until it is idle to measure on cpu" if busy else ""
    yield Check("load", f"{load:.1f} on {found['cores']} cores", "note" if busy else "ok", fix)


def _target() -> Iterator[Check]:
    from workbench import targets

    try:
        target = targets.detect()
    except ValueError as error:
        yield Check("target", str(error), "bad", "add a file to data/targets")
        return
    yield Check("target", f"{target.name} ({target.title}), graphs by {target.graph_backend}")
    yield Check("known targets", ", ".join(targets.names()))


def _gpu() -> Iterator[Check]:
    from workbench.measure import gpu_state
    from workbench.runs.machine import gpus

    devices = gpus()
    if not devices:
        yield Check(
            "GPU", f"none ({gpu_state.open_device()[2]})", "note", "GPU targets are projected, not measured"
        )
        return
    for one in devices:
        limit, clock = one["power_limit_w"], one["max_sm_clock_mhz"]
        yield Check(
            f"GPU {one['index']}", f"{one['name']}, driver {one['driver']}, {limit} W, up to {clock} MHz"
        )
    yield _clocks()
    others, reason = gpu_state.neighbours()
    if others is None:
        yield Check("neighbours", f"unknown ({reason})", "note")
    else:
        text = f"{len(others)} other processes on the GPU"
        yield Check("neighbours", text, "bad" if others else "ok", "wait for them to end" if others else "")
    reason = gpu_state.gpm_reason()
    yield Check("utilisation counters", reason or "GPM works", "note" if reason else "ok")


def _clocks() -> Check:
    from workbench.measure import gpu_state

    now = gpu_state.read()
    if now is None:
        return Check("clocks", "unknown", "note")
    throttled = gpu_state.throttle_text(now.throttle_bits or 0)
    text = f"{now.clock_mhz} MHz, {now.temperature_c} C, throttle reasons: {throttled}"
    lock = "nvidia-smi --lock-gpu-clocks=1500 makes clocks steady (needs administrator rights)"
    return Check("clocks", text, "ok" if throttled == "none" else "note", lock)


def _kernels() -> Iterator[Check]:
    from workbench.attention import build

    built = len(list(build.cache_dir().glob("**/*.cubin")))
    text = f"{len(build.sources())} CUDA sources, {built} compiled in the cache"
    try:
        yield Check("kernels", f"{text}, {build.compiler_version()}")
    except OSError as error:
        yield Check("kernels", f"{text}; {error}", "note", "pip install -e '.[gpu-cu12]'")


def _checkout() -> Iterator[Check]:
    from workbench.runs.provenance import code_state, commit_label
    from workbench.targets import ROOT

    code = code_state()
    fix = "commit before a run that others shall trust" if code["dirty"] else ""
    yield Check("checkout", commit_label(code), "note" if code["dirty"] else "ok", fix)
    free_gib = shutil.disk_usage(ROOT).free / GIB
    full = free_gib < LEAST_DISK_GIB
    yield Check(
        "free disk",
        f"{free_gib:.1f} GiB",
        "bad" if full else "ok",
        f"free {LEAST_DISK_GIB} GiB" if full else "",
    )


PARTS: tuple[Callable[[], Iterator[Check]], ...] = (_software, _machine, _target, _gpu, _kernels, _checkout)


def _print(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "note": "yellow", "bad": "bold red"}
    table = Table("check", "", "found", "what to do")
    for check in checks:
        table.add_row(
            check.name, Text(check.verdict, colours[check.verdict]), Text(check.value), Text(check.fix)
        )
    Console().print(table)
