"""Acceptance against a dictionary walk; sampled acceptance against plain sampling, by chi-square."""

import os

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from workbench.tree import (
    AcceptBuffers,
    DraftTree,
    TreeBuffers,
    accept_greedy,
    accept_greedy_batch,
    accept_sampled,
    accept_sampled_batch,
    build_chain_batch,
    build_ddtree,
    build_ddtree_batch,
)
from workbench.tree.accept import Method
from workbench.tree.sampling import draw_tokens, target_probs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ACCEPT_METHODS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="no Triton interpreter")),
]
DRAWS = 24_000
VOCAB = 5


def walk(tree: DraftTree, wanted: list[int]) -> tuple[list[int], int]:
    children = {(p, t): i for i, (p, t) in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist()))}
    path = [0]
    while (path[-1], wanted[path[-1]]) in children:
        path.append(children[path[-1], wanted[path[-1]]])
    return path, wanted[path[-1]]


def likely_targets(out: TreeBuffers, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Random target tokens of which about half follow a child, so that paths get long."""
    bs, n = out.token_ids.shape
    wanted = torch.randint(0, vocab, (bs, n), generator=generator)
    child = out.next_token.where(torch.rand(bs, n, generator=generator) < 0.7, out.next_sibling.clamp(min=0))
    follow = out.token_ids.gather(1, child.clamp(min=0))
    return torch.where((torch.rand(bs, n, generator=generator) < 0.8) & (out.next_token >= 0), follow, wanted)


@pytest.mark.parametrize("method", ACCEPT_METHODS)
@pytest.mark.parametrize("seed", range(4))
def test_greedy_equals_a_dictionary_walk(seed: int, method: Method) -> None:
    g = torch.Generator().manual_seed(seed)
    bs, slots, vocab, budget = 9, 4, 6, 14
    logits, limits = torch.randn(bs, slots, vocab, generator=g), torch.randint(1, 6, (bs,), generator=g)
    out, accepted = TreeBuffers(bs, budget + 3), AcceptBuffers(bs, slots + 1)
    build_ddtree_batch(logits, budget, out, max_tokens=limits)
    wanted = likely_targets(out, vocab, g)
    for t in (accepted.node_index, accepted.tokens, accepted.accept_length, accepted.bonus):
        t.fill_(-77)
    accept_greedy_batch(out, wanted, accepted, method=method)
    for b in range(bs):
        tree = build_ddtree(logits[b], budget, max_tokens=int(limits[b]))
        path, bonus = walk(tree, wanted[b].tolist())
        assert accept_greedy(tree, wanted[b, : len(tree)]) == (path, bonus)
        rest = slots + 1 - len(path)
        assert accepted.node_index[b].tolist() == path + [-1] * rest
        assert (
            accepted.tokens[b].tolist()
            == [tree.token_ids[i].item() for i in path[1:]] + [bonus] + [-1] * rest
        )
        assert accepted.accept_length[b] == len(path) and accepted.bonus[b] == bonus


@pytest.mark.parametrize("method", ACCEPT_METHODS)
def test_a_narrow_buffer_cuts_the_path(method: Method) -> None:
    out, narrow = build_chain_batch(torch.randn(3, 5, 9), TreeBuffers(3, 6)), AcceptBuffers(3, 3)
    wanted = out.token_ids.roll(-1, 1)  # every draft is right
    accept_greedy_batch(out, wanted, narrow, method=method)
    assert narrow.node_index.tolist() == [[0, 1, 2]] * 3
    assert torch.equal(narrow.tokens, out.token_ids[:, 1:4])


def test_chain_keeps_the_matching_prefix() -> None:
    logits = torch.randn(64, 5, 3)
    out, accepted = build_chain_batch(logits, TreeBuffers(64, 8)), AcceptBuffers(64, 6)
    wanted = torch.randint(0, 3, (64, 8))
    accept_greedy_batch(out, wanted, accepted)
    match = (wanted[:, :5] == logits.argmax(-1)).long().cumprod(1).sum(1)
    assert torch.equal(accepted.accept_length.long(), match + 1)


def reference_probs(
    logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> np.ndarray:
    """The filtered distribution in NumPy fp64, one row at a time."""
    rows = []
    for row in logits.double().numpy() / temperature:
        order = np.argsort(-row, kind="stable")
        keep = order[: top_k or len(row)]
        p = np.exp(row[keep] - row[keep].max())
        p /= p.sum()
        if top_p is not None:
            count = int(np.searchsorted(np.cumsum(p), top_p)) + 1
            keep, p = keep[:count], p[:count] / p[:count].sum()
        full = np.zeros(len(row))
        full[keep] = p
        rows.append(full)
    return np.stack(rows)


FILTERS = [(1.0, None, None), (0.6, None, None), (1.4, 3, None), (1.0, None, 0.8), (0.9, 4, 0.7)]


@pytest.mark.parametrize("temperature,top_k,top_p", FILTERS)
def test_filtered_probabilities(temperature: float, top_k: int | None, top_p: float | None) -> None:
    logits = torch.randn(50, 40) * 2
    probs = target_probs(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    np.testing.assert_allclose(probs.numpy(), reference_probs(logits, temperature, top_k, top_p), atol=2e-6)


def emitted_pairs(first: torch.Tensor, second: torch.Tensor, p_next: np.ndarray, seed: int) -> np.ndarray:
    """Counts [V, V] of the first two tokens; where a step emitted one, the second comes by plain sampling."""
    rng = np.random.default_rng(seed)
    first, second = first.numpy(), second.numpy().copy()
    short = second < 0
    cumulative = p_next.cumsum(1)
    rows = cumulative[first[short]]
    second[short] = (rng.random(short.sum())[:, None] > rows / rows[:, -1:]).sum(1)
    return np.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB).reshape(VOCAB, VOCAB)


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    assert counts[expected == 0].sum() == 0  # outside the support nothing may be drawn
    live = expected > 0
    return chisquare(counts[live], expected[live] / expected[live].sum() * counts.sum()).pvalue


def markov_target(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the next token at the root [V] and after each first token [V, V]."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB, generator=g), torch.randn(VOCAB, VOCAB, generator=g)


def rows_of(tree: DraftTree, root: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Target logits per node; what follows two tokens is not looked at."""
    return torch.stack([after[path[0]] if path else root for path in tree.paths()])


@pytest.mark.parametrize("temperature,top_k,top_p", FILTERS)
@pytest.mark.parametrize("budget", [1, 6])
def test_sampled_batch_is_lossless(
    temperature: float, top_k: int | None, top_p: float | None, budget: int
) -> None:
    root, after = markov_target(7)
    draft = torch.stack([root + 0.3, after[root.argmax()]])  # a fair drafter, so that paths get long
    tree = build_ddtree(draft, budget)
    out = build_ddtree_batch(
        draft.expand(DRAWS, 2, VOCAB), budget, TreeBuffers(DRAWS, budget + 1), method="torch"
    )
    accepted, noise = (
        AcceptBuffers(DRAWS, 3),
        torch.rand(DRAWS, budget + 1, generator=torch.Generator().manual_seed(1)),
    )
    logits = rows_of(tree, root, after).repeat(DRAWS, 1)
    accept_sampled_batch(
        out, logits, accepted, temperature=temperature, top_k=top_k, top_p=top_p, noise=noise
    )
    p_first = reference_probs(root[None], temperature, top_k, top_p)[0]
    p_next = reference_probs(after, temperature, top_k, top_p)
    counts = emitted_pairs(accepted.tokens[:, 0], accepted.tokens[:, 1], p_next, seed=2)
    assert p_value(counts, p_first[:, None] * p_next) > 1e-3
    assert accepted.accept_length.float().mean() > 1.05  # drafts were really accepted


@pytest.mark.parametrize("budget", [2, 8])
def test_sampled_host_is_lossless(budget: int) -> None:
    root, after = markov_target(11)
    tree = build_ddtree(torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0)), budget)
    probs, g = torch.softmax(rows_of(tree, root, after), -1), torch.Generator().manual_seed(3)
    first, second = torch.full((DRAWS,), -1), torch.full((DRAWS,), -1)
    for i in range(DRAWS):
        path, bonus = accept_sampled(tree, probs, g)
        emitted = [int(tree.token_ids[r]) for r in path[1:2]] + [bonus]
        first[i] = emitted[0]
        second[i] = emitted[1] if len(path) == 2 else int(tree.token_ids[path[2]]) if len(path) > 2 else -1
    p_first, p_next = torch.softmax(root, -1).double().numpy(), torch.softmax(after, -1).double().numpy()
    assert p_value(emitted_pairs(first, second, p_next, 4), p_first[:, None] * p_next) > 1e-3


