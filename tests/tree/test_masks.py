"""Layouts against their address formulas, and round trips."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.tree import masks
from workbench.tree.ddtree import build_ddtree


def random_masks(sizes: list[int], seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(n, n, generator=g) < 0.5 for n in sizes]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 9)), min_size=1, max_size=4), st.integers(0, 2**31)
)
def test_addresses_and_round_trips(lengths: list[tuple[int, int]], seed: int) -> None:
    q_lens, prefixes = [n for n, _ in lengths], [s for _, s in lengths]
    squares = random_masks(q_lens, seed)
    tree, full, packed = masks.to_tree(squares), masks.to_full(squares, prefixes), masks.to_packed(squares)
    assert packed.dtype == torch.uint32 and packed.shape == (sum(q_lens), -(-max(q_lens) // 32))
    tree_base = full_base = row_base = 0
    words = packed.tolist()
    for n, s, square in zip(q_lens, prefixes, squares):
        for i in range(n):
            for j in range(n):
                assert tree[tree_base + i * n + j] == square[i, j]
                assert full[full_base + i * (s + n) + s + j] == square[i, j]
                assert bool(words[row_base + i][j // 32] >> (j % 32) & 1) == square[i, j]
            assert bool(full[full_base + i * (s + n) :][:s].all())
        tree_base, full_base, row_base = tree_base + n * n, full_base + n * (s + n), row_base + n
    for back in (
        masks.from_tree(tree, q_lens),
        masks.from_full(full, q_lens, prefixes),
        masks.from_packed(packed, q_lens),
    ):
        assert all(torch.equal(a, b) for a, b in zip(back, squares, strict=True))


@pytest.mark.parametrize("n,width", [(1, 1), (8, 1), (9, 2), (16, 2), (17, 4), (32, 4)])
def test_byte_layout(n: int, width: int) -> None:
    squares = random_masks([n, n, n], n)
    flat = masks.to_bytes(squares)
    assert flat.numel() == 3 * n * width
    for b, square in enumerate(squares):
        for i in range(n):
            row = int.from_bytes(bytes(flat[(b * n + i) * width :][:width].tolist()), "little")
            assert [bool(row >> j & 1) for j in range(n)] == square[i].tolist() and row >> n == 0
    assert all(torch.equal(a, b) for a, b in zip(masks.from_bytes(flat, 3, n), squares))


def test_sizes_of_a_long_request() -> None:
    square = [build_ddtree(torch.randn(7, 50), 32).visibility()]
    assert (
        masks.to_full(square, [100_000]).numel() == 33 * 100_033
    )  # 3.30 MB for what a tree says in 1,089 bytes
    assert masks.to_tree(square).numel() == 1_089


def test_refusals_name_the_fix() -> None:
    square = random_masks([3], 0)
    with pytest.raises(ValueError, match="hides part of its prefix"):
        masks.from_full(torch.zeros(3 * 5, dtype=torch.bool), [3], [2])
    with pytest.raises(ValueError, match="at most 32"):
        masks.to_bytes(random_masks([33], 0))
    with pytest.raises(ValueError, match="one length per mask"):
        masks.to_full(square, [1, 2])
    with pytest.raises(ValueError, match="ask for 16"):
        masks.from_tree(masks.to_tree(square), [4])
    with pytest.raises(ValueError, match="use at least 3 words"):
        masks.to_packed(random_masks([70], 0), words=2)
