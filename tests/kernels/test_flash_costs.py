"""The tile and nsplit="auto" of cuda_flash against what was measured on an H200 (flash_h200.json)."""

import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import targets
from workbench.attention import cuda_flash, flash_costs
from workbench.rows import Row
from workbench.rows_file import read_rows
from workbench.shapes import VerifyShape

H200 = targets.load("h200")
GPUS = [targets.load(name) for name in targets.names() if targets.load(name).backend == "cuda"]
# shape: bs, heads, nodes, context. bf16, graph replays, cold L2, random slots, tree masks; kernel: the commit
MEASURED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("flash_h200.json").read_text())
SPLITS = Path(__file__).resolve().parents[2] / "data" / "reference" / "h200" / "splits.parquet"
SHAPES = sorted({tuple(row["shape"]) for row in MEASURED})


def bucket(bs: int, heads: int, nodes: int, context: int) -> VerifyShape:
    return VerifyShape(bs, heads, nodes, context + nodes)


def split_tokens(shape: VerifyShape, row: dict[str, Any]) -> int:
    """What a split works on: nsplits that round to the same tiles are the same launch."""
    return ceil(ceil(shape.max_kv_len / row["nsplit"]) / row["block_n"]) * row["block_n"]


@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_auto_is_within_5_percent_of_the_best_measured(axes: tuple[int, ...]) -> None:
    shape = bucket(*axes)
    rows = [row for row in MEASURED if tuple(row["shape"]) == axes]
    auto = cuda_flash.default_tunables(shape, H200, False)
    auto["nsplit"] = cuda_flash.choose_nsplit(shape, H200, auto, False)
    names = ("block_m", "block_n", "num_stages")
    # below 16 rows some shapes were timed by warps only: they still judge tile and nsplit
    same_merge = [row for row in rows if row["merge"] == auto["merge"]] or rows
    chosen = [
        row["us"]
        for row in same_merge
        if all(row[name] == auto[name] for name in names)
        and split_tokens(shape, row) == split_tokens(shape, auto)
    ]
    assert chosen, f"{auto} was not measured at {axes}"
    assert min(chosen) <= 1.05 * min(row["us"] for row in rows)


def test_the_model_is_as_good_as_it_says() -> None:
    errors = [
        flash_costs.modelled_us(
            bucket(*row["shape"]), H200.sm_count, row["block_m"], row["block_n"], row["nsplit"], row["merge"]
        )
        / row["us"]
        - 1
        for row in MEASURED
        if row["merge"] == "kernel"
    ]
    assert max(map(abs, errors)) < 0.12
    assert (sum(e * e for e in errors) / len(errors)) ** 0.5 < 0.035


def split_errors(merge: str) -> tuple[list[float], list[float]]:
    """modelled / measured - 1 of rows with more than one split: of flash_h200.json, and of splits.parquet."""
    own = [
        flash_costs.modelled_us(
            bucket(*row["shape"]), H200.sm_count, row["block_m"], row["block_n"], row["nsplit"], merge
        )
        / row["us"]
        - 1
        for row in MEASURED
        if row["merge"] == merge and row["nsplit"] > 1
    ]
    swept = []
    for row in read_rows(SPLITS):
        if row.variant != "cuda_flash" or row.axes["nsplit"] == "auto" or row.timing is None:
            continue
        shape = swept_shape(row)
        tile = cuda_flash.default_tunables(shape, H200, False)
        nsplit = int(row.metrics["plan_nsplit"])
        if tile["merge"] == merge and nsplit > 1:
            us = flash_costs.modelled_us(
                shape, H200.sm_count, tile["block_m"], tile["block_n"], nsplit, merge
            )
            swept.append(us / row.timing.median_us - 1)
    return own, swept


def rms(errors: list[float]) -> float:
    return float((sum(e * e for e in errors) / len(errors)) ** 0.5)


def test_the_merge_by_warps_is_as_good_as_it_says() -> None:
    own, swept = split_errors("warps")
    assert (len(own), len(swept)) == (93, 375)
    assert rms(own + swept) == pytest.approx(0.048, abs=5e-4)
    assert max(map(abs, own + swept)) == pytest.approx(0.234, abs=1e-3)


