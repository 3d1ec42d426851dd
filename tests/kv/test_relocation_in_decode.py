"""Relocation between the steps of a running decode: the tokens stay the same, whatever moves and whenever."""

import random
from dataclasses import replace

import pytest
import torch

from workbench.decode import loop
from workbench.decode.hooks import DecodeHooks
from workbench.decode.loop import SpeculativeDecoder
from workbench.kv import TokenKVAllocator, plan_relocation, relocate
from workbench.kv.holders import RequestSlots, SlotTensor
from workbench.kv.scatter_cost import ScatterCost
from workbench.model.pair import TINY_DRAFTER, TINY_TARGET, random_pair
from workbench.targets import load

COST = ScatterCost(1.0, 0.1, 0.1, (0.1, 0.1), (0.1, 0.1), 0.0, 1.0, (1.0, 1.0), 9)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [3, 1, 4, 1, 5, 9, 2, 6], [11] * 12, [2, 2]]


class RelocatingHooks(DecodeHooks):
    """Moves scattered requests before random steps; some relocations are stopped half way."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.decoder: SpeculativeDecoder | None = None
        self.scheduler: loop.Scheduler | None = None
        self.moved = self.stopped = 0

    def before_step(self, index, buffers) -> None:
        if self.choose.random() < 0.5:
            return
        d, running = self.decoder, self.scheduler.running
        holders = [
            RequestSlots("requests", lambda: running),
            SlotTensor("request table", d.table.req_to_token),
        ]
        plan = plan_relocation(
            {request.index: torch.tensor(request.slots, dtype=torch.int64) for request in running},
            d.allocator,
            holders,
            token_bytes=d.pool.layers * d.pool.row_bytes,
            layers=d.pool.layers,
            target=load("cpu"),
            cost=COST,
            remaining_steps=100,
        )
        stop = self.choose.random() < 0.3
        outcome = relocate([d.pool, d.draft_pool], plan, chunk_rows=5, should_stop=lambda: stop)
        self.moved += outcome.rows
        self.stopped += stop and plan.rows > 0


def decode(pair, mode: str, hooks: DecodeHooks, monkeypatch) -> list[list[int]]:
    class Watched(loop.Scheduler):
        def __post_init__(self) -> None:
            super().__post_init__()
            hooks.scheduler = self

    monkeypatch.setattr(loop, "Scheduler", Watched)
    allocator = TokenKVAllocator(260, need_sort=True)
    decoder = SpeculativeDecoder(
        *pair, mode=mode, budget=6, max_batch=3, max_context=128, allocator=allocator, batch_sizes=[1, 2, 3],
        hooks=hooks,
    )  # fmt: skip
    hooks.decoder = decoder
    tokens = decoder.generate(PROMPTS, max_new_tokens=24).tokens
    assert allocator.available_size() == 260
    return tokens


@pytest.fixture(scope="module")
def tiny_pair():
    """Two small layers: what is tested is which rows they read."""
    moe = replace(TINY_TARGET.moe, routed=4, width=16)
    target = replace(
        TINY_TARGET, hidden_size=32, num_layers=2, num_heads=2, latent=16, rope=8, nope=8, v_head_dim=16,
        intermediate_size=48, first_dense=1, moe=moe, tap_layers=(0, 1),
    )  # fmt: skip
    drafter = replace(
        TINY_DRAFTER, hidden_size=32, num_layers=1, num_heads=4, head_dim=8, intermediate_size=32,
        block_size=5, tap_layers=(0, 1),
    )  # fmt: skip
    return random_pair(3, target_config=target, drafter_config=drafter, std=0.3)


@pytest.mark.parametrize("mode", ["eager", "split_graph", "step_graph"])
def test_tokens_are_identical_through_relocations(tiny_pair, mode: str, monkeypatch) -> None:
    expected = decode(tiny_pair, mode, DecodeHooks(), monkeypatch)
    moved = stopped = 0
    for seed in range(3):
        hooks = RelocatingHooks(seed)
        assert decode(tiny_pair, mode, hooks, monkeypatch) == expected
        moved, stopped = moved + hooks.moved, stopped + hooks.stopped
    print(f"{mode}: {moved} rows moved, {stopped} relocations stopped")
    assert moved > 50 and stopped > 0


def test_a_table_that_is_not_told_changes_the_tokens(tiny_pair, monkeypatch) -> None:
    """The check can fail: without the request table among the holders the decode reads stale rows."""
    expected = decode(tiny_pair, "eager", DecodeHooks(), monkeypatch)
    monkeypatch.setattr(SlotTensor, "commit", lambda self: None)
    assert any(
        decode(tiny_pair, "eager", RelocatingHooks(seed), monkeypatch) != expected for seed in range(4)
    )
