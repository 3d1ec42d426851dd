"""Greedy speculation is plain decoding: same tokens in every mode and shape, and no slot is ever lost."""

import numpy as np
import pytest
import torch

from workbench.decode import DecodeHooks, Reason, SpeculativeDecoder
from workbench.decode.batch_run import BatchRun
from workbench.decode.result import DecodeResult
from workbench.kv.allocator import TokenKVAllocator

MODES = ("eager", "split_graph", "step_graph")
SHAPES = ("none", "chain", "chain_tree", "tree")
LENGTHS = (3, 11, 1, 7, 20)


def decoder(pair, **options):
    defaults = dict(max_batch=4, max_context=128, budget=6)
    return SpeculativeDecoder(*pair, **(defaults | options))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_equal_plain_decoding(pair, make_prompts, oracle, mode, shape):
    prompts, limits = make_prompts(LENGTHS), [18, 5, 24, 1, 12]
    d = decoder(pair, mode=mode, shape=shape)
    result = d.generate(prompts, limits)
    assert result.tokens == [oracle(p, n) for p, n in zip(prompts, limits)]
    assert [sum(lengths) + 1 for lengths in result.accept_lengths] == limits
    assert d.allocator.available_size() == d.allocator.size
    if shape != "none":
        assert result.mean_accept_length > 1.5  # drafts are accepted, so acceptance has been exercised
    assert result.replay.share == (0.0 if mode == "eager" else 1.0)


@pytest.mark.parametrize("variant", ["reference", "torch_split"])
@pytest.mark.parametrize("lag", [0, 1])
def test_every_variant_and_lag(pair, make_prompts, oracle, variant, lag):
    prompts = make_prompts(LENGTHS, seed=3)
    result = decoder(pair, variant=variant, lag=lag, nsplit=1 if variant == "reference" else 3).generate(
        prompts, 14
    )
    assert result.tokens == [oracle(p, 14) for p in prompts]


def test_stop_tokens_end_a_request_and_are_kept(pair, make_prompts, oracle):
    prompts = make_prompts(LENGTHS, seed=5)
    plain = [oracle(p, 24) for p in prompts]
    stop = plain[0][6]
    expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in plain]
    result = decoder(pair, stop_tokens=[stop]).generate(prompts, 24)
    assert result.tokens == expected
    assert result.discarded > 0


def test_a_prompt_is_decoded_the_same_alone_and_in_a_crowd(pair, make_prompts):
    prompts = make_prompts((4, 9, 16, 2, 6, 13), seed=7)
    d = decoder(pair, batch_sizes=[1, 2, 3])
    together = d.generate(prompts, 10).tokens
    assert together == [d.generate([p], 10).tokens[0] for p in prompts]


def test_32_mixed_requests_on_a_pool_too_small_for_all(pair, make_prompts, oracle):
    rng = np.random.default_rng(0)
    prompts = make_prompts(rng.integers(1, 40, 32).tolist(), seed=9)
    limits = rng.integers(1, 30, 32).tolist()
    d = decoder(pair, pool_tokens=100, max_batch=8)
    result = d.generate(prompts, limits)
    assert result.retractions > 0
    assert result.tokens == [oracle(p, n) for p, n in zip(prompts, limits)]
    assert d.allocator.available_size() == 100


def run_with_checks(d: SpeculativeDecoder, prompts, limits, monkeypatch) -> tuple[DecodeResult, int]:
    checked = 0
    advance = BatchRun._advance

    def checking(self):
        nonlocal checked
        advance(self)
        live = self.live_slots()
        assert live == set(d.allocator.book.held().tolist())
        counted = (
            sum(len(r.slots) for r in self.scheduler.running)
            + sum(len(row) for s in self.in_flight for row in s.slots)
            + len(self.scheduler.freed + self.scheduler.reserved)
        )
        assert counted == len(live)  # no slot belongs to two holders
        checked += 1

    monkeypatch.setattr(BatchRun, "_advance", checking)
    return d.generate(prompts, limits), checked


@pytest.mark.parametrize("mode", ["eager", "step_graph"])
@pytest.mark.parametrize("need_sort", [False, True])
def test_live_slots_are_the_union_of_the_requests_slots(pair, make_prompts, monkeypatch, mode, need_sort):
    rng = np.random.default_rng(1)
    prompts = make_prompts(rng.integers(1, 30, 10).tolist(), seed=2)
    d = decoder(pair, mode=mode, allocator=TokenKVAllocator(90, need_sort=need_sort))
    result, checked = run_with_checks(d, prompts, rng.integers(1, 25, 10).tolist(), monkeypatch)
    assert checked > 20 and result.retractions > 0


@pytest.mark.slow
def test_nothing_leaks_over_ten_thousand_steps(pair, make_prompts, monkeypatch):
    rng = np.random.default_rng(4)
    prompts = make_prompts(rng.integers(1, 20, 1900).tolist(), seed=4)
    d = decoder(pair, pool_tokens=140, shape="tree")
    _, checked = run_with_checks(d, prompts, rng.integers(20, 40, 1900).tolist(), monkeypatch)
    assert checked > 10_000
    assert d.allocator.available_size() == 140


