"""The shadow check says equal for a right step and names what is wrong in a broken one."""

from functools import partial

import pytest
import torch

from workbench.decode import DecodeHooks, SpeculativeDecoder, launcher
from workbench.decode import step as step_module
from workbench.decode.tree_check import differing_parts, path_weights
from workbench.tree.batch import build_ddtree_batch
from workbench.tree.buffers import TreeBuffers


def decode(pair, prompts, hooks=None, steps=(2, 4, 5), **options):
    defaults = dict(max_batch=4, max_context=96, budget=6, batch_sizes=[4], shadow_steps=steps)
    return SpeculativeDecoder(*pair, hooks=hooks, **(defaults | options)).generate(prompts, 16)


@pytest.mark.parametrize("shape", ["none", "chain", "chain_tree", "tree"])
@pytest.mark.parametrize("mode", ["eager", "split_graph", "step_graph"])
def test_right_steps_are_equal_and_the_decode_goes_on_unchanged(pair, make_prompts, oracle, mode, shape):
    prompts = make_prompts((4, 9, 2))
    result = decode(pair, prompts, mode=mode, shape=shape)
    assert [r.step for r in result.shadow] == [s for s in (2, 4, 5) if s < len(result.replay.claims)]
    assert all(r.is_ok for r in result.shadow), [r.sentence() for r in result.shadow]
    assert all(r.replayed == (mode != "eager") for r in result.shadow)
    assert result.tokens == [oracle(p, 16) for p in prompts]


def test_sampled_steps_draw_the_same_noise(pair, make_prompts):
    d = SpeculativeDecoder(*pair, max_batch=4, max_context=96, budget=6, shadow_steps=(1, 2))
    plain = SpeculativeDecoder(*pair, max_batch=4, max_context=96, budget=6)
    prompts = make_prompts((4, 9))
    result = d.generate(prompts, 12, temperature=1.2)
    assert all(r.is_ok for r in result.shadow), [r.sentence() for r in result.shadow]
    assert result.tokens == plain.generate(prompts, 12, temperature=1.2).tokens


class StalePositions(DecodeHooks):
    """The graph works on a tensor that nobody refreshes."""

    def make_step(self, step):
        place = step.place_rows

        def stale(b):
            place(b)
            b.positions.zero_()

        step.place_rows = stale
        return step


class PaddingWritesToALiveSlot(DecodeHooks):
    def make_step(self, step):
        verify = step.verify

        def overwrite(b):
            verify(b)
            step.pool.buffer[:, 3] += 1.0

        step.verify = overwrite
        return step


class OpenMask(DecodeHooks):
    def make_step(self, step):
        place = step.place_rows

        def everything_visible(b):
            place(b)
            b.mask.fill_(True)

        step.place_rows = everything_visible
        return step


@pytest.mark.parametrize(
    ("hooks", "named"), [(StalePositions(), "positions"), (OpenMask(), "mask")], ids=["positions", "mask"]
)
def test_wrong_inputs_are_named(pair, make_prompts, hooks, named):
    result = decode(pair, make_prompts((4, 9)), hooks)
    assert result.replay.share == 1.0
    assert all(not r.is_ok and named in r.differing and r.logits_error > 1e-3 for r in result.shadow)
    assert named in result.shadow[0].sentence()


def test_rows_of_others_are_noticed(pair, make_prompts):
    result = decode(pair, make_prompts((6, 9)), PaddingWritesToALiveSlot())
    assert all(3 in r.stray_slots for r in result.shadow)


class Tied:
    """A drafter whose logits come in steps of a half: many paths weigh the same but for rounding."""

    def __init__(self, drafter):
        self.real = drafter
        self.config, self.dtype, self.device = drafter.config, drafter.dtype, drafter.device
        self.make_pool, self.write_context = drafter.make_pool, drafter.write_context

    def draft(self, *inputs):
        return (self.real.draft(*inputs) * 2).round() / 2


@pytest.fixture
def tied(pair, monkeypatch):
    """Ties, and a device builder that sums in fp32 where the host's heap sums in fp64."""
    on_device = partial(build_ddtree_batch, method="torch")
    monkeypatch.setattr(step_module, "build_ddtree_batch", on_device)
    return pair[0], Tied(pair[1])


SPLIT = {"mode": "split_graph", "budget": 16}


def test_near_ties_that_the_host_settles_otherwise_are_no_fault(tied, make_prompts, oracle):
    prompts = make_prompts((4, 9, 2))
    result = decode(tied, prompts, steps=range(12), **SPLIT)
    assert all(r.is_ok for r in result.shadow), [r.sentence() for r in result.shadow]
    assert any(r.chose_otherwise for r in result.shadow)
    assert "near ties" in next(r for r in result.shadow if r.chose_otherwise).sentence()
    assert result.tokens == [oracle(p, 16) for p in prompts]


