"""How verify rows are printed: a rich table by shape, or JSON lines."""

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from workbench.rows import RowStatus

if TYPE_CHECKING:
    from rich.table import Table

    from workbench.experiments.split_regret import Regret
    from workbench.rows import Row

NUMBERS = ("splits", "median µs", "±", "floor µs", "x floor", "GB/s", "TFLOP/s", "DRAM", "tensor", "span µs")
COLUMNS = ("variant", *NUMBERS, "note")
STATUS_STYLES = {RowStatus.PASSED: "", RowStatus.UNSUPPORTED: "dim", RowStatus.SKIPPED: "dim"}


def print_rows(rows: "list[Row]", as_json: bool) -> None:
    """The whole result on stdout."""
    if as_json:
        for row in rows:
            sys.stdout.write(json.dumps(row.model_dump(mode="json")) + "\n")
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160)
    for target in dict.fromkeys(row.target for row in rows):
        console.print(latency_table([row for row in rows if row.target == target], target))


def latency_table(rows: "list[Row]", target: str) -> "Table":
    """One block of lines per shape; peers published for the shape follow as grey lines."""
    from rich.table import Table

    modes = sorted({f"{r.timing.mode}, L2 {r.timing.l2}" for r in rows if r.timing})
    table = Table(
        title=f"verify attention on {target} ({'; '.join(modes) or 'not timed'})", title_justify="left"
    )
    for name in COLUMNS:
        side: Literal["left", "right"] = "left" if name in ("variant", "note") else "right"
        table.add_column(name, justify=side, no_wrap=name != "note")
    for shape, group in _by_shape(rows).items():
        table.add_section()
        table.add_row(f"[bold]{shape}[/bold]")
        for row in group:
            if row.status is not RowStatus.UNSUPPORTED:
                table.add_row(*_cells(row), style=STATUS_STYLES.get(row.status, "red"))
        for name, value in _published(group):
            cells = [f"  {name}", "", f"{value:.1f}", *[""] * (len(COLUMNS) - 4), "published, see data/peers"]
            table.add_row(*cells, style="dim")
    unsupported = dict.fromkeys(row.reason for row in rows if row.status is RowStatus.UNSUPPORTED)
    table.caption = "not run: " + "; ".join(unsupported) if unsupported else None
    table.caption_justify = "left"
    return table


def _by_shape(rows: "list[Row]") -> "dict[str, list[Row]]":
    groups: dict[str, list[Row]] = {}
    for row in rows:
        name = str(row.axes["case"])
        groups.setdefault(name, []).append(row)
    return groups


def _cells(row: "Row") -> list[str]:
    splits = str(row.metrics.get("plan_nsplit", row.axes["nsplit"]))
    label, note = f"  {row.variant}", _own_way(row)
    if row.timing is None:
        passed = row.status is RowStatus.PASSED
        text = "correct, not timed" + (": interpreted" if row.metrics.get("interpreted") else "")
        return [label, splits, *[""] * (len(COLUMNS) - 3), text if passed else f"{row.status}: {row.reason}"]
    low, high = row.metrics.get("ci95_low_us"), row.metrics.get("ci95_high_us")
    half = f"{(high - low) / 2:.1f}" if isinstance(low, float) and isinstance(high, float) else "?"
    gpu, unstable = row.gpu, "" if row.timing.stable else "not stable"
    return [
        label, splits, f"{row.timing.median_us:.1f}", half, f"{row.floor_us or 0:.1f}",
        f"{row.floor_ratio or 0:.2f}", f"{row.metrics['gbps']:.0f}", f"{row.metrics['tflops']:.1f}",
        _percent(gpu.dram_util if gpu else None), _percent(gpu.tensor_util if gpu else None),
        f"{row.timing.span_us or 0:.1f}", ", ".join(filter(None, (note, unstable))),
    ]  # fmt: skip


def _own_way(row: "Row") -> str:
    """How a peer's input differs from what was asked: its mask, its layout."""
    asked = str(row.axes["case"])
    own = [str(row.axes[axis]) for axis in ("mask", "layout") if f"-{row.axes[axis]}-" not in asked]
    return "with " + ", ".join(own) if own else ""


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _published(group: "list[Row]") -> Iterable[tuple[str, float]]:
    for name, value in group[0].metrics.items():
        if name.startswith("published_") and isinstance(value, float):
            yield name.removeprefix("published_").removesuffix("_us"), value


def _doubt(one: "Regret") -> str:
    """Why a share above 0 is no regret."""
    if not one.share or not one.is_noise:
        return ""
    return " (noise)" if one.is_told else " (too few samples)"


def splits_table(found: "list[Regret]") -> "Table":
    """auto against the best split count measured, one line per variant and shape, with what makes it none."""
    from rich.table import Table

    table = Table(title="nsplit=auto against the best of its sweep", title_justify="left")
    for place, name in enumerate(("shape", "variant", "auto", "auto µs", "best", "best µs", "regret")):
        table.add_column(name, justify="left" if place < 2 else "right", no_wrap=place == 0)
    for one in found:
        auto, best = one.auto, one.best
        assert auto.timing is not None and best.timing is not None
        shape = "bs{bs} h{heads} q{q_len} ctx{ctx} {layout}".format(**auto.axes)
        table.add_row(
            shape, auto.variant, str(auto.metrics["plan_nsplit"]), f"{auto.timing.median_us:.1f}",
            str(best.axes["nsplit"]), f"{best.timing.median_us:.1f}",
            f"{100 * one.share:.1f} %{_doubt(one)}",
            style="red" if one.share > 0.05 and not one.is_noise else "",
        )  # fmt: skip
    return table
