"""The churn against the published model of the same rules, and its bookkeeping under pressure."""

from dataclasses import replace

import numpy as np
import pytest

from workbench.kv.churn import Churn, age_pool, run_churn
from workbench.kv.fragmentation import layout_score
from workbench.kv.policies import policies, policy
from workbench.kv.workload import Lengths, load, names
from workbench.targets import ROOT

# (workload, requests, wraps, policy) -> gap, descent, span/len, sorts of the model (pool 32,768)
MODEL = [
    ("facts_tree", 1, 0.25, "fifo", 0.717, 0.0, 6.7, 0),
    ("facts_tree", 1, 8, "fifo", 0.922, 0.027, 22.9, 0),
    ("facts_tree", 1, 8, "need_sort", 0.749, 0.0, 7.3, 8),
    ("facts_tree", 8, 0.9, "need_sort", 0.574, 0.0, 42.0, 0),
    ("facts_tree", 8, 8, "fifo", 0.939, 0.103, 23.1, 0),
    ("facts_tree", 8, 8, "need_sort", 0.898, 0.002, 23.0, 12),
    ("facts_chain", 8, 8, "fifo", 0.250, 0.127, 15.3, 0),
    ("facts_chain", 8, 8, "need_sort", 0.250, 0.0005, 15.0, 10),
    ("facts_plain", 8, 0.5, "fifo", 0.875, 0.0, 7.6, 0),
    ("facts_plain", 8, 8, "fifo", 1.000, 0.517, 11.9, 0),
    ("facts_plain", 8, 8, "need_sort", 0.907, 0.0004, 8.7, 10),
]


@pytest.mark.parametrize(("workload", "requests", "wraps", "name", "gap", "descent", "span", "sorts"), MODEL)
def test_churn_agrees_with_the_model(
    workload: str, requests: int, wraps: float, name: str, gap: float, descent: float, span: float, sorts: int
) -> None:
    preset = replace(load(workload), max_running=requests)
    snapshot = run_churn(policy(name), preset, 32_768, [wraps])[0]
    score = snapshot.score()
    spans = [layout_score(snapshot.request(i)).span_ratio for i in range(requests)]
    print(f"gap {score.gap_rate:.3f} ({gap}), descent {score.descent_rate:.4f} ({descent})")
    assert score.gap_rate == pytest.approx(gap, abs=0.025)
    assert score.descent_rate == pytest.approx(descent, rel=0.25, abs=0.002)
    assert np.mean(spans) == pytest.approx(span, rel=0.1)
    assert snapshot.sorts == sorts and snapshot.wraps >= wraps


def test_need_sort_changes_nothing_before_the_first_exhaustion() -> None:
    plain, sorting = (
        run_churn(policy(name), load("facts_tree"), 32_768, [0.9, 1.5]) for name in ("fifo", "need_sort")
    )
    assert np.array_equal(plain[0].indices, sorting[0].indices)
    assert not np.array_equal(plain[1].indices, sorting[1].indices) and sorting[1].sorts == 1


def assert_consistent(churn: Churn) -> None:
    """Held slots are exactly those of the running requests, each once."""
    snapshot = churn.snapshot()
    held = churn.allocator.book.held()
    assert np.array_equal(np.sort(snapshot.indices), held)
    assert len(np.unique(snapshot.indices)) == len(snapshot.indices)


@pytest.mark.parametrize("name", [each.name for each in policies()])
def test_a_pool_too_small_for_the_load_retracts_and_leaks_nothing(name: str) -> None:
    workload = replace(
        load("facts_tree"), output_tokens=Lengths("lognormal", median=700, sigma=0.6, max=1500)
    )
    churn = Churn(policy(name), workload, 4_096, seed=5)
    while churn.allocator.wraps < 6:
        churn.step()
        if churn.steps % 20 == 0:
            assert_consistent(churn)
    assert churn.retractions > 0 and churn.refused >= churn.retractions
    for request in list(churn.running):
        churn._leave(request)
    assert churn.allocator.available_size() == 4_096


