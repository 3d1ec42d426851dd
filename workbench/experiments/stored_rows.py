"""Stored rows of a run, a batch or a target, and the pairing of two such sides."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.measure.statistics import median_interval
from workbench.rows import Row, Timing
from workbench.rows_file import read_rows

NOISE_FLOOR = 0.02  # two medians closer than this are the same on any machine we know
Key = tuple[str, str, str]  # experiment, variant, case_id


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its rows and what they depend on."""

    name: str
    rows: list[Row]
    gpu: str = ""
    cpu: str = ""
    driver_major: str = ""
    timer_version: str = ""
    commit: str = ""


@dataclass(frozen=True)
class Pair:
    """The same case on both sides. `ratio` is second over first; `reason` says why there is none."""

    key: Key
    first_us: float | None = None
    second_us: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: str = "not comparable"
    reason: str = ""
    timing: Timing | None = field(default=None, repr=False)


def load_side(path: Path) -> Side:
    """Rows below a folder (or of one file). Raises FileNotFoundError when there are none."""
    if not path.exists():
        raise FileNotFoundError(f"no folder {path}: give a run, a batch or a rows file below papermill_runs")
    files = [path] if path.is_file() else _finished_rows(path)
    if not files:
        raise FileNotFoundError(f"no rows.parquet below {path}: give the folder of a run that finished")
    rows = [row for file in files for row in read_rows(file)]
    return Side(path.name, rows, **_circumstances([file.parent for file in files]))


def differences(first: Side, second: Side) -> list[str]:
    """What makes two sides unlike: GPU, processor (without a GPU), driver major, timer version."""
    checks = {
        "GPU": (first.gpu or "none", second.gpu or "none"),
        "processor": ("", "") if first.gpu or second.gpu else (first.cpu, second.cpu),
        "driver": (first.driver_major, second.driver_major),
        "timer version": (first.timer_version, second.timer_version),
    }
    return [
        f"{name} differs: {a or 'unknown'} against {b or 'unknown'}"
        for name, (a, b) in checks.items()
        if a != b
    ]


def load_remark(first: Side, second: Side) -> str:
    """How busy the processors were when the sides were taken, where notebook 00 noted it; "" where not."""
    loads = [_load_per_core(side) for side in (first, second)]
    if not any(loads):
        return ""
    told = [", ".join(f"{load:.2f}" for load in side) or "unknown" for side in loads]
    return f"load per core when notebook 00 ran: {told[0]} against {told[1]}"


def _load_per_core(side: Side) -> list[float]:
    """Of every check of the machine in the side; each is the load average over its cores."""
    checks = [row.metrics for row in side.rows if row.case_id == "state/neighbours"]
    return [
        float(load) / float(found.get("cores") or 1)
        for found in checks
        if isinstance(load := found.get("load_average"), int | float)
    ]


def pair_rows(first: Side, second: Side) -> list[Pair]:
    """Every timed case that both sides have, in the order of the first."""
    left, right = _by_key(first.rows), _by_key(second.rows)
    return [pair for key in left if key in right for pair in _pairs(key, left[key], right[key])]


def judge(first: Timing, second: Timing) -> tuple[float, float, float, str]:
    """(ratio of medians, lower, upper bound, verdict); bounds from the samples, else from p10 and p90."""
    a_low, a_high = _interval(first)
    b_low, b_high = _interval(second)
    ratio, low, high = second.median_us / first.median_us, b_low / a_high, b_high / a_low
    if low > 1 + NOISE_FLOOR:
        return ratio, low, high, "slower"
    if high < 1 - NOISE_FLOOR:
        return ratio, low, high, "faster"
    return ratio, low, high, "same within noise"


def _pairs(key: Key, left: list[Row], right: list[Row]) -> list[Pair]:
    by_state = {_state(row): row for row in right}
    if len(left) == len(right) == 1 and _state(left[0]) not in by_state:
        reason = f"L2 or mode differs: {'/'.join(_state(left[0]))} against {'/'.join(_state(right[0]))}"
        return [Pair(key, reason=reason)]
    pairs = []
    for row in left:
        other = by_state.get(_state(row))
        if other is not None and row.timing is not None and other.timing is not None:
            ratio, low, high, verdict = judge(row.timing, other.timing)
            medians = row.timing.median_us, other.timing.median_us
            pairs.append(Pair(key, *medians, ratio, low, high, verdict, timing=row.timing))
    return pairs


def _by_key(rows: list[Row]) -> dict[Key, list[Row]]:
    grouped: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        if row.timing is not None:
            grouped[row.experiment, row.variant, row.case_id].append(row)
    return grouped


def _state(row: Row) -> tuple[str, str]:
    assert row.timing is not None
    return row.timing.mode, row.timing.l2


def _interval(timing: Timing) -> tuple[float, float]:
    return median_interval(timing.samples) or (timing.p10_us, timing.p90_us)


def _finished_rows(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("rows.parquet"))
    return [
        path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def _circumstances(folders: list[Path]) -> dict[str, str]:
    """Device, driver, timer and commit of the manifests; several values are joined."""
    found: dict[str, set[str]] = defaultdict(set)
    for folder in folders:
        path = folder / "manifest.json"
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        machine = manifest.get("machine", {})
        gpu = (machine.get("gpus") or [{}])[0] if manifest.get("target") != "cpu" else {}
        found["gpu"].add(gpu.get("name", ""))
        found["driver_major"].add(str(gpu.get("driver", "")).split(".")[0])
        found["cpu"].add(machine.get("cpu", ""))
        found["timer_version"].add(manifest.get("timer_version", ""))
        found["commit"].add(manifest.get("code", {}).get("sha", "")[:7])
    return {name: "+".join(sorted(values - {""})) for name, values in found.items()}
