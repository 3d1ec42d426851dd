"""Every policy: nothing lost, nothing handed out twice, and the order each of them promises."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.kv.allocator import TokenKVAllocator
from workbench.kv.best_fit import BestFitRuns
from workbench.kv.booked import SortedAlways
from workbench.kv.paged import Paged
from workbench.kv.policies import policies, policy

NAMES = [each.name for each in policies()]


def churn(allocator, seed: int, steps: int = 60) -> None:
    """Random requests that grow, shrink and end; the partition of the slots is checked after each step."""
    generator = np.random.default_rng(seed)
    requests: list[list[int]] = [[] for _ in range(3)]
    for _ in range(steps):
        request = requests[generator.integers(3)]
        before = allocator.available_size()
        slots = allocator.alloc(int(generator.integers(0, 24)), request[-1] if request else 0)
        if slots is None:
            assert allocator.available_size() == before
            allocator.free(torch.tensor(request, dtype=torch.int64))
            request.clear()
        else:
            request += slots.tolist()
            rejected = generator.permutation(np.arange(len(request)))[: generator.integers(0, 5)]
            allocator.free(torch.tensor([request[i] for i in rejected], dtype=torch.int64))
            request[:] = [slot for i, slot in enumerate(request) if i not in rejected]
        held = sorted(slot for request in requests for slot in request)
        assert held == allocator.book.held().tolist() and len(set(held)) == len(held) and 0 not in held
        free = allocator.free_slots().tolist()
        assert len(free) == allocator.available_size() and not set(free) & set(held)
        if allocator.page_size == 1:
            assert sorted(free + held) == list(range(1, allocator.size + 1))
    for request in requests:
        allocator.free(torch.tensor(request, dtype=torch.int64))
    assert allocator.available_size() == allocator.size
    assert len(set(allocator.alloc(allocator.size).tolist())) == allocator.size


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=12, deadline=None)
def test_no_slot_is_lost_or_shared(name: str, seed: int) -> None:
    churn(policy(name).make(128), seed)


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_refuses_a_double_free_and_slot_0(name: str) -> None:
    allocator = policy(name).make(128)
    slots = allocator.alloc(5)
    allocator.free(slots)
    with pytest.raises(ValueError, match=f"double free: slot {int(slots[0])} "):
        allocator.free(slots)
    with pytest.raises(ValueError, match=r"slot 0 |foreign slot 0"):
        allocator.free(torch.tensor([0]))
    with pytest.raises(ValueError, match="-2"):
        allocator.alloc(-2)
    assert allocator.alloc(0).numel() == 0


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_sorted_always_is_a_sort_before_every_alloc(seed: int) -> None:
    generator = np.random.default_rng(seed)
    fast, slow = SortedAlways(300), TokenKVAllocator(300, need_sort=True)
    held = np.empty(0, dtype=np.int64)
    for _ in range(50):
        n = int(generator.integers(0, 40))
        slow.merge_and_sort_free()
        got, expected = fast.alloc(n), slow.alloc(n)
        assert (got is None) == (expected is None)
        if got is not None:
            assert torch.equal(got, expected)
            held = np.concatenate((held, got.numpy()))
        generator.shuffle(held)
        freed, held = held[: len(held) // 3], held[len(held) // 3 :]
        fast.free(torch.from_numpy(freed))
        slow.free(torch.from_numpy(freed))


def free_runs(free: list[int]) -> dict[int, int]:
    """start -> length of the maximal runs, one slot at a time."""
    runs: dict[int, int] = {}
    start = None
    for slot in free:
        if start is None or slot != start + runs[start]:
            start = slot
            runs[start] = 0
        runs[start] += 1
    return runs


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_best_fit_takes_the_smallest_run_that_fits(seed: int) -> None:
    generator = np.random.default_rng(seed)
    allocator = BestFitRuns(200)
    allocator.alloc(200)
    allocator.free(torch.from_numpy(generator.permutation(200)[:120] + 1))
    for _ in range(6):
        n = int(generator.integers(1, 9))
        runs = free_runs(allocator.free_slots().tolist())
        fitting = sorted(length for length in runs.values() if length >= n)
        slots = allocator.alloc(n).tolist()
        if fitting:
            assert slots == list(range(slots[0], slots[0] + n)) and runs[slots[0]] == fitting[0]
        else:
            assert len(set(slots)) == n


def test_best_fit_continues_a_request() -> None:
    allocator = BestFitRuns(64)
    first = allocator.alloc(8)
    allocator.alloc(4)
    allocator.free(first[5:])
    assert allocator.alloc(3, int(first[4])).tolist() == [6, 7, 8]
    assert allocator.alloc(2, 8).tolist() == [13, 14]  # slot 9 is taken: the next run
    allocator.claim(torch.tensor([20, 21, 40]))
    assert allocator.free_slots().tolist() == [*range(15, 20), *range(22, 40), *range(41, 65)]
    with pytest.raises(ValueError, match="slot 40"):
        allocator.claim(torch.tensor([39, 40]))


def test_paged_reuses_the_last_freed_page_first_and_fills_the_own_page() -> None:
    allocator = Paged(64, 16)
    request = allocator.alloc(20)
    assert request.tolist() == list(range(16, 36)) and allocator.available_size() == 32
    assert allocator.alloc(4, 35).tolist() == [36, 37, 38, 39] and allocator.available_size() == 32
    other = allocator.alloc(1)
    assert other.tolist() == [48]
    allocator.free(other)
    allocator.free(request[:16])
    assert allocator.alloc(17).tolist() == [*range(16, 32), 48]  # page 1 freed last, page 3 before it
    with pytest.raises(ValueError, match="page_size=16"):
        Paged(60, 16)
    with pytest.raises(ValueError, match="page_size=1 policies"):
        allocator.claim(torch.tensor([64]))


def test_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'lifo'.*fifo, need_sort"):
        policy("lifo")