@pytest.mark.parametrize("name", names())
def test_presets_load_state_their_origin_and_wrap(name: str) -> None:
    workload = load(name)
    assert len(workload.origin) > 40 and workload.title
    size = 260_000 if name == "long_decode" else 65_536
    ages = [0.3, 1.0]
    for snapshot, age in zip(run_churn(policy("fifo"), workload, size, ages, seed=1), ages):
        assert snapshot.wraps >= age and 0 < snapshot.occupancy <= 1
        assert snapshot.indptr[-1] == len(snapshot.indices) and 0 not in snapshot.indices


def test_compaction_keeps_pages_dense_and_counts_what_it_moves() -> None:
    snapshot = run_churn(policy("paged64"), load("facts_tree"), 32_768, [3.0])[0]
    assert snapshot.moved_rows > 1000
    for index in range(len(snapshot.request_ids)):
        slots = snapshot.request(index).numpy()
        assert (np.diff(slots) != 1).sum() <= len(slots) // 64 + 1


def test_owners_paint_the_pool() -> None:
    snapshot = run_churn(policy("fifo"), load("facts_tree"), 32_768, [1.0])[0]
    owners = snapshot.owners()
    assert (owners >= 0).sum() == len(snapshot.indices) and owners[0] == -1
    assert (owners[snapshot.longest().numpy()] == owners[snapshot.longest()[0]]).all()


def test_bad_workloads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'nope'.*chat"):
        load("nope")
    with pytest.raises(ValueError, match="accept_length"):
        replace(load("chat"), accept_length=18.0)
    with pytest.raises(ValueError, match="size=1024"):
        Churn(policy("fifo"), load("chat"), 1024)


def test_same_seed_same_layout() -> None:
    first, second = (run_churn(policy("fifo"), load("chat"), 65_536, [1.0], seed=9)[0] for _ in range(2))
    assert np.array_equal(first.indices, second.indices)


def readme_table() -> list[list[str]]:
    """Cells of the rows of the allocator table in workbench/kv/README.md."""
    lines = (ROOT / "workbench" / "kv" / "README.md").read_text().splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| facts_")]


@pytest.mark.parametrize("cells", readme_table(), ids=lambda cells: "-".join(cells[:4]))
def test_the_readme_table_is_what_the_churn_gives(cells: list[str]) -> None:
    workload, requests, wraps, name, gaps, descents, sorts = cells
    preset = replace(load(workload), max_running=int(requests))
    snapshot = run_churn(policy(name), preset, 32_768, [float(wraps)])[0]
    score = snapshot.score()
    assert gaps == f"{100 * score.gap_rate:.1f} %" and descents == f"{100 * score.descent_rate:.2f} %"
    assert int(sorts) == snapshot.sorts


def test_sorting_prevents_gaps_and_closes_none_as_the_readme_says() -> None:
    said, numbers = " ".join((ROOT / "workbench/kv/README.md").read_text().split()), []
    for name in ("fifo", "need_sort"):
        churn = Churn(policy(name), load("long_decode_small"), 32_768, 0)
        snapshot = age_pool(churn, 4.0)
        ahead = churn.allocator.alloc(2048)
        assert ahead is not None
        numbers.append((snapshot.score().gap_rate, layout_score(ahead).gap_rate, snapshot.sorts))
    (plain, plain_ahead, _), (sorting, sorting_ahead, sorts) = numbers
    assert f"{100 * plain:.1f} to {100 * sorting:.1f} % after 4 wraps" in said
    assert f"{100 * plain_ahead:.0f} % of the next 2,048 slots" in said
    assert f"{100 * sorting_ahead:.0f} % after sorting" in said and f"({sorts} times in 4 wraps at 4" in said


def test_a_sort_changes_no_live_request() -> None:
    churn = Churn(policy("need_sort"), load("long_decode_small"), 32_768, 0)
    before = age_pool(churn, 2.0)
    churn.allocator.merge_and_sort_free()
    assert np.array_equal(churn.snapshot().indices, before.indices)
