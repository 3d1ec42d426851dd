"""`workbench doctor --compile`: every CUDA source for every arch, without a GPU, and what the kernels use."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from workbench.attention import build
from workbench.attention.build import Resource

REPORT = build.KERNELS_DIR / "resources.json"


def compile_all(archs: Sequence[str] = build.ARCHS) -> list[Resource]:
    """Compile (or take from the cache), print registers, shared memory and spills, return them.

    Raises CompileError with the first error line, CompilerMissingError without NVRTC, and ValueError when a
    kernel spills: registers in local memory are slow wherever they are.
    """
    found = [one for source in build.sources() for arch in archs for one in build.report(source, arch)]
    print_table(found)
    spilling = [f"{one.kernel} ({one.config}, {one.arch}: {one.spilled})" for one in found if one.spills]
    if spilling:
        raise ValueError(
            f"kernels spill registers: {', '.join(spilling)}; fewer live values or a smaller tile"
        )
    return found


def print_table(resources: list[Resource]) -> None:
    """One line per kernel and configuration, one column per arch; equal lines of a kernel become one."""
    from rich.console import Console
    from rich.table import Table

    archs = list(dict.fromkeys(one.arch for one in resources))
    title = f"registers a thread / shared memory a block / spilled bytes ({build.compiler_version()})"
    table = Table("configuration", *archs, title=title, title_justify="left")
    for kernel in dict.fromkeys(one.kernel for one in resources):
        table.add_row(kernel, end_section=False, style="bold")
        lines: dict[tuple[str, ...], list[str]] = {}
        for config in dict.fromkeys(one.config for one in resources if one.kernel == kernel):
            cells = {
                one.arch: _cell(one) for one in resources if (one.kernel, one.config) == (kernel, config)
            }
            lines.setdefault(tuple(cells.get(arch, "-") for arch in archs), []).append(config)
        for line, configs in lines.items():
            table.add_row(f"  {', '.join(configs)}", *line)
    Console().print(table)


def _cell(one: Resource) -> str:
    return f"{one.registers}/{one.smem_bytes / 1024:.1f}K/{one.spilled}"


def report_json(resources: list[Resource]) -> dict[str, Any]:
    """The committed report: kernels/resources.json."""
    return {"compiler": build.compiler_version(), "kernels": [asdict(one) for one in resources]}


def write_report(archs: Sequence[str] = build.ARCHS) -> None:
    """Compile everything and rewrite kernels/resources.json: `python -m workbench.cli.doctor_compile`."""
    report = report_json(compile_all(archs))
    body = ",\n  ".join(json.dumps(kernel) for kernel in report["kernels"])
    text = f'{{"compiler": {json.dumps(report["compiler"])}, "kernels": [\n  {body}\n]}}\n'
    build.write_atomically(REPORT, text.encode())


if __name__ == "__main__":
    write_report()
