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
from workbench.shapes import VerifyShape

H200 = targets.load("h200")
GPUS = [targets.load(name) for name in targets.names() if targets.load(name).backend == "cuda"]
# shape: bs, heads, nodes, context. bf16, graph replays, cold L2, random slots, tree masks; kernel: the commit
MEASURED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("flash_h200.json").read_text())
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
