"""The tile and nsplit="auto" of triton_split against what was measured on an H200 (triton_h200.json)."""

import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from workbench import targets
from workbench.attention import triton_split
from workbench.shapes import VerifyShape

H200 = targets.load("h200")
# shape: bs, heads, nodes, context. bf16, graph replays, cold L2, random slots and tree masks
MEASURED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("triton_h200.json").read_text())
SHAPES = sorted({tuple(row["shape"]) for row in MEASURED})
NAMES = ("block_m", "block_n", "num_warps", "num_stages", "prefetch", "pdl")


def split_tokens(kv_len: int, row: dict[str, Any]) -> int:
    """What a split works on: nsplits that round to the same blocks are the same launch."""
    return ceil(ceil(kv_len / row["block_n"]) / row["nsplit"]) * row["block_n"]


@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_auto_is_within_5_percent_of_the_best_measured(axes: tuple[int, ...]) -> None:
    bs, heads, nodes, context = axes
    shape = VerifyShape(bs, heads, nodes, context + nodes)
    rows = [row for row in MEASURED if tuple(row["shape"]) == axes]
    auto = triton_split.default_tunables(shape, H200, False)
    auto["nsplit"] = triton_split.choose_nsplit(shape, H200, auto, False)
    tokens = split_tokens(shape.max_kv_len, auto)
    chosen = [
        row["us"]
        for row in rows
        if all(row[name] == auto[name] for name in NAMES) and split_tokens(shape.max_kv_len, row) == tokens
    ]
    assert chosen, f"{auto} was not measured at {axes}"
    assert min(chosen) <= 1.05 * min(row["us"] for row in rows)
