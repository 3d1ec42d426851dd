"""The trained pair, fp32: every prompt decodes to the target's own greedy tokens, eager and replayed."""

import pytest

from workbench.decode import SpeculativeDecoder
from workbench.model.prompts import load_prompts
from workbench.model.tokenizer import ByteTokenizer
from workbench.model.weights import load_pair


@pytest.fixture(scope="module")
def tiny():
    return load_pair("tiny", dtype="fp32")


@pytest.fixture(scope="module")
def prompts(tiny):
    tokenizer = ByteTokenizer(tiny[0].config.bos_token_id)
    return [tokenizer.encode(prompt.text)[-120:] for prompt in load_prompts()]


def decode(tiny, prompts, n, **options):
    return SpeculativeDecoder(*tiny, max_batch=4, max_context=512, **options).generate(prompts, n)


def test_every_prompt_and_shape_equals_plain_decode(tiny, prompts):
    plain = decode(tiny, prompts, 20, mode="eager", shape="none").tokens
    for mode, shape in (
        ("eager", "chain"),
        ("step_graph", "chain"),
        ("eager", "tree"),
        ("step_graph", "tree"),
    ):
        result = decode(tiny, prompts, 20, mode=mode, shape=shape)
        assert result.tokens == plain, (mode, shape)
    assert result.replay.share == 1.0
    assert result.mean_accept_length > 2.0


@pytest.mark.slow
def test_long_outputs_in_every_mode_and_shape(tiny, prompts):
    plain = decode(tiny, prompts, 120, mode="eager", shape="none").tokens
    for mode in ("eager", "split_graph", "step_graph"):
        for shape in ("none", "chain", "chain_tree", "tree"):
            assert decode(tiny, prompts, 120, mode=mode, shape=shape).tokens == plain, (mode, shape)


def test_the_ledger_attributes_all_but_five_percent(tiny, prompts):
    for mode in ("eager", "split_graph", "step_graph"):
        result = decode(tiny, prompts[:4], 24, mode=mode)
        shares = sorted(r.unattributed_us / r.step_us for r in result.ledger.records[1:])
        assert 0 <= shares[len(shares) // 2] <= 0.05, mode
