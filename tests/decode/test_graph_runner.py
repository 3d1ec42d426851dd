"""A reason for every step: each refusal is named with both values, counted, and raised in strict mode."""

from dataclasses import replace

import pytest
import torch

from workbench.decode import DecodeHooks, Reason, SpeculativeDecoder
from workbench.decode.conditions import CONDITIONS
from workbench.decode.decision import Bucket, ReplayRefused, StepBatch
from workbench.decode.graph_runner import ADDRESS_INTERVAL

WIDTH = 7


@pytest.fixture(scope="module")
def decoder(pair):
    d = SpeculativeDecoder(*pair, max_batch=4, max_context=64, budget=6, batch_sizes=[1, 2, 4])
    d.capture()
    return d


BATCH = StepBatch(bs=3, width=WIDTH, max_kv_len=40)
REFUSALS = {
    Reason.BATCH_ABOVE_LARGEST: (dict(bs=5), "batch 5, largest captured 4"),
    Reason.WIDTH_MISMATCH: (dict(width=6), "width 6, captured 7"),
    Reason.MODE_NOT_ALLOWED: (dict(mode="draft"), "mode 'draft', captured decode, verify"),
    Reason.MIXED_BATCH: (dict(mode="mixed", new_prefill_tokens=9), "9 prefill tokens in a decode batch of 3"),
    Reason.HIDDEN_MODE_MISMATCH: (dict(hidden_mode="full"), "hidden states 'full', captured 'taps'"),
    Reason.SAMPLING_NOT_CAPTURED: (
        dict(sampling=(True, 5, None)),
        "(True, 5, None), captured (False, None, None)",
    ),
    Reason.CONTEXT_ABOVE_CAPTURED: (dict(max_kv_len=65), "kv_len up to 65, captured for 64"),
    Reason.RANKS_DISAGREE: (dict(rank_agrees=False), "another rank"),
}


def test_replay_has_a_reason_and_a_bucket_too(decoder):
    for bs, bucket in ((1, 1), (2, 2), (3, 4), (4, 4)):
        decision = decoder.runner.decide(replace(BATCH, bs=bs))
        assert decision.replay and decision.reason is Reason.REPLAYED
        assert decision.bucket == Bucket(bucket, WIDTH)


@pytest.mark.parametrize("reason", REFUSALS)
def test_each_refusal_names_both_values(decoder, reason):
    changes, detail = REFUSALS[reason]
    decision = decoder.runner.decide(replace(BATCH, **changes))
    assert not decision.replay and decision.reason is reason and detail in decision.detail


def test_padding_off_needs_the_exact_size(pair):
    d = SpeculativeDecoder(*pair, max_batch=4, max_context=64, budget=6, batch_sizes=[1, 4], padding=False)
    d.capture()
    assert d.runner.decide(replace(BATCH, bs=4)).replay
    decision = d.runner.decide(BATCH)
    assert decision.reason is Reason.SIZE_NOT_CAPTURED
    assert decision.detail == "batch 3, captured 1, 4, padding off"


def test_eager_mode_and_no_capture(pair):
    eager = SpeculativeDecoder(*pair, mode="eager", max_batch=4, max_context=64)
    assert eager.runner.decide(BATCH).reason is Reason.GRAPH_DISABLED
    with pytest.raises(ValueError, match="mode='eager' has no graphs"):
        eager.capture()
    graph = SpeculativeDecoder(*pair, max_batch=4, max_context=64)
    assert graph.runner.decide(BATCH).reason is Reason.NOT_CAPTURED


def test_a_moved_buffer_is_noticed_and_the_step_still_right(pair, make_prompts, oracle):
    class Moves(DecodeHooks):
        def before_step(self, index, buffers):
            if index == 4:
                buffers.positions = buffers.positions.clone()

    prompts = make_prompts((5,))
    result = SpeculativeDecoder(*pair, max_batch=1, max_context=64, hooks=Moves()).generate(prompts, 20)
    reasons = [claim.reason for claim in result.replay.claims]
    assert reasons[:5] == [Reason.REPLAYED] * 5 and set(reasons[5:]) == {Reason.BUFFER_MOVED}
    assert "positions moved" in result.replay.claims[-1].detail
    assert result.tokens == [oracle(prompts[0], 20)]


