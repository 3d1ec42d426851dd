"""A divergence is excused by a small top-1/top-2 gap only, and never in fp32."""

import pytest
import torch

from workbench.decode import SpeculativeDecoder
from workbench.decode.divergence import find_divergence
from workbench.model.prompts import load_prompts
from workbench.model.weights import load_pair


def test_equal_outputs_do_not_diverge(pair):
    assert find_divergence(pair[0], [1, 2], [3, 4], [3, 4]) is None


def test_the_gap_is_the_targets_own(pair, oracle):
    target, prompt = pair[0], [5, 9, 2]
    right = oracle(prompt, 6)
    wrong = [*right[:4], (right[4] + 1) % 40, right[5]]
    found = find_divergence(target, prompt, right, wrong)
    hidden, _, _ = target.score(torch.tensor([[*prompt, *right[:4]]]))
    logits = target.head(hidden[0, -1]).sort(descending=True).values
    assert found.position == 4 and found.tokens == (right[4], wrong[4])
    assert found.gap == pytest.approx(float(logits[0] - logits[1]), rel=1e-5)
    assert not found.is_rounding and "above the bound 0" in found.sentence()


def test_a_missing_token_is_never_rounding(pair, oracle):
    right = oracle([5, 9, 2], 6)
    found = find_divergence(pair[0], [5, 9, 2], right, right[:3])
    assert found.tokens == (right[3], None) and not found.is_rounding


def test_bf16_on_the_trained_pair_diverges_by_rounding_only():
    pair = load_pair("tiny", dtype="bf16")
    prompts = [[257, *prompt.text.encode()[-60:]] for prompt in load_prompts()][:6]
    options = dict(max_batch=3, max_context=256)
    plain = SpeculativeDecoder(*pair, mode="eager", shape="none", **options).generate(prompts, 24).tokens
    tree = SpeculativeDecoder(*pair, mode="step_graph", **options).generate(prompts, 24).tokens
    for prompt, first, second in zip(prompts, plain, tree):
        found = find_divergence(pair[0], prompt, first, second)
        assert found is None or found.is_rounding, found.sentence()
