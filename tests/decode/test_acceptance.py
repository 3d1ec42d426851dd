"""Per-position acceptance counts, against a direct count over random passes."""

import numpy as np

from workbench.decode.acceptance import AcceptanceStats


def test_counts_equal_a_direct_count():
    rng = np.random.default_rng(0)
    depths = rng.integers(0, 6, 400)
    lengths = np.array([rng.integers(1, depth + 2) for depth in depths])
    stats = AcceptanceStats(5)
    for length, depth in zip(lengths, depths):
        stats.add(int(length), int(depth))
    assert stats.mean_length == lengths.mean()
    for d in range(1, 6):
        accepted = (lengths - 1 >= d).sum()
        assert np.isclose(stats.per_position()[d - 1], accepted / 400)
        reached = min((lengths - 1 >= d - 1).sum(), (depths >= d).sum())
        assert np.isclose(stats.conditional()[d - 1], accepted / reached)


def test_nothing_yet():
    stats = AcceptanceStats(3)
    assert stats.mean_length == 0.0 and stats.per_position() == [0.0] * 3
    assert stats.conditional() == [None] * 3
    stats.add(1, 0)
    assert stats.conditional() == [None] * 3 and stats.mean_length == 1.0