def test_a_tensor_that_got_other_memory_is_noticed_within_a_few_steps(pair):
    d = SpeculativeDecoder(*pair, max_batch=1, max_context=64, budget=6)
    d.capture()
    bucket = Bucket(1, WIDTH)
    assert not any(d.runner.moved_buffers(bucket) for _ in range(2 * ADDRESS_INTERVAL))
    positions = d.runner.buffers[bucket].positions
    positions.set_(positions.clone())  # the same object
    looks = [d.runner.moved_buffers(bucket) for _ in range(ADDRESS_INTERVAL)]
    assert ["positions"] in looks


def test_weights_that_were_replaced_are_noticed_within_a_few_steps(pair):
    d = SpeculativeDecoder(*pair, max_batch=1, max_context=64, budget=6)
    d.capture()
    norm = pair[0].norm
    before = norm.weight
    norm.weight = torch.nn.Parameter(before.detach().clone(), requires_grad=False)
    try:
        looks = [d.runner.moved_buffers(Bucket(1, WIDTH)) for _ in range(ADDRESS_INTERVAL)]
    finally:
        norm.weight = before
    assert ["target.norm.weight"] in looks


def test_every_reason_has_a_condition():
    assert {reason for reason, _ in CONDITIONS} | {Reason.REPLAYED} == set(Reason)


class ReadsOnTheHost(DecodeHooks):
    def make_step(self, step):
        mark = step.place_rows

        def reads(b):
            mark(b)
            b.tree.num_nodes.sum().item()

        step.place_rows = reads
        return step


def test_a_broken_capture_becomes_the_reason_and_decode_goes_on(pair, make_prompts, oracle):
    prompts = make_prompts((5, 3))
    d = SpeculativeDecoder(*pair, max_batch=2, max_context=64, hooks=ReadsOnTheHost())
    result = d.generate(prompts, 9)
    assert result.tokens == [oracle(p, 9) for p in prompts]
    assert set(result.replay.counts) == {Reason.CAPTURE_FAILED}
    assert ".item()" in result.replay.claims[0].detail and ".item()" in result.replay.capture_error
    assert any("Capture failed" in line for line in result.log_lines)


def test_strict_mode_raises_where_a_step_should_replay(pair, make_prompts):
    d = SpeculativeDecoder(*pair, max_batch=4, max_context=64, batch_sizes=[1], strict=True)
    with pytest.raises(ReplayRefused, match=r"batch_above_largest \(batch 2, largest captured 1\)"):
        d.generate(make_prompts((3, 4)), 6)
    assert d.allocator.available_size() == d.allocator.size
    eager = SpeculativeDecoder(*pair, mode="eager", max_batch=4, max_context=64, strict=True)
    assert len(eager.generate(make_prompts((3,)), 4).tokens[0]) == 4


def test_counts_follow_the_batch_and_the_log_tells_the_same(pair, make_prompts):
    prompts = make_prompts((3, 4, 5))
    d = SpeculativeDecoder(*pair, max_batch=3, max_context=96, batch_sizes=[1, 2], log_interval=1)
    result = d.generate(prompts, [6, 30, 40])
    above = sum(claim.bs == 3 for claim in result.replay.claims)
    assert 0 < above < len(result.replay.claims)
    assert result.replay.counts[Reason.BATCH_ABOVE_LARGEST] == above == result.replay.eager
    lines = [line for line in result.log_lines if "Decode batch" in line]
    assert sum("cpu graph: False" in line for line in lines) == above
    assert f"eager {above} (batch_above_largest {above})" in result.replay.sentence()
    assert sum(entry["replays"] for entry in result.replay.captures) == result.replay.replayed


def test_capture_is_largest_first_and_reports_memory_and_time(pair):
    seen = []
    d = SpeculativeDecoder(
        *pair, max_batch=4, max_context=64, capture_progress=lambda b, i, n: seen.append((b.bs, i, n))
    )
    d.capture()
    assert seen == [(4, 1, 3), (2, 2, 3), (1, 3, 3)]
    report = d.runner.capture_report()
    assert [entry["bs"] for entry in report] == [4, 2, 1]
    assert all(e["capture_s"] > 0 and e["reserved_bytes"] > 0 and e["nodes"] > 100 for e in report)


