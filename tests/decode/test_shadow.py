"""The shadow check says equal for a right step and names what is wrong in a broken one."""

import pytest

from workbench.decode import DecodeHooks, SpeculativeDecoder


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
