"""Index maths of verify_attn_flash.cu on paper: loads and stores of a warp hit distinct banks."""

from collections import Counter
from collections.abc import Iterable

import pytest

from workbench import targets
from workbench.attention import cuda_flash
from workbench.attention.cuda_flash import Config, choose_nsplit, default_tunables
from workbench.shapes import VerifyShape

ROW_BYTES, ROPE_BYTE = 1152, 1024


def stage_offset(token: int, chunk: int) -> int:
    """Byte of 16-byte chunk `chunk` of a KV row in its stage."""
    return token * ROW_BYTES + chunk // 8 * 128 + 16 * (chunk % 8 ^ token & 7)


def p_offset(row: int, chunk: int, tokens: int) -> int:
    """Byte of chunk `chunk` of a row of P, in the rope columns of its stage."""
    if tokens == 64:
        return row * ROW_BYTES + ROPE_BYTE + 16 * (chunk ^ row & 7)
    return (row >> 1) * ROW_BYTES + ROPE_BYTE + 16 * (((row & 1) << 2) + (chunk ^ (row >> 1) & 3))


def is_conflict_free(offsets: Iterable[int], width: int) -> bool:
    """Whether accesses of `width` bytes touch each of the 32 four-byte banks at most once."""
    banks = Counter(bank for at in offsets for bank in range(at % 128 // 4, at % 128 // 4 + width // 4))
    return max(banks.values()) == 1


def test_rows_of_a_stage_stay_inside_it_and_apart() -> None:
    cells = {stage_offset(token, chunk) for token in range(64) for chunk in range(72)}
    assert len(cells) == 64 * 72 and max(cells) == 64 * ROW_BYTES - 16


@pytest.mark.parametrize("chunk", range(72))
def test_key_and_value_loads_have_no_bank_conflicts(chunk: int) -> None:
    for first in range(0, 64, 8):
        assert is_conflict_free((stage_offset(first + i, chunk) for i in range(8)), 16)


@pytest.mark.parametrize("tokens", [32, 64])
def test_p_is_free_of_conflicts_and_covers_only_rope_columns(tokens: int) -> None:
    cells = {p_offset(row, chunk, tokens) for row in range(64) for chunk in range(tokens // 8)}
    assert len(cells) == 64 * tokens // 8
    assert all(at % ROW_BYTES >= ROPE_BYTE and at < tokens * ROW_BYTES for at in cells)
    for first in range(0, 64, 8):
        for chunk in range(tokens // 8):
            rows = [p_offset(first + i, chunk, tokens) for i in range(8)]
            assert is_conflict_free(rows, 16)  # ldmatrix
            assert is_conflict_free([at + 4 * i for at in rows for i in range(4)], 4)  # the owners' stores


def test_step_offsets_are_xors_of_the_base() -> None:
    """The kernel moves by ^ 32 c and + 128 k from one base address instead of swizzling again."""
    for lane in range(32):
        for c in range(4):
            assert (
                stage_offset(lane & 15, 8 + 2 * c + (lane >> 4))
                == stage_offset(lane & 15, 8 + (lane >> 4)) ^ 32 * c
            )
            for tokens in (32, 64):
                if c < tokens // 16:
                    base = p_offset(lane & 15, lane >> 4, tokens)
                    assert p_offset(lane & 15, 2 * c + (lane >> 4), tokens) == base ^ 32 * c
        for k_part in range(4):
            chunk = 2 * k_part + (lane >> 3 & 1)
            base = stage_offset(lane & 7, chunk)
            assert all(stage_offset(lane & 7, 8 * k + chunk) == base + 128 * k for k in range(9))


def test_four_key_parts_cover_every_column_once() -> None:
    columns = [64 * k + 16 * part + i for part in range(4) for k in range(9) for i in range(16)]
    assert sorted(columns) == list(range(576))


@pytest.mark.parametrize("k_part", range(4))
def test_each_owner_gets_every_part_of_its_rows_once(k_part: int) -> None:
    """Slot s of a warp holds block s ^ k_part and goes to that owner: slot 0 is always the warp's own."""
    received = sorted((s ^ k_part, s) for s in range(4))
    assert received[k_part] == (k_part, 0)
    assert {part ^ k_part for part in range(4)} == set(range(4))


@pytest.mark.parametrize("block_m", [16, 32, 64])
def test_default_plan_fits_every_target(block_m: int) -> None:
    assert Config(block_m=block_m).shared_bytes + cuda_flash.STATIC_SMEM_BYTES <= 101_376
    for name in targets.names():
        target = targets.load(name)
        if target.backend == "cuda":
            shape = VerifyShape(1, 8, block_m // 8, 46080)
            tunables = default_tunables(shape, target, False)
            assert tunables["block_m"] == block_m
            assert (
                Config(**tunables).shared_bytes + cuda_flash.STATIC_SMEM_BYTES <= target.smem_per_block_bytes
            )


def test_nsplit_fills_the_gpu_once_and_never_beyond_the_tokens() -> None:
    h200 = targets.load("h200")
    for shape, most in [
        (VerifyShape(1, 8, 16, 46096), 66),
        (VerifyShape(8, 8, 64, 8256), 2),
        (VerifyShape(1, 8, 1, 20), 1),
    ]:
        tunables = default_tunables(shape, h200, False)
        nsplit = choose_nsplit(shape, h200, tunables, False)
        assert 1 <= nsplit <= most
        assert nsplit * -(-shape.rows // tunables["block_m"]) * shape.bs <= h200.sm_count
    assert choose_nsplit(shape, h200, tunables, True) == choose_nsplit(
        VerifyShape(8, 8, 64, 9000), h200, tunables, True
    )
