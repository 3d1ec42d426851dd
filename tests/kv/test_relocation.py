"""Relocation: every request reads the same rows before, during, after and when it is stopped."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.kv import KVPool, layout_score, plan_relocation, relocate
from workbench.kv.fragmentation import make_layout
from workbench.kv.holders import SlotMapping, SlotTensor, remap
from workbench.kv.policies import policies, policy
from workbench.kv.relocation import copy_rows
from workbench.kv.scatter_cost import ScatterCost, fit_scatter_cost
from workbench.targets import load

COSTLY = ScatterCost(10.0, 0.01, 0.02, (0.009, 0.011), (0.01, 0.03), 0.1, 5.0, (4.0, 6.0), 20)
FREE = ScatterCost(10.0, 0.0, 0.0, (-0.01, 0.01), (-0.01, 0.01), 0.5, 0.0, (-0.4, 0.4), 20)


class Decode:
    """A toy decode: every token's row is known from (request, position), in two pools of different width."""

    def __init__(self, name: str, seed: int, size: int = 1200) -> None:
        self.rng = np.random.default_rng(seed)
        self.allocator = policy(name).make(size)
        self.pools = [KVPool(3, size, 4, torch.float32), KVPool(2, size + 8, 5, torch.bfloat16)]
        self.slots: dict[int, torch.Tensor] = {}
        self.table = torch.full((4, 600), -1, dtype=torch.int32)  # request table, padded with -1
        self.graph = torch.zeros(2400, dtype=torch.int64)  # static kv_indices, padded with the dummy
        self.truth: dict[int, torch.Tensor] = {}
        self.holders = [
            SlotMapping("requests", self.slots),
            SlotTensor("request table", self.table),
            SlotTensor("graph kv_indices", self.graph),
        ]

    def step(self) -> None:
        """A verify step of 9 rows for one request; keeps a random part, sometimes ends the request."""
        request = int(self.rng.integers(4))
        held = self.slots.get(request, torch.empty(0, dtype=torch.int64))
        if len(held) > 250 or (window := self.allocator.alloc(9, int(held[-1]) if len(held) else 0)) is None:
            self.allocator.free(held)
            self.slots[request] = self.truth[request] = torch.empty(0, dtype=torch.int64)
        else:
            keep = torch.from_numpy(self.rng.random(9) < 0.5)
            values = torch.from_numpy(self.rng.integers(-100, 100, 9))
            for pool in self.pools:
                pool.buffer[:, window] = values[None, :, None].to(pool.buffer.dtype)
            self.allocator.free(window[~keep])
            self.slots[request] = torch.cat((held, window[keep]))
            old = self.truth.get(request, torch.empty(0, dtype=torch.int64))
            self.truth[request] = torch.cat((old, values[keep]))
        self.write_static()

    def write_static(self) -> None:
        self.table.fill_(-1)
        self.graph.zero_()
        start = 0
        for request, slots in self.slots.items():
            self.table[request, : len(slots)] = slots.to(torch.int32)
            self.graph[start : start + len(slots)] = slots
            start += len(slots)

    def plan(self, cost: ScatterCost = COSTLY, remaining_steps: int = 1000, **options):
        return plan_relocation(
            self.slots,
            self.allocator,
            self.holders,
            token_bytes=3 * 16 + 2 * 10,
            layers=5,
            target=load("cpu"),
            cost=cost,
            remaining_steps=remaining_steps,
            **options,
        )

    def check(self) -> None:
        """Every holder leads every layer of every pool to the right values; slots are a partition."""
        start = 0
        for request, slots in self.slots.items():
            n = len(slots)
            assert self.table[request, :n].tolist() == slots.tolist()
            assert self.graph[start : start + n].tolist() == slots.tolist()
            start += n
            for pool in self.pools:
                expected = self.truth[request].to(pool.buffer.dtype)[None, :, None]
                assert torch.equal(pool.buffer[:, slots], expected.expand(pool.layers, n, pool.width))
        assert (self.graph[start:] == 0).all()
        held = torch.cat(list(self.slots.values())).sort()[0]
        assert held.tolist() == self.allocator.book.held().tolist()


@pytest.mark.parametrize("name", [each.name for each in policies() if not each.name.startswith("paged")])
@given(seed=st.integers(0, 2**32 - 1), chunk=st.sampled_from([None, 1, 7, 50]))
@settings(max_examples=5, deadline=None)
def test_rows_are_the_same_at_every_moment_of_a_relocation(name: str, seed: int, chunk: int | None) -> None:
    decode = Decode(name, seed)
    moved = 0
    for step in range(75):
        decode.step()
        decode.check()
        if step % 15 == 14:
            plan = decode.plan()
            outcome = relocate(decode.pools, plan, chunk_rows=chunk, should_stop=lambda: bool(decode.check()))
            decode.check()
            assert outcome.rows == plan.rows and outcome.done == (plan.rows > 0)
            moved += outcome.rows
            if outcome.done:
                score = sum(layout_score(decode.slots[request]).gaps for request in plan.requests)
                assert score == plan.after.gaps < plan.before.gaps
    assert moved > 0