def test_the_merge_by_kernel_is_as_far_off_on_the_sweeps_as_it_says() -> None:
    own, swept = split_errors("kernel")
    assert (len(own), len(swept)) == (180, 30)
    assert rms(own) == pytest.approx(0.029, abs=5e-4) and max(map(abs, own)) < 0.11
    assert rms(swept) == pytest.approx(0.126, abs=5e-4)
    assert max(map(abs, swept)) == pytest.approx(0.185, abs=1e-3)
    assert sum(e > 0 for e in swept) == 28


def test_one_tile_depends_on_whose_merge_is_modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    swept = {swept_shape(row) for row in read_rows(SPLITS) if row.variant == "cuda_flash"}
    shapes = sorted({*swept, *(bucket(*axes) for axes in SHAPES)}, key=str)
    before = {shape: auto_tile(shape) for shape in shapes}
    monkeypatch.setitem(flash_costs.MERGE_US, "kernel", flash_costs.MERGE_US["warps"])
    [changed] = [shape for shape in shapes if auto_tile(shape) != before[shape]]
    assert len(shapes) == 59 and changed == bucket(1, 8, 64, 4096)
    assert (before[changed], auto_tile(changed)) == ((64, 32), (64, 64))
    timed = [row for row in MEASURED if row["shape"] == [1, 8, 64, 4096] and row["merge"] == "warps"]
    assert timed and all(row["block_n"] == 32 for row in timed)


def swept_shape(row: Row) -> VerifyShape:
    return VerifyShape(*(int(row.axes[name] or 0) for name in ("bs", "heads", "q_len", "kv_len")))


def auto_tile(shape: VerifyShape) -> tuple[int, int]:
    tunables = cuda_flash.default_tunables(shape, H200, False)
    return tunables["block_m"], tunables["block_n"]


def test_few_rows_merge_by_kernel_many_by_warps_as_measured() -> None:
    def merge(rows: int, batch_invariant: bool = False) -> str:
        name = cuda_flash.default_tunables(bucket(1, 1, rows, 46080), H200, batch_invariant)["merge"]
        return str(name)

    assert [merge(rows) for rows in (1, 16, 17, 512)] == ["kernel", "kernel", "warps", "warps"]
    assert merge(1, batch_invariant=True) == merge(512, batch_invariant=True) == "warps"
    new = [row for row in MEASURED if row["kernel"] == "afcd1bd"]
    for axes in {tuple(row["shape"]) for row in new if row["merge"] == "kernel"}:
        times = {  # one tile and nsplit, both merges
            name: min(
                r["us"] for r in new if tuple(r["shape"]) == axes and r["merge"] == name and _is_auto(axes, r)
            )
            for name in cuda_flash.MERGE_KERNELS
        }
        assert times[merge(axes[1] * axes[2])] <= min(times.values()), (axes, times)


def _is_auto(axes: tuple[int, ...], row: dict[str, Any]) -> bool:
    shape = bucket(*axes)
    tunables = cuda_flash.default_tunables(shape, H200, False)
    return bool(row["nsplit"] == cuda_flash.choose_nsplit(shape, H200, tunables, False))


@given(
    st.sampled_from(GPUS), st.integers(1, 64), st.sampled_from([1, 8, 12, 64, 128]), st.integers(1, 65),
    st.integers(1, 200_000), st.booleans(),
)  # fmt: skip
def test_choices_fit_every_target(
    target: targets.HardwareTarget, bs: int, heads: int, nodes: int, context: int, invariant: bool
) -> None:
    shape = bucket(bs, heads, nodes, context)
    tunables = cuda_flash.default_tunables(shape, target, invariant)
    need = cuda_flash.Config(**tunables).shared_bytes + cuda_flash.STATIC_SMEM_BYTES
    assert need <= target.smem_per_block_bytes
    nsplit = cuda_flash.choose_nsplit(shape, target, tunables, invariant)
    assert invariant or 1 <= nsplit <= ceil(shape.max_kv_len / tunables["block_n"])
    if invariant:
        assert tunables == cuda_flash.default_tunables(bucket(1, 8, 1, 64), target, True)
