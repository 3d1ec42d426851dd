"""TokenKVAllocator against a slow model that follows the upstream rules to the letter."""

import time
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workbench.kv import TokenKVAllocator


@dataclass
class SlowAllocator:
    """Python lists, one line per rule; no checks, as upstream."""

    size: int
    need_sort: bool
    free_pages: list[int] = field(default_factory=list)
    release_pages: list[int] = field(default_factory=list)
    group: list[int] | None = None

    def __post_init__(self) -> None:
        self.free_pages = list(range(1, self.size + 1))

    def alloc(self, n: int) -> list[int] | None:
        if self.need_sort and n > len(self.free_pages):
            self.merge_and_sort_free()
        if n > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:n], self.free_pages[n:]
        return taken

    def free(self, slots: list[int]) -> None:
        if not slots:
            return
        if self.group is not None:
            self.group = self.group + slots
        elif self.need_sort:
            self.release_pages = self.release_pages + slots
        else:
            self.free_pages = self.free_pages + slots

    def merge_and_sort_free(self) -> None:
        if self.release_pages:
            self.free_pages, self.release_pages = sorted(self.free_pages + self.release_pages), []

    def free_group_end(self) -> None:
        collected, self.group = self.group or [], None
        self.free(collected)


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 24), need_sort=st.booleans())
    def start(self, size: int, need_sort: bool) -> None:
        self.fast, self.slow = TokenKVAllocator(size, need_sort), SlowAllocator(size, need_sort)
        self.held: list[int] = []
        self.backup = None

    @rule(n=st.integers(0, 26))
    def alloc(self, n: int) -> None:
        got, expected = self.fast.alloc(n), self.slow.alloc(n)
        assert (None if got is None else got.tolist()) == expected
        self.held += expected or []

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(self.held), unique=True)) if self.held else []
        self.fast.free(torch.tensor(slots, dtype=torch.int64))
        self.slow.free(slots)
        self.held = [slot for slot in self.held if slot not in slots]

    @rule()
    def merge(self) -> None:
        self.fast.merge_and_sort_free()
        self.slow.merge_and_sort_free()

    @precondition(lambda self: self.slow.group is None)
    @rule()
    def begin_group(self) -> None:
        self.fast.free_group_begin()
        self.slow.group = []

    @rule()
    def end_group(self) -> None:
        self.fast.free_group_end()
        self.slow.free_group_end()

    @rule()
    def take_backup(self) -> None:
        slow = SlowAllocator(self.slow.size, self.slow.need_sort)
        slow.free_pages, slow.release_pages = list(self.slow.free_pages), list(self.slow.release_pages)
        slow.group = None if self.slow.group is None else list(self.slow.group)
        self.backup = (self.fast.backup_state(), slow, list(self.held))

    @precondition(lambda self: self.backup is not None)
    @rule()
    def restore_backup(self) -> None:
        state, slow, held = self.backup
        self.fast.restore_state(state)
        self.slow.free_pages, self.slow.release_pages = list(slow.free_pages), list(slow.release_pages)
        self.slow.group = None if slow.group is None else list(slow.group)
        self.held = list(held)

    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        free = sorted(self.slow.free_pages + self.slow.release_pages)
        assert self.fast.free_slots().tolist() == free
        slots = data.draw(st.lists(st.sampled_from(free), unique=True)) if free else []
        self.fast.claim(torch.tensor(slots, dtype=torch.int64))
        self.slow.free_pages = [slot for slot in self.slow.free_pages if slot not in slots]
        self.slow.release_pages = [slot for slot in self.slow.release_pages if slot not in slots]
        self.held += slots

    @rule(slot=st.integers(-30, 30), data=st.data())
    def refuse_a_bad_free(self, slot: int, data: st.DataObject) -> None:
        if slot in self.held:
            return
        good = data.draw(st.lists(st.sampled_from(self.held), unique=True)) if self.held else []
        with pytest.raises(ValueError, match=rf"slot {slot}\b"):
            self.fast.free(torch.tensor([*good, slot]))

    @rule()
    def clear(self) -> None:
        self.fast.clear()
        self.slow = SlowAllocator(self.slow.size, self.slow.need_sort)
        self.held, self.backup = [], None

    @invariant()
    def same_state(self) -> None:
        if not hasattr(self, "slow"):
            return
        assert self.fast.free_pages.tolist() == self.slow.free_pages
        assert self.fast.release_pages.tolist() == self.slow.release_pages
        assert self.fast.available_size() == len(self.slow.free_pages) + len(self.slow.release_pages)
        pending = self.slow.group or []
        everything = [0, *self.held, *pending, *self.slow.free_pages, *self.slow.release_pages]
        assert sorted(everything) == list(range(self.slow.size + 1))


AllocatorMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAgainstSlowModel = AllocatorMachine.TestCase


@pytest.mark.parametrize("need_sort", [False, True])
def test_edges_of_alloc(need_sort: bool) -> None:
    allocator = TokenKVAllocator(8, need_sort)
    assert allocator.alloc(0).dtype == torch.int64 and allocator.alloc(0).numel() == 0
    assert allocator.alloc(9) is None and allocator.available_size() == 8
    assert allocator.alloc(8).tolist() == list(range(1, 9))
    assert allocator.alloc(1) is None and allocator.alloc(0).numel() == 0
    with pytest.raises(ValueError, match="-1"):
        allocator.alloc(-1)


def test_default_reuses_in_the_order_of_freeing_and_need_sort_only_when_short() -> None:
    plain, sorting = TokenKVAllocator(6), TokenKVAllocator(6, need_sort=True)
    for allocator in (plain, sorting):
        allocator.alloc(4)
        allocator.free(torch.tensor([4, 2]))
    assert plain.alloc(4).tolist() == [5, 6, 4, 2]
    assert sorting.release_pages.tolist() == [4, 2]
    assert sorting.alloc(2).tolist() == [5, 6] and sorting.sorts == 0  # long enough: nothing merged yet
    assert sorting.alloc(2).tolist() == [2, 4] and sorting.sorts == 1


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_settings_agree_until_the_first_exhaustion(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    plain, sorting = TokenKVAllocator(200), TokenKVAllocator(200, need_sort=True)
    held: list[torch.Tensor] = []
    while plain.handed_out + 17 <= 200:
        slots = plain.alloc(17)
        assert torch.equal(slots, sorting.alloc(17))
        held.append(slots[torch.randperm(17, generator=generator)])
        rejected = held.pop(0)[:9]
        plain.free(rejected)
        sorting.free(rejected)
    assert sorting.sorts == 0 and plain.wraps == sorting.wraps > 0.9


def test_refusals_name_the_cause() -> None:
    allocator = TokenKVAllocator(8)
    slots = allocator.alloc(3)
    allocator.free(slots[:1])
    for bad, words in (
        ([1], "double free"),
        ([2, 3, 2], "appears twice"),
        ([0], "padding dummy"),
        ([9], r"1\.\.8"),
        ([-1], r"1\.\.8"),
        ([5], "never handed out"),
    ):
        with pytest.raises(ValueError, match=words):
            allocator.free(torch.tensor(bad))
    with pytest.raises(ValueError, match="float32"):
        allocator.free(torch.tensor([2.0]))
    assert allocator.available_size() == 6
    allocator.free(slots[1:])
    with pytest.raises(ValueError, match="not free"):
        allocator.claim(torch.tensor([3, 3]))
    with pytest.raises(ValueError, match="slot 9"):
        allocator.claim(torch.tensor([9]))


def test_a_double_free_is_seen_inside_a_group() -> None:
    allocator = TokenKVAllocator(8)
    slots = allocator.alloc(4)
    allocator.free_group_begin()
    allocator.free(slots)
    with pytest.raises(ValueError, match="double free"):
        allocator.free(slots)
    with pytest.raises(ValueError, match="open group"):
        allocator.free_group_begin()
    assert allocator.available_size() == 4
    allocator.free_group_end()
    assert allocator.available_size() == 8


def test_what_alloc_returns_is_the_callers() -> None:
    allocator = TokenKVAllocator(8)
    state = allocator.backup_state()
    slots = allocator.alloc(8)
    allocator.free(slots)
    slots.zero_()
    assert sorted(allocator.alloc(8).tolist()) == list(range(1, 9))
    allocator.restore_state(state)
    allocator.restore_state(state)
    assert allocator.alloc(8).tolist() == list(range(1, 9))


def median_us(size: int, need_sort: bool) -> float:
    """Median of one alloc(17) plus one free(17) of older slots."""
    allocator = TokenKVAllocator(size, need_sort)
    held = [allocator.alloc(17) for _ in range(64)]
    samples = []
    for turn in range(1500):
        start = time.perf_counter()
        slots = allocator.alloc(17)
        allocator.free(held[turn % 64])
        samples.append(time.perf_counter() - start)
        held[turn % 64] = slots
    return sorted(samples)[len(samples) // 2] * 1e6


@pytest.mark.parametrize("need_sort", [False, True])
def test_a_verify_step_costs_microseconds_whatever_the_pool(need_sort: bool) -> None:
    small, large = (min(median_us(size, need_sort) for _ in range(3)) for size in (4_096, 1_000_000))
    print(f"alloc+free of 17 slots: {small:.1f} us at 4k, {large:.1f} us at 1M slots")
    assert large < 30 and large < 3 * small
