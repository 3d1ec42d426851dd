"""layout_score against a loop over tokens, and the made-to-order layouts."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.kv import layout_score
from workbench.kv.fragmentation import PAGE_BYTES, make_layout


def slow_score(requests: list[list[int]], row_bytes: int) -> dict[str, float]:
    """Token by token, byte by byte at the ends of each row."""
    slots = [slot for request in requests for slot in request]
    pairs = [(a, b) for request in requests for a, b in pairwise(request)]
    pages = set()
    for slot in slots:
        pages |= {slot * row_bytes // PAGE_BYTES, (slot * row_bytes + row_bytes - 1) // PAGE_BYTES}
    adjacent = sum(b == a + 1 for a, b in pairs)
    return {
        "tokens": len(slots),
        "runs": len(slots) - adjacent,
        "adjacency": adjacent / len(pairs) if pairs else 1.0,
        "descents": sum(b < a for a, b in pairs),
        "span": max(slots) - min(slots) + 1,
        "pages_2mb": len(pages),
        "pairs": len(pairs),
    }


@given(
    st.lists(st.lists(st.integers(1, 8000), min_size=1, max_size=30), min_size=1, max_size=4),
    st.sampled_from([80, 1152, 2304, 70_272]),
)
@settings(max_examples=150, deadline=None)
def test_score_equals_the_loop(requests: list[list[int]], row_bytes: int) -> None:
    indptr = np.concatenate(([0], np.cumsum([len(request) for request in requests])))
    flat = torch.tensor([slot for request in requests for slot in request])
    score = layout_score(flat, torch.from_numpy(indptr), row_bytes=row_bytes)
    for name, expected in slow_score(requests, row_bytes).items():
        assert getattr(score, name) == expected, name
    assert score.mean_run == pytest.approx(score.tokens / score.runs)
    assert score.gap_rate == pytest.approx(1 - score.adjacency)


def test_score_of_nothing_and_of_one_token() -> None:
    empty, one = layout_score(torch.tensor([], dtype=torch.int64)), layout_score(torch.tensor([7]))
    assert (empty.tokens, empty.runs, empty.pages_2mb, empty.span_ratio) == (0, 0, 0, 0.0)
    assert (one.runs, one.adjacency, one.descents, one.span, one.descent_rate) == (1, 1.0, 0, 1, 0.0)


def test_gaps_and_backward_steps_are_told_apart() -> None:
    gaps, order = layout_score(torch.tensor([1, 3, 5, 7])), layout_score(torch.tensor([3, 4, 1, 2]))
    assert (gaps.gap_rate, gaps.descents) == (1.0, 0)
    assert (order.gap_rate, order.descents) == (pytest.approx(1 / 3), 1)


@pytest.mark.parametrize(
    ("name", "mean_run", "descent_rate"),
    [
        ("contiguous", 1000, 0.0),
        ("reversed", 1, 1.0),
        ("interleaved:8", 1, 0.0),
        ("runs:50", 50, None),
        ("sorted", None, 0.0),
        ("random", None, None),
    ],
)
def test_layouts_have_the_score_they_promise(
    name: str, mean_run: float | None, descent_rate: float | None
) -> None:
    slots = make_layout(name, 1000, 20_000, seed=3)
    score = layout_score(slots)
    assert slots.dtype == torch.int64 and len(set(slots.tolist())) == 1000
    assert int(slots.min()) >= 1 and int(slots.max()) <= 20_000
    if mean_run is not None:
        assert score.mean_run == pytest.approx(mean_run, rel=0.06)
    if descent_rate is not None:
        assert score.descent_rate == descent_rate
    if name == "random":
        assert 0.4 < score.descent_rate < 0.6 and torch.equal(
            slots.sort()[0], make_layout("sorted", 1000, 20_000, seed=3)
        )


def test_a_layout_can_sit_at_the_far_end_and_must_fit() -> None:
    far = make_layout("contiguous", 10, 100, first=91)
    assert far.tolist() == list(range(91, 101))
    for name, tokens in (("contiguous", 102), ("interleaved:4", 30), ("random", 101), ("runs:30", 95)):
        with pytest.raises(ValueError, match=name):
            make_layout(name, tokens, 100)
    for name in ("spiral", "runs", "runs:0", "contiguous:3", "interleaved:x"):
        with pytest.raises(ValueError, match=f"'{name}'"):
            make_layout(name, 10, 100)