def test_slots_are_reserved_ahead_in_a_large_pool_and_hardly_in_a_small_one(pair, make_prompts, oracle):
    """The allocator's books are asked a few times per decode; a small pool keeps little back."""

    class Counts(TokenKVAllocator):
        calls = 0

        def alloc(self, n, last_slot=0):
            self.calls += 1
            return super().alloc(n, last_slot)

        def free(self, idx):
            self.calls += 1
            super().free(idx)

    prompts, calls = make_prompts((5,)), {}
    for size in (120, 100_000):
        d = decoder(pair, allocator=Counts(size), max_batch=1)
        result = d.generate(prompts, 50)
        assert result.tokens == [oracle(prompts[0], 50)] and d.allocator.available_size() == size
        calls[size] = d.allocator.calls / len(result.replay.claims)
    assert calls[100_000] < 0.5 < calls[120]


def test_tokens_arrive_in_order_while_decoding(pair, make_prompts):
    seen: dict[int, list[int]] = {}
    prompts = make_prompts((5, 8))
    result = decoder(pair).generate(prompts, 12, on_tokens=lambda i, new: seen.setdefault(i, []).extend(new))
    assert [seen[0], seen[1]] == result.tokens


def test_an_error_in_mid_decode_gives_every_slot_back(pair, make_prompts):
    class Breaks(DecodeHooks):
        def before_step(self, index, buffers):
            if index == 3:
                raise KeyboardInterrupt

    d = decoder(pair, hooks=Breaks())
    with pytest.raises(KeyboardInterrupt):
        d.generate(make_prompts(LENGTHS), 20)
    assert d.allocator.available_size() == d.allocator.size


@pytest.mark.parametrize("mode", ["eager", "step_graph"])
def test_sampling_follows_the_seed_and_differs_from_greedy(pair, make_prompts, mode):
    prompts = make_prompts((6, 3))
    d = decoder(pair, mode=mode, seed=11)
    first = d.generate(prompts, 20, temperature=1.3, top_k=20, top_p=0.95)
    assert first.tokens == d.generate(prompts, 20, temperature=1.3, top_k=20, top_p=0.95).tokens
    assert first.tokens != d.generate(prompts, 20).tokens
    assert first.tokens != decoder(pair, mode=mode, seed=12).generate(prompts, 20, 1.3).tokens
    if mode == "step_graph":
        assert first.replay.share == 1.0


def test_sampled_chain_of_one_equals_sampling_the_target(pair, make_prompts):
    """The first decoded token's law, over many seeds, is the target's softmax (chi-square)."""
    from scipy import stats

    target = pair[0]
    prompt = make_prompts((6,))[0]
    d = decoder(pair, mode="eager", max_batch=32, max_context=64, shape="tree", budget=4)
    first, second = [], []
    for seed in range(12):
        d.seed = seed
        for tokens in d.generate([prompt] * 32, 2, temperature=2.0).tokens:
            first.append(tokens[0])
            second.append(tokens)
    hidden, _, _ = target.score(torch.tensor([prompt]))
    probs = torch.softmax(target.head(hidden[0, -1:])[0] / 2.0, -1).double().numpy()
    order = np.argsort(-probs)
    groups = [order[:1], order[1:3], order[3:8], order[8:]]
    observed = [np.isin(first, g).sum() for g in groups]
    expected = np.array([probs[g].sum() for g in groups]) * len(first)
    assert stats.chisquare(observed, expected * sum(observed) / expected.sum()).pvalue > 1e-3
    joint = {}
    for a, b in second:
        joint.setdefault(a, []).append(b)
    token, followers = max(joint.items(), key=lambda item: len(item[1]))
    hidden, _, _ = target.score(torch.tensor([[*prompt, token]]))
    probs = torch.softmax(target.head(hidden[0, -1:])[0] / 2.0, -1).double().numpy()
    order = np.argsort(-probs)
    groups = [order[:2], order[2:8], order[8:]]
    observed = np.array([np.isin(followers, g).sum() for g in groups])
    expected = np.array([probs[g].sum() for g in groups]) * len(followers)
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


def test_ragged_trees_cut_by_remaining_tokens_or_probability_change_nothing(pair, make_prompts, oracle):
    prompts = make_prompts(LENGTHS, seed=6)
    expected = [oracle(p, 15) for p in prompts]
    for options in (dict(cut_to_remaining=True), dict(min_log_prob=-1.5)):
        assert decoder(pair, **options).generate(prompts, 15).tokens == expected


def test_unpadded_trees_are_mostly_refused_for_their_width(pair, make_prompts, oracle):
    prompts = make_prompts((4, 9))
    d = decoder(pair, mode="split_graph", pad_trees=False, min_log_prob=-1.5, budget=8)
    result = d.generate(prompts, 20)
    assert result.tokens == [oracle(p, 20) for p in prompts]
    widths = {claim.width for claim in result.replay.claims}
    assert len(widths) > 1 and max(widths) <= 9
    for claim in result.replay.claims:
        assert claim.replayed == (claim.width == 9)
        assert claim.reason is (Reason.REPLAYED if claim.width == 9 else Reason.WIDTH_MISMATCH)
        assert claim.replayed or f"width {claim.width}, captured 9" in claim.detail