@given(seed=st.integers(0, 2**32 - 1), stop_after=st.integers(0, 6))
@settings(max_examples=10, deadline=None)
def test_a_stopped_relocation_leaves_the_old_layout(seed: int, stop_after: int) -> None:
    decode = Decode("fifo", seed)
    for _ in range(60):
        decode.step()
    before = {request: slots.clone() for request, slots in decode.slots.items()}
    free = decode.allocator.free_pages
    asked = iter(range(100))
    plan = decode.plan()
    outcome = relocate(decode.pools, plan, chunk_rows=40, should_stop=lambda: next(asked) >= stop_after)
    assert (not outcome.done and outcome.rows == 0) or stop_after > plan.rows // 40
    if not outcome.done:
        assert all(torch.equal(before[request], slots) for request, slots in decode.slots.items())
        assert torch.equal(decode.allocator.free_pages, free)
    decode.check()
    for _ in range(30):
        decode.step()
        decode.check()


class Broken:
    """A holder that fails in one of the two phases."""

    name = "broken"

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def stage(self, slot_map: torch.Tensor) -> None:
        if self.phase == "stage":
            raise RuntimeError("no room to stage")

    def commit(self) -> None:
        if self.phase == "commit":
            raise RuntimeError("lost the device")

    def rollback(self) -> None: ...


@pytest.mark.parametrize("phase", ["stage", "commit"])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_failing_holder_rolls_everyone_back(phase: str, place: int) -> None:
    decode = Decode("need_sort", 3)
    for _ in range(80):
        decode.step()
    decode.holders.insert(place, Broken(phase))
    before, table = {r: s.clone() for r, s in decode.slots.items()}, decode.table.clone()
    address = decode.table.data_ptr()
    with pytest.raises(RuntimeError):
        relocate(decode.pools, decode.plan())
    assert all(torch.equal(before[r], s) for r, s in decode.slots.items())
    assert torch.equal(decode.table, table) and decode.table.data_ptr() == address
    decode.check()


def test_a_stale_plan_is_refused() -> None:
    decode = Decode("fifo", 1)
    for _ in range(60):
        decode.step()
    plan = decode.plan()
    decode.allocator.claim(plan.targets[:1])
    with pytest.raises(ValueError, match=f"target slot {int(plan.targets[0])} "):
        relocate(decode.pools, plan)
    decode.allocator.free(plan.targets[:1])
    victim = plan.requests[0]
    decode.allocator.free(decode.slots.pop(victim))
    with pytest.raises(ValueError, match="was freed since the plan"):
        relocate(decode.pools, plan)
    with pytest.raises(ValueError, match="page_size=16"):
        plan_relocation(
            {},
            policy("paged16").make(64),
            token_bytes=8,
            layers=1,
            target=load("cpu"),
            cost=COSTLY,
            remaining_steps=1,
        )


def test_a_plan_says_when_it_cannot_pay() -> None:
    decode = Decode("fifo", 2)
    for _ in range(100):
        decode.step()
    paying = decode.plan(remaining_steps=100_000)
    assert paying.pays and "it pays" in paying.reason and paying.after.gaps < paying.before.gaps
    gain = 5 * (
        0.01 * (paying.before.gaps - paying.after.gaps)
        + 0.02 * (paying.before.descents - paying.after.descents)
    )
    assert paying.gain_us_per_step == pytest.approx(gain)
    assert paying.copy_us == pytest.approx(2 * paying.rows * 68 / 20e3)
    assert paying.break_even_steps == pytest.approx(paying.copy_us / gain)
    draws = np.array([[0.0002 * k, 0.02] for k in range(101)])  # gaps may cost nothing at the lower end
    unsure = decode.plan(cost=replace(COSTLY, draws=draws), remaining_steps=100_000)
    assert unsure.gain_us_per_step == pytest.approx(gain) and unsure.gain_interval_us is not None
    low, high = unsure.gain_interval_us
    assert unsure.pays == (low > 0 and unsure.copy_us / low < 100_000) and low < gain < high
    losing = decode.plan(cost=replace(COSTLY, draws=-draws), remaining_steps=100_000)
    assert not losing.pays and "by the fit it cannot pay" in losing.reason
    for plan, words in (
        (decode.plan(cost=FREE), "not above the noise"),
        (decode.plan(remaining_steps=0), "cannot pay"),
        (decode.plan(max_rows=0), "free runs"),
    ):
        assert not plan.pays and words in plan.reason


