"""The stored H200 rows load, hold together, and say what the READMEs quote from them."""

from pathlib import Path

import pytest

from workbench.rows import Row, RowStatus
from workbench.runs.store import read_rows
from workbench.targets import ROOT, load

REFERENCE = ROOT / "data" / "reference" / "h200"


def read(name: str) -> list[Row]:
    return read_rows(REFERENCE / f"{name}.parquet")


def text(path: str) -> str:
    return " ".join((ROOT / path).read_text().split())


@pytest.mark.parametrize("path", sorted(REFERENCE.glob("*.parquet")), ids=lambda path: path.stem)
def test_every_stored_row_was_correct_on_its_target(path: Path) -> None:
    rows = read_rows(path)
    assert len(rows) > 10 and len({row.case_id for row in rows}) == len(rows)
    assert sum(row.timing is not None for row in rows) > 10
    for row in rows:
        assert row.status is RowStatus.PASSED and row.target == "h200"
        if row.bytes and row.timing and row.timing.l2 == "cold":
            assert row.bytes / row.timing.median_us / 1e3 < load("h200").dram_peak_gbps
    assert f"`h200/{path.name}` | {len(rows)} rows" in text("data/reference/README.md")


def test_kv_readme_quotes_the_rows() -> None:
    rows, said = read("kv"), text("workbench/kv/README.md")
    latency = {
        (r.axes["pool_gb"], r.axes["context"], r.axes["layout"]): r.timing.median_us
        for r in rows
        if r.variant == "synthetic" and r.timing and "place" not in r.axes
    }
    for pool in (2.0, 16.0, 60.0):
        costs = {
            name: [
                100 * (latency[pool, context, name] / latency[pool, context, "contiguous"] - 1)
                for context in (16384, 46080, 131072)
            ]
            for name in ("random", "sorted", "runs:16")
        }
        cells = " | ".join(
            f"{min(each):+.1f} to {max(each):+.1f} %".replace("-0.0", "+0.0") for each in costs.values()
        )
        assert f"| {pool:g} GB | {cells} |" in said
    far = {(r.axes["pool_gb"], r.axes["context"]): r.timing.median_us for r in rows if "place" in r.axes}
    assert len(far) == 9 and all(abs(far[key] / latency[*key, "contiguous"] - 1) < 0.002 for key in far)
    copies = [r for r in rows if r.variant == "copy_rows" and r.metrics["copy_gbps"] < 3700]
    assert len(copies) >= 7 and "3.69 TB/s" in said
    assert {f"{r.metrics['copy_gbps'] / load('h200').dram_gbps:.0%}" for r in copies} == {"86%"}
    assert all(f"{r.metrics['share_of_device_copy']:.0%}" == "87%" for r in copies)


def test_tree_readme_quotes_the_rows() -> None:
    said = text("workbench/tree/README.md")
    median_us = {row.case_id: row.timing.median_us for row in read("tree") if row.timing}
    for bs in (1, 8):
        for budget in (16, 64):
            cells = [median_us[f"{m}/bs{bs}-L7-B{budget}-V163840-bf16"] for m in ("triton", "torch", "heap")]
            assert f"| {bs} | {budget} | {cells[0]:.1f} | {cells[1]:.0f} | {cells[2]:.0f} |" in said
    reached = median_us["triton/bs8-L7-B64-V163840-bf16"]
    assert reached < 60 and f"reached with {reached:.1f} µs" in said
    parts = [
        median_us[f"triton.{name}/bs8-L7-B64-V163840-bf16"] for name in ("rank", "select", "scan", "link")
    ]
    assert (
        "{:.1f} µs rank the tokens of each slot, {:.1f} select the nodes, {:.1f} read".format(*parts) in said
    )
    assert f"and {parts[3]:.1f} link the tree" in said
