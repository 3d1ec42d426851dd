"""Stored runs against each other: this batch against the one before, and target against target."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from workbench import targets
from workbench.experiments.stored_rows import Pair, Side, differences, load_remark, load_side, pair_rows
from workbench.rows import Origin, Row, RowStatus

EXPERIMENT = "compare_runs"
BATCH_NAME = re.compile(r"^\d{8}T\d{6}Z_")


class Params(BaseModel):
    """Which stored batches to read."""

    model_config = ConfigDict(extra="forbid")
    target: str = Field("cpu", description="target whose newest batch is looked at")
    seed: int = Field(0, description="unused: nothing here is random")
    batch: str = Field("", description="batch folder to look at; empty = the newest of the target")
    baseline: str = Field("", description="batch folder to compare with; empty = the one before it")
    runs_root: str = Field("papermill_runs", description="folder of all batches, relative to the repository")


def run(params: Params, step: Callable[[str], None] = print) -> list[Row]:
    """One derived row per stored experiment and per compared case; reads files only, measures nothing."""
    root = targets.ROOT / params.runs_root
    step("find stored batches")
    batch = Path(params.batch) if params.batch else _newest(root / params.target)
    baseline = Path(params.baseline) if params.baseline else _newest(root / params.target, before=batch)
    current = _load(batch)
    rows = _inventory(params.target, current)
    if baseline is not None and current is not None:
        step(f"compare with {baseline.name}")
        rows += _compare(params.target, load_side(baseline), current, "run against run")
    for other in targets.names():
        if other != params.target and (stored := _newest(root / other)) and current is not None:
            step(f"compare with target {other}")
            rows += _compare(params.target, load_side(stored), current, f"{other} against {params.target}")
    return rows


def findings(rows: list[Row]) -> list[str]:
    """How much is stored, what changed beyond noise, what may not be compared."""
    stored = [row for row in rows if row.variant == "stored" and row.metrics["rows"]]
    total = sum(int(row.metrics["rows"] or 0) for row in stored)
    named = next((f"Batch {row.axes['batch']}" for row in stored if "batch" in row.axes), "This batch")
    found = [f"{named} stores {total} rows of {len(stored)} experiment{'s' * (len(stored) != 1)}."]
    kinds = list(dict.fromkeys(str(row.axes["kind"]) for row in rows if row.variant != "stored"))
    if not kinds:
        found.append(
            "No other batch is stored yet, nothing to compare with: run `workbench reproduce` again."
        )
    for kind in kinds:
        found += _kind_findings(kind, [row for row in rows if row.axes.get("kind") == kind])
    return found


def _kind_findings(kind: str, rows: list[Row]) -> list[str]:
    unlike = [row.reason for row in rows if row.variant == "circumstances"]
    verdicts = Counter(str(row.metrics.get("verdict")) for row in rows if row.variant == "case")
    counted = (
        ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        or "no timed case in common"
    )
    names = next((row.axes for row in rows if "first" in row.axes), None)
    sides = f" ({names['second']} over {names['first']})" if names else ""
    found = [f"{kind}{sides}: {counted}."]
    found += [f"{kind}: {row.metrics['text']}." for row in rows if row.variant == "remark"]
    if unlike:
        found.append(
            f"{kind}: NOT the same conditions ({'; '.join(unlike)}): no ratio here is a change of code."
        )
    changed = [row for row in rows if row.metrics.get("verdict") in ("slower", "faster") and not unlike]
    if changed:
        worst = max(changed, key=lambda row: float(row.metrics["ratio"] or 0))
        found.append(f"{kind}: largest ratio {worst.metrics['ratio']:.2f} at {worst.case_id}.")
    return found


def _newest(folder: Path, before: Path | None = None) -> Path | None:
    """The newest batch with finished rows; with `before`, the earlier one that shares most notebooks."""
    names = sorted((path for path in folder.glob("*") if BATCH_NAME.match(path.name)), reverse=True)
    if before is None:
        return next((path for path in names if _notebooks(path)), None)
    own = _notebooks(before)
    earlier = [
        path for path in names if path.name < before.name and own & _notebooks(path) and _is_closed(path)
    ]
    return max(earlier, key=lambda path: len(own & _notebooks(path)), default=None)


def _notebooks(batch: Path) -> set[str]:
    """Names of the numbered notebooks whose rows the batch holds, without the hash of their parameters."""
    return {path.parent.name.rsplit("_", 1)[0] for path in batch.glob("[0-9]*/rows.parquet")}


def _is_closed(batch: Path) -> bool:
    """True for a batch that ended; one that is being written is no baseline."""
    return json.loads((batch / "batch.json").read_text(encoding="utf-8"))["status"] != "RUNNING"


def _load(batch: Path | None) -> Side | None:
    """The batch looked at; None when it has no rows yet."""
    return None if batch is None else load_side(batch)


def _inventory(target: str, side: Side | None) -> list[Row]:
    counts = Counter(row.experiment for row in side.rows) if side else Counter()
    timed = Counter(row.experiment for row in side.rows if row.timing) if side else Counter()
    return [
        _row(
            target,
            f"stored/{name}",
            "stored",
            {"kind": "stored", "of": name} | ({"batch": side.name} if side else {}),
            {"rows": count, "timed": timed[name]},
        )
        for name, count in counts.items()
    ] or [
        _row(target, "stored/nothing", "stored", {"kind": "stored", "of": "nothing"}, {"rows": 0, "timed": 0})
    ]


def _compare(target: str, first: Side, second: Side, kind: str) -> list[Row]:
    rows = [
        _row(target, f"{kind}/{text}", "circumstances", {"kind": kind}, {}, reason=text)
        for text in differences(first, second)
    ]
    remark = load_remark(first, second)
    if remark:
        rows.append(_row(target, f"{kind}/load", "remark", {"kind": kind}, {"text": remark}))
    return rows + [_case(target, pair, kind, first.name, second.name) for pair in pair_rows(first, second)]


def _case(target: str, pair: Pair, kind: str, first: str, second: str) -> Row:
    experiment, variant, case_id = pair.key
    axes = {"kind": kind, "of": experiment, "compared_variant": variant, "first": first, "second": second}
    if pair.timing is not None:
        axes |= {"mode": pair.timing.mode, "l2": pair.timing.l2}
    metrics = {
        name: getattr(pair, name) for name in ("first_us", "second_us", "ratio", "low", "high", "verdict")
    }
    state = f"/{axes['mode']}/{axes['l2']}" if pair.timing else ""
    return _row(
        target, f"{kind}/{experiment}/{variant}/{case_id}{state}", "case", axes, metrics, reason=pair.reason
    )


def _row(target: str, case_id: str, variant: str, axes: dict, metrics: dict, reason: str = "") -> Row:
    return Row(
        case_id=case_id,
        experiment=EXPERIMENT,
        variant=variant,
        target=target,
        origin=Origin.DERIVED,
        status=RowStatus.SKIPPED if reason else RowStatus.PASSED,
        reason=reason,
        axes=axes,
        metrics=metrics,
        repro=f"workbench run 90_compare_runs --target {target}",
    )