@pytest.mark.parametrize(
    ("hooks", "named"), [(StalePositions(), "positions"), (OpenMask(), "mask")], ids=["positions", "mask"]
)
def test_ties_hide_no_wrong_input(tied, make_prompts, hooks, named):
    result = decode(tied, make_prompts((4, 9)), hooks, **SPLIT)
    assert all(not r.is_ok and named in r.differing for r in result.shadow)


def stale(b, settings, watch):
    """The tree of the step before stays: it is not sent up."""


def shifted(b, settings, watch):
    """A right tree of other logits."""
    b.draft_logits = b.draft_logits.roll(1, -1)
    build_on_host(b, settings, watch)
    b.draft_logits = b.draft_logits.roll(-1, -1)


def unmasked(b, settings, watch):
    build_on_host(b, settings, watch)
    b.tree.mask[:, 3, 2] ^= True


def unlinked(b, settings, watch):
    build_on_host(b, settings, watch)
    b.tree.next_sibling.fill_(-1)


build_on_host = launcher.build_on_host
WRONG_TREES = {
    "stale": (stale, "tree.token_ids"),
    "shifted": (shifted, "tree.token_ids"),
    "unmasked": (unmasked, "tree.mask"),
    "unlinked": (unlinked, "tree.links"),
}


@pytest.mark.parametrize("name", WRONG_TREES)
def test_a_wrong_tree_from_the_host_is_named(tied, make_prompts, monkeypatch, name):
    wrong, named = WRONG_TREES[name]
    monkeypatch.setattr(launcher, "build_on_host", wrong)
    result = decode(tied, make_prompts((4, 9)), steps=(2, 3), **SPLIT)
    assert len(result.shadow) == 2
    assert all(not r.is_ok and named in r.differing for r in result.shadow), [
        r.sentence() for r in result.shadow
    ]


def test_a_draft_from_stale_logits_is_noticed(pair, make_prompts):
    class Forgets(DecodeHooks):
        def make_step(self, step):
            draft = step.draft

            def forgets(b):
                draft(b)
                b.draft_logits.mul_(0.5)

            step.draft = forgets
            return step

    result = decode(pair, make_prompts((4, 9)), Forgets())
    assert all(not r.is_ok and r.draft_error > 0.1 and "draft logits" in r.sentence() for r in result.shadow)


@pytest.mark.parametrize("seed", range(8))
def test_worth_is_judged_node_by_node(seed):
    """Renamed tokens of equal weight are the same tree; one node of less weight is not."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 4, 24, generator=generator)
    logits[..., 12:] = logits[..., :12]  # each token has a twin
    best, twin = TreeBuffers(1, 9), TreeBuffers(1, 9)
    build_ddtree_batch(logits, 8, best, root_tokens=torch.tensor([5]))
    build_ddtree_batch(logits.roll(12, -1), 8, twin, root_tokens=torch.tensor([5]))
    twin.token_ids[:, 1:] = (twin.token_ids[:, 1:] + 12) % 24
    assert not torch.equal(twin.token_ids, best.token_ids)
    assert differing_parts(twin, best, logits, 1) == []
    assert differing_parts(twin, best, None, 1) == ["tree.token_ids"]
    weights = path_weights(best, logits[0], 0)
    torch.testing.assert_close(weights.float(), best.log_probs[0], atol=1e-5, rtol=0)
    unused = set(range(24)) - set(best.token_ids[0].tolist())
    twin.token_ids[0, 8] = min(unused, key=lambda t: logits[0, twin.depths[0, 8] - 1, t].item())
    assert differing_parts(twin, best, logits, 1) == ["tree.token_ids"]


def turn_over(d, b):
    d.table.turn.bitwise_xor_(1)


def lose_inputs(d, b):
    """A graph goes on reading the old tensor, and is right."""
    b.mail.up_host = torch.zeros_like(b.mail.up_host)


def copy_results(d, b):
    b.mail.down = torch.zeros_like(b.mail.down)


@pytest.mark.parametrize("mode", ["eager", "split_graph", "step_graph"])
@pytest.mark.parametrize(
    ("break_it", "wrong_modes"),
    [(turn_over, {"eager", "split_graph", "step_graph"}), (lose_inputs, {"eager"}), (copy_results, set())],
)
def test_a_mailbox_out_of_step_is_named(pair, make_prompts, mode, break_it, wrong_modes):
    class Breaks(DecodeHooks):
        decoder = None

        def before_step(self, index, buffers):
            if index == 3:
                break_it(self.decoder, buffers)

    hooks = Breaks()
    d = SpeculativeDecoder(
        *pair, mode=mode, max_batch=1, max_context=128, budget=6, hooks=hooks, shadow_steps=range(8), lag=0
    )
    hooks.decoder = d
    shadow = d.generate(make_prompts((5,)), 12).shadow
    [at_fault] = [report for report in shadow if report.step == 3]
    if mode in wrong_modes:
        assert not at_fault.is_ok and "as the host wrote" in at_fault.sentence()
    else:
        assert all(report.is_ok for report in shadow)