BAD = {
    "unknown shape": (dict(shape="forest"), "shape='forest': choose one of none, chain"),
    "unknown mode": (dict(mode="graph"), "mode='graph': choose one of eager"),
    "budget": (dict(budget=0), "budget=0 must be at least 1"),
    "bucket above the pool": (
        dict(pool_tokens=20, batch_sizes=[4]),
        "bucket 4 x 7 needs 28 slots, the pool has 20",
    ),
    "bucket above max_batch": (dict(batch_sizes=[9]), "batch size 9 is above max_batch=4"),
    "lag": (dict(lag=2), "lag=2"),
    "ragged whole step": (dict(pad_trees=False), "pad_trees=False needs mode='split_graph'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_named_with_the_fix(pair, name):
    options, message = BAD[name]
    with pytest.raises(ValueError) as caught:
        decoder(pair, **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_bad_prompts_are_named_with_the_fix(pair):
    d = decoder(pair, pool_tokens=60)
    for prompts, limit, message in (
        ([], 4, "no prompts"),
        ([[1], []], 4, "prompt 1 is empty"),
        ([[1, 99]], 4, "token 99 is outside the vocabulary 0..39"),
        ([[1] * 50], 4, "the pool has 60: raise pool_tokens"),
        ([[1]], 0, "max_new_tokens=0"),
        ([[1]], [1, 2], "2 limits for 1 prompts"),
    ):
        with pytest.raises(ValueError, match=message):
            d.generate(prompts, limit)
    with pytest.raises(ValueError, match="it is 128: raise max_context"):
        decoder(pair, pool_tokens=1000).generate([[1] * 120], 10)
    with pytest.raises(ValueError, match="needs a drafter"):
        SpeculativeDecoder(pair[0], shape="tree")
    with pytest.raises(ValueError, match="temperature=-1"):
        d.generate([[1]], 2, temperature=-1)


@pytest.mark.parametrize("shape", ["chain", "chain_tree"])
@pytest.mark.parametrize("mode", ["eager", "step_graph"])
def test_synthetic_acceptance_follows_its_law(pair, make_prompts, mode, shape):
    from workbench.tree.synthetic import geometric

    law = geometric(3.0, 4)
    d = decoder(pair, mode=mode, shape=shape, law=law, max_context=512, max_batch=8)
    result = d.generate(make_prompts([5] * 8), 200)
    stats = result.acceptance
    deviation = np.std([r for lengths in result.accept_lengths for r in lengths])
    assert abs(stats.mean_length - law.mean_accept_length) < 3 * deviation / stats.passes**0.5
    assert np.allclose(stats.per_position(), law.survival, atol=0.06)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("calls", [1, 3, 6])
def test_an_error_while_results_are_read_gives_every_slot_back(pair, make_prompts, oracle, mode, calls):
    seen = []

    def fails(index, tokens):
        seen.append(index)
        if len(seen) == len(LENGTHS) + calls:
            raise KeyError("the caller's own")

    d = decoder(pair, mode=mode)
    prompts = make_prompts(LENGTHS)
    with pytest.raises(KeyError):
        d.generate(prompts, 20, on_tokens=fails)
    assert d.allocator.available_size() == d.allocator.size
    assert d.generate(prompts, 9).tokens == [oracle(p, 9) for p in prompts]


@pytest.mark.parametrize("again", ["generate", "capture"])
def test_a_decoder_at_work_refuses_other_work(pair, make_prompts, oracle, again):
    d, prompts = decoder(pair), make_prompts((5,))
    more = {"generate": lambda: d.generate(prompts, 4), "capture": d.capture}[again]
    with pytest.raises(RuntimeError, match="a decode is running"):
        d.generate(prompts, 8, on_tokens=lambda index, tokens: more())
    assert d.generate(prompts, 8).tokens == [oracle(prompts[0], 8)]


def test_a_capture_holds_the_sampling_it_was_made_with(pair, make_prompts, oracle):
    d, prompts = decoder(pair, max_batch=1), make_prompts((5,))
    d.capture()
    d.use_sampling(0.9)
    d.capture()
    greedy = d.generate(prompts, 12)
    assert greedy.tokens == [oracle(prompts[0], 12)]
    assert set(greedy.replay.counts) == {Reason.SAMPLING_NOT_CAPTURED}
    assert d.generate(prompts, 12, temperature=0.9).replay.share == 1.0


def test_checked_steps_are_in_no_time(pair, make_prompts):
    d = decoder(pair, max_batch=1, shadow_steps=(3, 6))
    ledger = d.generate(make_prompts((5,)), 40).ledger
    assert [r.step for r in ledger.records if r.is_checked] == [3, 6]
    assert ledger.summary()["steps"] == len(ledger.records) - 2
    assert len(ledger.periods_us(0)) < len(ledger.records) - 4
