"""KVPool: shapes, bytes and the dummy row."""

import pytest
import torch

from workbench.kv import KVPool


def test_layers_are_views_with_a_dummy_row_in_front() -> None:
    pool = KVPool(layers=3, size=10, width=576, dtype=torch.bfloat16)
    assert pool.layer(2).shape == (11, 576) and pool.layer(0).stride() == (576, 1)
    pool.layer(1)[4] = 7
    assert pool.buffer[1, 4, 0] == 7 and pool.buffer[0].abs().sum() == 0
    assert pool.row_bytes == 1152 and pool.token_bytes == 3456
    assert pool.bytes == pool.buffer.numel() * 2 == 3456 * 11


def test_61_layers_cost_70_kilobytes_per_token() -> None:
    assert KVPool(layers=61, size=1, width=576).token_bytes == 70_272


@pytest.mark.parametrize("field", ["layers", "size", "width"])
def test_empty_pools_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=0"):
        KVPool(**{"layers": 1, "size": 1, "width": 1, field: 0})
