"""The heap against brute force: the chosen prefixes are the most probable ones, in order."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.tree.ddtree import build_chain, build_ddtree, rank_tokens


def all_prefixes(logits: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Every prefix of non-zero probability with its log-probability, by enumeration in fp64."""
    log_probs = torch.log_softmax(logits.double(), -1).tolist()
    found = {}
    for depth in range(1, len(log_probs) + 1):
        for path in itertools.product(range(logits.shape[1]), repeat=depth):
            weight = sum(log_probs[d][t] for d, t in enumerate(path))
            if weight > -math.inf:
                found[path] = weight
    return found


def best_mass(prefixes: dict[tuple[int, ...], float], budget: int) -> float:
    return sum(sorted((math.exp(w) for w in prefixes.values()), reverse=True)[:budget])


@st.composite
def draft_logits(draw) -> torch.Tensor:
    slots, vocab = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    seed, scale = draw(st.integers(0, 2**31)), draw(st.sampled_from([0.0, 0.3, 1.0, 4.0]))
    logits = torch.randn(slots, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    if draw(st.booleans()):
        logits = (logits * 2).round() / 2  # exact ties
    if draw(st.booleans()) and vocab > 1:
        logits[draw(st.integers(0, slots - 1)), draw(st.integers(0, vocab - 1))] = -torch.inf
    return logits


@settings(max_examples=150, deadline=None)
@given(draft_logits(), st.integers(0, 24))
def test_chooses_the_most_probable_prefixes(logits: torch.Tensor, budget: int) -> None:
    prefixes = all_prefixes(logits)
    tree = build_ddtree(logits, budget, root_token=7)
    paths, weights = tree.paths(), tree.log_probs.tolist()
    assert len(tree) == 1 + min(budget, len(prefixes))
    assert len(set(paths)) == len(paths) and set(paths[1:]) <= set(prefixes)
    assert weights[1:] == pytest.approx([prefixes[p] for p in paths[1:]], abs=1e-5)
    mass = sum(math.exp(prefixes[p]) for p in paths[1:])
    assert mass == pytest.approx(best_mass(prefixes, budget), abs=1e-6)
    assert all(a >= b for a, b in itertools.pairwise(weights))
    assert all(path[:-1] in set(paths) for path in paths[1:])  # prefix-closed
    assert all(0 <= p < i for i, p in enumerate(tree.parents.tolist()) if i)
    assert tree.depths.tolist() == [len(p) for p in paths]
    assert tree.token_ids[0] == 7 and tree.parents[0] == -1 and tree.log_probs[0] == 0


@pytest.mark.slow
def test_many_random_cases_equal_enumeration() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        logits = torch.randn(rng.randint(1, 4), rng.randint(1, 5), dtype=torch.float64) * rng.choice(
            [0.5, 2, 6]
        )
        budget = rng.randint(1, 15)
        prefixes, tree = all_prefixes(logits.float()), build_ddtree(logits, budget)
        mass = sum(math.exp(prefixes[p]) for p in tree.paths()[1:])
        assert mass == pytest.approx(best_mass(prefixes, budget), abs=1e-6)


def test_equal_weights_are_taken_in_lexicographic_order() -> None:
    tree = build_ddtree(torch.zeros(3, 2), 14)
    by_weight = sorted(
        itertools.chain(*(itertools.product((0, 1), repeat=d) for d in (1, 2, 3))), key=lambda p: (len(p), p)
    )
    assert tree.paths()[1:] == by_weight
    one_token = build_ddtree(
        torch.zeros(4, 1), 9
    )  # probability 1 everywhere: a prefix stands before its extension
    assert one_token.paths() == [(0,) * d for d in range(5)]


def test_equal_logits_are_ranked_by_token_id_across_the_cut() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, 500] = 1.0
    _, tokens = rank_tokens(logits, 5)
    assert tokens.tolist() == [[500, 0, 1, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_half_and_double_logits_give_the_fp32_tree(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 300).to(dtype)
    assert build_ddtree(logits, 40).paths() == build_ddtree(logits.float(), 40).paths()


def test_log_probabilities_and_logits_give_one_tree() -> None:
    logits = torch.randn(4, 50, dtype=torch.float32) * 3
    tree, same = build_ddtree(logits, 20), build_ddtree(torch.log_softmax(logits, -1), 20)
    assert set(tree.paths()) == set(same.paths())
    torch.testing.assert_close(tree.log_probs, same.log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("slots,budget", [(3, 0), (0, 5), (3, -1)])
def test_root_alone(slots: int, budget: int) -> None:
    tree = build_ddtree(torch.randn(slots, 6), budget, root_token=3)
    assert tree.token_ids.tolist() == [3] and tree.visibility().tolist() == [[True]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_are_refused_by_slot(bad: float) -> None:
    logits = torch.randn(3, 9)
    logits[1, 4] = bad
    with pytest.raises(ValueError, match=r"NaN or \+inf draft logit in slot 1:"):
        build_ddtree(logits, 4)


def test_a_slot_without_any_token_ends_the_tree() -> None:
    logits = torch.randn(3, 4)
    logits[1] = -torch.inf
    assert int(build_ddtree(logits, 30).depths.max()) == 1


def test_cuts_by_floor_and_by_tokens_to_produce() -> None:
    logits = torch.randn(5, 20) * 2
    full = build_ddtree(logits, 60)
    floor = full.log_probs[30].item()
    assert build_ddtree(logits, 60, min_log_prob=floor).paths() == full.paths()[:31]
    for max_tokens in (1, 2, 4, 9):  # depth d emits d + 1 tokens with the bonus
        cut = build_ddtree(logits, 60, max_tokens=max_tokens)
        assert int(cut.depths.max()) <= max_tokens - 1
        assert cut.paths() == build_ddtree(logits[: max_tokens - 1], 60).paths()


def test_visibility_positions_and_walk_arrays() -> None:
    for seed in range(20):
        tree = build_ddtree(torch.randn(4, 12, generator=torch.Generator().manual_seed(seed)) * 2, 37)
        paths = tree.paths()
        expected = [
            [paths[j] == paths[i][: len(paths[j])] for j in range(len(tree))] for i in range(len(tree))
        ]
        assert tree.visibility().tolist() == expected
        assert tree.positions(100).tolist() == [100 + len(p) for p in paths]
        index, next_token, next_sibling = (a.tolist() for a in tree.retrieve())
        assert index == list(range(len(tree)))
        for i in range(len(tree)):
            children, child = [], next_token[i]
            while child >= 0:
                children.append(child)
                child = next_sibling[child]
            assert children == [j for j, p in enumerate(tree.parents.tolist()) if p == i]


def test_chain_is_a_tree_of_width_one() -> None:
    logits = torch.randn(6, 30) * 2
    chain = build_chain(logits, 4)
    assert chain.token_ids.tolist() == [4, *logits.argmax(-1).tolist()]
    assert chain.parents.tolist() == [-1, 0, 1, 2, 3, 4, 5]
    assert torch.equal(chain.visibility(), torch.ones(7, 7).tril().bool())
    assert build_chain(logits, max_tokens=3).depths.tolist() == [0, 1, 2]


def test_expected_acceptance_is_the_sum_of_node_probabilities() -> None:
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(5)) * 1.5
    tree, draws = build_ddtree(logits, 20), 40_000
    known = set(tree.paths())
    samples = torch.stack(
        [torch.multinomial(torch.softmax(row, -1), draws, True) for row in logits], 1
    ).tolist()
    accepted = [sum(tuple(s[:d]) in known for d in range(1, 5)) for s in samples]
    error = torch.tensor(accepted, dtype=torch.float64).std() / math.sqrt(draws)
    assert sum(accepted) / draws == pytest.approx(tree.log_probs[1:].exp().sum().item(), abs=4 * error.item())