def test_chi_square_notices_a_small_bias() -> None:
    p = np.full(VOCAB, 1 / VOCAB)
    biased = p * np.array([1.06, 1, 1, 1, 0.94])
    counts = np.random.default_rng(0).multinomial(DRAWS, biased / biased.sum())
    assert p_value(counts, p) < 1e-3


def test_draws_stay_inside_the_support() -> None:
    logits = torch.randn(400, 30)
    edges = torch.tensor([0.0, 1.0 - 2**-24]).repeat(200)
    probs = target_probs(logits, temperature=0.7, top_k=4, top_p=0.9)
    drawn = draw_tokens(logits, edges, temperature=0.7, top_k=4, top_p=0.9)
    assert bool((probs.gather(1, drawn[:, None]) > 0).all())


def test_temperature_per_request_and_refusals() -> None:
    out, accepted = TreeBuffers(2, 1), AcceptBuffers(2, 1)
    logits, noise = torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([0.3, 0.3])
    accept_sampled_batch(out, logits, accepted, temperature=torch.tensor([0.05, 50.0]), noise=noise)
    assert accepted.bonus.tolist() == [1, 0]
    with pytest.raises(ValueError, match="greedy acceptance for 0"):
        accept_sampled_batch(out, logits, accepted, temperature=0.0, noise=noise)
    with pytest.raises(ValueError, match=r"top_p=1\.5"):
        accept_sampled_batch(out, logits, accepted, temperature=1.0, top_p=1.5, noise=noise)
    with pytest.raises(ValueError, match=r"need bs\*N = 2"):
        accept_sampled_batch(out, logits, accepted, temperature=1.0, noise=torch.rand(3))
    with pytest.raises(ValueError, match="one token per node"):
        accept_greedy(build_ddtree(torch.randn(1, 4), 2), torch.zeros(5, dtype=torch.int64))


@pytest.mark.gpu
def test_greedy_on_the_device() -> None:
    g = torch.Generator().manual_seed(1)
    out, accepted = TreeBuffers(8, 65), AcceptBuffers(8, 8)
    build_ddtree_batch(torch.randn(8, 7, 50, generator=g), 64, out)
    wanted = likely_targets(out, 50, g)
    accept_greedy_batch(out, wanted, accepted)
    on_device, result = TreeBuffers(8, 65, "cuda"), AcceptBuffers(8, 8, "cuda")
    for theirs, ours in zip(on_device.tensors(), out.tensors()):
        theirs.copy_(ours)
    accept_greedy_batch(on_device, wanted.cuda(), result)
    assert torch.equal(result.tokens.cpu(), accepted.tokens)
    assert torch.equal(result.node_index.cpu(), accepted.node_index)
