"""What nsplit="auto" and the tile table promise, for every target and many shapes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import targets
from workbench.attention import splits
from workbench.shapes import VerifyShape

GPUS = [targets.load(name) for name in targets.names() if targets.load(name).backend == "cuda"]


@given(
    st.sampled_from(GPUS), st.integers(1, 64), st.sampled_from([1, 8, 12, 16, 64, 128]), st.integers(1, 65),
    st.integers(1, 200_000),
)  # fmt: skip
def test_auto_has_no_better_neighbour_and_never_more_splits_than_blocks(
    target: targets.HardwareTarget, bs: int, heads: int, q_len: int, kv_len: int
) -> None:
    shape = VerifyShape(bs, heads, q_len, max(q_len, kv_len))
    tile = splits.tile(shape, target, False)
    block_m, block_n = tile["block_m"], tile["block_n"]
    chosen = splits.choose(shape, target, block_m, block_n, False)
    assert 1 <= chosen <= -(-shape.max_kv_len // block_n)
    best = splits.modelled_us(shape, target, block_m, block_n, chosen)
    for other in (1, 2, 8, 33, 64, 66, 132, chosen + 1, max(1, chosen - 1)):
        assert best <= splits.modelled_us(shape, target, block_m, block_n, other) + 1e-9


def test_a_long_single_request_fills_the_machine_once() -> None:
    h200 = targets.load("h200")
    shape = VerifyShape(1, 8, 16, 46080 + 16)  # 128 rows: two row tiles
    chosen = splits.choose(shape, h200, 64, 64, False)
    assert 0.8 * h200.sm_count < 2 * chosen <= h200.sm_count


def test_rows_and_requests_lower_the_split_count() -> None:
    h200 = targets.load("h200")
    base = VerifyShape(1, 8, 16, 46080)
    counts = [
        splits.choose(replace(base, **change), h200, 64, 64, False)
        for change in ({}, {"max_q_len": 64}, {"bs": 16})
    ]
    assert counts[0] > counts[1] > 1 and counts[0] > counts[2]


@pytest.mark.parametrize("target", GPUS, ids=lambda t: t.name)
def test_batch_invariance_fixes_tile_and_split_count(target: targets.HardwareTarget) -> None:
    shapes = [VerifyShape(1, 8, 1, 100), VerifyShape(8, 8, 64, 46080), VerifyShape(64, 8, 7, 4096)]
    assert len({str(splits.tile(shape, target, True)) for shape in shapes}) == 1
    assert {splits.choose(shape, target, 64, 64, True) for shape in shapes} == {splits.INVARIANT_NSPLIT}