def test_long_runs_stay_and_a_shared_prefix_moves_once() -> None:
    allocator = policy("fifo").make(1000)
    prompt = allocator.alloc(100)
    scattered = allocator.alloc(200)
    allocator.free(scattered[::2])
    first, second = torch.cat((prompt, scattered[1::2])), scattered[1::2].clone()
    requests = {0: first, 1: second}
    plan = plan_relocation(
        requests,
        allocator,
        [SlotMapping("requests", requests)],
        token_bytes=16,
        layers=1,
        target=load("cpu"),
        cost=COSTLY,
        remaining_steps=10**6,
    )
    assert plan.rows == 100 and not set(plan.sources.tolist()) & set(prompt.tolist())
    assert relocate(KVPool(1, 1000, 4, torch.float32), plan).done
    assert torch.equal(requests[0][100:], requests[1]) and layout_score(requests[1]).gaps == 0


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_copy_rows_reads_overlapping_rows_before_it_writes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    buffer = torch.from_numpy(rng.standard_normal((3, 40, 6)))
    sources, targets = (torch.from_numpy(rng.permutation(40)[:25]) for _ in range(2))
    expected = buffer.clone()
    for layer in range(3):
        for source, target in zip(sources.tolist(), targets.tolist()):
            expected[layer, target] = buffer[layer, source]
    copy_rows(buffer, sources, targets)
    assert torch.equal(buffer, expected)


def test_remap_leaves_padding_and_scratch_rows() -> None:
    slot_map = torch.tensor([0, 5, 2, 3, 4, 1])
    slots = torch.tensor([[1, 5, -1], [0, 9, 2]], dtype=torch.int32)
    assert remap(slots, slot_map).tolist() == [[5, 1, -1], [0, 9, 2]]
    assert remap(slots, slot_map).dtype == torch.int32


def test_fit_recovers_a_known_cost_and_sees_no_cost_in_noise() -> None:
    rng = np.random.default_rng(0)
    names = ("contiguous", "reversed", "sorted", "random", "runs:4", "runs:16", "runs:64", "interleaved:8")
    scores = [layout_score(make_layout(name, 2000, 40_000, seed=seed)) for name in names for seed in range(3)]
    noise = rng.normal(0, 0.3, len(scores))
    real = [50 + 0.004 * s.gaps + 0.002 * s.descents + e for s, e in zip(scores, noise)]
    fit = fit_scatter_cost(scores, real, noise_us=0.5)
    assert fit.gap_interval_us[0] < 0.004 < fit.gap_interval_us[1] and fit.above_noise
    assert fit.us_per_descent == pytest.approx(0.002, abs=5e-4) and fit.base_us == pytest.approx(50, abs=0.5)
    saving = fit.saving_interval_us(scores[-1], scores[0])
    assert saving is not None and saving[0] < 0.004 * scores[-1].gaps < saving[1]
    assert not fit_scatter_cost(scores, list(50 + noise), noise_us=0.5).above_noise
    with pytest.raises(ValueError, match="at least 6"):
        fit_scatter_cost(scores[:5], real[:5], noise_us=0.1)


@pytest.mark.parametrize(
    ("width", "dtype"), [(576, torch.bfloat16), (40, torch.float32), (5, torch.bfloat16)]
)
def test_the_device_kernel_copies_what_the_host_copies(width: int, dtype: torch.dtype) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU Triton interprets the kernel
    from workbench.kv import triton_copy

    buffer = torch.randn(3, 90, width, device=device).to(dtype)
    order = torch.randperm(90, device=device)
    sources, targets = order[:37], order[37:74]
    expected = buffer.clone()
    expected[:, targets] = buffer[:, sources]
    triton_copy.copy_rows(buffer, sources, targets)
    assert torch.equal(buffer, expected)


@pytest.mark.gpu
def test_relocation_on_the_device_reaches_rows_beyond_2_to_31_elements() -> None:
    pool = KVPool(2, 3_800_000, 576, torch.bfloat16, "cuda")
    sources = torch.arange(3_799_000, 3_799_500)
    targets = torch.arange(10, 510)
    pool.buffer[:, sources.cuda()] = torch.randn(2, 500, 576, device="cuda").bfloat16()
    copy_rows(pool.buffer, sources, targets)
    assert torch.equal(pool.buffer[:, targets.cuda()], pool.buffer[:, sources.cuda()])
    assert pool.buffer[:, 9].abs().sum() == 0 and pool.buffer[:, 510].abs().sum() == 0