def test_split_mode_captures_two_graphs_and_claims_both(pair, make_prompts):
    d = SpeculativeDecoder(*pair, mode="split_graph", max_batch=2, max_context=64)
    result = d.generate(make_prompts((3, 4)), 8)
    assert set(d.runner.captured[Bucket(2, 17)].graphs) == {"draft", "verify"}
    assert all(claim.replayed and claim.draft_replayed for claim in result.replay.claims)


def test_a_counter_in_the_step_stands_still_on_replay(pair, make_prompts):
    class Counts(DecodeHooks):
        calls = 0

        def before_stage(self, stage, buffers):
            self.calls += stage == "verify"

    hooks = Counts()
    d = SpeculativeDecoder(*pair, max_batch=2, max_context=64, hooks=hooks, batch_sizes=[2])
    d.capture()
    assert hooks.calls == 2  # warm-up and recording
    d.generate(make_prompts((3, 4)), 12)
    assert hooks.calls == 2


def test_padding_rows_leave_the_dummy_request_empty(pair, make_prompts):
    d = SpeculativeDecoder(*pair, max_batch=4, max_context=64, batch_sizes=[4])
    d.generate(make_prompts((3,)), 12)
    assert not d.table.req_to_token[0].any()
    assert d.table.kv_len[0] == d.table.bonus[0] == 0


def test_changing_an_input_between_replays_changes_the_output(decoder):
    """The replayed positions are read from the table, not remembered from capture."""
    b = decoder.runner.buffers[Bucket(1, WIDTH)]
    decision = decoder.runner.decide(StepBatch(bs=1, width=WIDTH, max_kv_len=10))
    for index in range(2):
        b.mail.write(index, [1], [list(range(20, 20 + WIDTH))], b.bs)
    logits = []
    for length in (3, 4):
        decoder.table.set_row(1, torch.arange(1, length + 1), 5, 9, 0.0)
        decoder.runner.run("step", b, decision)
        assert b.positions.min() == length
        logits.append(b.logits.clone())
    assert not torch.equal(*logits)


@pytest.mark.parametrize(
    "name", ["inputs", "mail.up_host", "mail.down_host", "mail.up", "mail.down", "result"]
)
@pytest.mark.parametrize("mode", ["step_graph", "split_graph"])
def test_whatever_is_replaced_the_step_is_eager_and_still_right(pair, make_prompts, oracle, name, mode):
    class Replaces(DecodeHooks):
        def after_step(self, index, buffers):
            holder = buffers.mail if "." in name else buffers
            attribute = name.rpartition(".")[2]
            if index == 2:
                setattr(holder, attribute, getattr(holder, attribute).clone())

    prompts = make_prompts((5, 8, 3))
    d = SpeculativeDecoder(*pair, mode=mode, max_batch=3, max_context=64, hooks=Replaces(), lag=0)
    result = d.generate(prompts, 16)
    assert Reason.BUFFER_MOVED in {claim.reason for claim in result.replay.claims}
    assert result.tokens == [oracle(p, 16) for p in prompts]


def test_parts_of_a_split_step_may_decide_differently(pair, make_prompts, oracle):
    """An eager draft at its own size beside a padded verify graph, and the other way round."""

    class Alternates(DecodeHooks):
        seen = 0

        def see_batch(self, batch):
            self.seen += 1
            return replace(batch, rank_agrees=self.seen % 3 != 0)

    prompts = make_prompts((5, 8, 3))
    d = SpeculativeDecoder(
        *pair, mode="split_graph", max_batch=4, max_context=64, batch_sizes=[1, 2, 4], hooks=Alternates()
    )
    result = d.generate(prompts, 16)
    assert result.tokens == [oracle(p, 16) for p in prompts]
    kinds = {(claim.draft_replayed, claim.replayed) for claim in result.replay.claims}
    assert {(True, False), (False, True)} <= kinds


def test_a_good_capture_after_a_failed_one_is_used(pair, make_prompts, oracle):
    class ReadsOnce(DecodeHooks):
        reads = True

        def before_stage(self, stage, buffers):
            if stage == "mask" and self.reads:
                buffers.tree.num_nodes.sum().item()

    hooks = ReadsOnce()
    d, prompts = SpeculativeDecoder(*pair, max_batch=1, max_context=64, hooks=hooks), make_prompts((5,))
    d.capture()
    assert d.runner.capture_error is not None
    hooks.reads = False
    d.capture()
    result = d.generate(prompts, 12)
    assert result.replay.share == 1.0 and result.tokens == [oracle(prompts[0], 12)]
