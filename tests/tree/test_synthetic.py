"""Laws have the mean they were asked for, and both ways of using them reproduce it."""

import math

import pytest
import torch

from workbench.tree import (
    AcceptBuffers,
    TreeBuffers,
    accept_greedy_batch,
    build_chain_batch,
    build_ddtree_batch,
)
from workbench.tree.synthetic import (
    AcceptanceLaw,
    SyntheticDrafter,
    accept_synthetic_batch,
    floor_ceil,
    geometric,
    per_position,
)

BS, SLOTS, VOCAB = 6000, 7, 11
LAWS = [
    geometric(3.0, SLOTS),
    geometric(1.0, SLOTS),
    geometric(8.0, SLOTS),
    floor_ceil(3.4, SLOTS),
    floor_ceil(8.0, SLOTS),
    per_position([0.9, 0.7, 0.7, 0.2, 0.1, 0.05, 0.0]),
]


@pytest.mark.parametrize(
    "slots,mean,p", [(7, 2, 0.502), (7, 3, 0.682), (7, 5, 0.860), (15, 4, 0.753), (15, 5, 0.806)]
)
def test_geometric_rate(slots: int, mean: float, p: float) -> None:
    law = geometric(mean, slots)
    assert law.mean_accept_length == pytest.approx(mean, abs=1e-9)
    assert law.conditional == pytest.approx([p] * slots, abs=5e-4)


def test_floor_ceil_and_list() -> None:
    assert floor_ceil(3.0, 3).survival == (1.0, 1.0, 0.0)
    assert floor_ceil(2.6, 4).survival == pytest.approx((1.0, 0.6, 0.0, 0.0))
    law = per_position([0.8, 0.4, 0.0, 0.0])
    assert law.conditional == pytest.approx((0.8, 0.5, 0.0, 0.0)) and law.mean_accept_length == pytest.approx(
        2.2
    )


def check_law(law: AcceptanceLaw, accepted: AcceptBuffers) -> None:
    lengths = accepted.accept_length.double()
    error = lengths.std().item() / math.sqrt(BS)
    assert lengths.mean().item() == pytest.approx(law.mean_accept_length, abs=3 * error + 1e-9)
    for d, u in enumerate(law.survival, 1):
        rate = (lengths > d).double().mean().item()
        assert rate == pytest.approx(u, abs=4 * math.sqrt(u * (1 - u) / BS) + 1e-9)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law.name}-{law.mean_accept_length:g}")
@pytest.mark.parametrize("budget", [0, 7, 16])
def test_synthetic_drafts_follow_the_law(law: AcceptanceLaw, budget: int) -> None:
    """Budget 0 stands for the chain. The target is scripted: its next tokens on the true path are known."""
    g = torch.Generator().manual_seed(budget + 1)
    truth = torch.randint(0, VOCAB, (BS, SLOTS + 1), generator=g)
    drafter = SyntheticDrafter(law, VOCAB)
    logits = drafter.draft(
        truth[:, :SLOTS], torch.rand(BS, generator=g), torch.randn(BS, SLOTS, VOCAB, generator=g)
    )
    out, accepted = TreeBuffers(BS, max(budget, SLOTS) + 1), AcceptBuffers(BS, SLOTS + 1)
    if budget:
        build_ddtree_batch(logits, budget, out, method="torch")
    else:
        build_chain_batch(logits, out, method="torch")
    wanted = truth.gather(1, out.depths.long())  # what rows off the path say is never used
    accept_greedy_batch(out, wanted, accepted)
    check_law(law, accepted)
    depth = torch.arange(SLOTS + 1)
    kept = depth < accepted.accept_length.unsqueeze(1)
    assert torch.equal(accepted.tokens[kept], truth[kept])  # lossless: what is emitted is the target's own


@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law.name}-{law.mean_accept_length:g}")
def test_synthetic_acceptance_follows_the_law(law: AcceptanceLaw) -> None:
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(1, SLOTS, VOCAB, generator=g) * 4
    out, accepted = TreeBuffers(BS, 41), AcceptBuffers(BS, SLOTS + 1)
    build_ddtree_batch(logits.expand(BS, SLOTS, VOCAB), 40, out, method="torch")
    assert int(out.depths.max()) == SLOTS
    accept_synthetic_batch(out, out.token_ids + 100, accepted, law=law, noise=torch.rand(BS, generator=g))
    check_law(law, accepted)
    for b in range(20):  # the path is the best-ranked node of its depth and its ancestors
        length = int(accepted.accept_length[b])
        last = int((out.depths[b] == length - 1).nonzero()[0, 0])
        path = out.mask[b, last].nonzero()[:, 0].tolist()
        assert accepted.node_index[b].tolist() == path + [-1] * (SLOTS + 1 - length)
        assert accepted.bonus[b] == out.token_ids[b, last] + 100


def test_depth_is_clipped_to_the_tree() -> None:
    out, accepted = TreeBuffers(2, 5), AcceptBuffers(2, 4)
    build_ddtree_batch(torch.randn(2, 3, 9), 4, out, max_tokens=torch.tensor([1, 2]))
    accept_synthetic_batch(
        out, torch.zeros(2, 5, dtype=torch.int64), accepted, law=floor_ceil(4, 3), noise=torch.rand(2)
    )
    assert accepted.accept_length.tolist() == [1, 2]


def test_refusals_name_the_fix() -> None:
    for build in (geometric, floor_ceil):
        with pytest.raises(ValueError, match="use 1 to 4"):
            build(4.5, 3)
    with pytest.raises(ValueError, match="u1 >= u2"):
        per_position([0.5, 0.6])
    with pytest.raises(ValueError, match="at least 3 tokens"):
        SyntheticDrafter(floor_ceil(2, 3), 2)
