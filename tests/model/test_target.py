import pytest
import torch
from dense_attention import TestPool, dense_attend

from workbench.model.batch import ForwardBatch
from workbench.model.pair import TINY_TARGET, random_pair


def make_batch(tokens, start, out_slots, prefix_slots, mask=None, depths=None):
    n = len(tokens)
    depths = torch.arange(n) if depths is None else depths
    return ForwardBatch(
        token_ids=tokens,
        positions=start + depths,
        out_slots=out_slots,
        qo_indptr=torch.tensor([0, n], dtype=torch.int32),
        kv_indptr=torch.tensor([0, len(prefix_slots)], dtype=torch.int32),
        kv_indices=prefix_slots,
        tree_mask=mask,
        max_q_len=n,
        max_kv_len=len(prefix_slots) + n,
    )


@pytest.fixture(scope="module")
def pair():
    return random_pair(3)


def pools(target, size=200):
    c = target.config
    return TestPool(c.num_layers, size, c.width), dense_attend(c.sm_scale, c.latent)


def test_paged_decode_equals_prefill(pair):
    target, _ = pair
    tokens = torch.randint(0, 256, (40,))
    slots = torch.randperm(200)[:40] + 1
    pool, attend = pools(target)
    whole = target.prefill(tokens, pool, slots)

    pool, attend = pools(target)
    target.prefill(tokens[:25], pool, slots[:25])
    out = target.forward(make_batch(tokens[25:], 25, slots[25:], slots[:25]), pool, attend)
    torch.testing.assert_close(out.logits[-1:], whole.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(out.taps, whole.taps[25:], atol=1e-4, rtol=0)


def test_chunked_prefill_equals_one_pass(pair, monkeypatch):
    target, _ = pair
    tokens, slots = torch.randint(0, 256, (50,)), torch.randperm(200)[:50] + 1
    pool, _ = pools(target)
    whole = target.prefill(tokens, pool, slots)
    monkeypatch.setattr("workbench.model.target.PREFILL_CHUNK", 7)
    pool2, _ = pools(target)
    target.prefill(tokens[:11], pool2, slots[:11])
    rest = target.prefill(tokens[11:], pool2, slots[11:], start=11, prefix_slots=slots[:11])
    torch.testing.assert_close(rest.logits, whole.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(pool2.rows[:, slots], pool.rows[:, slots], atol=1e-4, rtol=1e-4)


def test_score_equals_prefill(pair):
    target, _ = pair
    tokens, slots = torch.randint(0, 256, (30,)), torch.arange(1, 31)
    pool, _ = pools(target)
    whole = target.prefill(tokens, pool, slots)
    hidden, taps, loads = target.score(tokens[None])
    torch.testing.assert_close(target.head(hidden[:, -1]), whole.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(taps[0], whole.taps, atol=1e-4, rtol=0)
    assert len(loads) == 1 and loads[0].sum() == pytest.approx(1)


def test_sibling_branches_do_not_see_each_other(pair):
    target, _ = pair
    prompt, slots = torch.randint(0, 256, (12,)), torch.arange(1, 13)
    pool, attend = pools(target)
    target.prefill(prompt, pool, slots)
    # root 0 with children 1 and 2; 3 hangs under 2
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    tree = torch.randint(0, 256, (4,))
    batch = make_batch(tree, 12, torch.arange(50, 54), slots, mask.flatten(), torch.tensor([0, 1, 1, 2]))
    out = target.forward(batch, pool, attend)
    for path in ([0, 1], [0, 2, 3]):
        plain, _ = pools(target)
        alone = target.prefill(torch.cat((prompt, tree[path])), plain, torch.arange(1, 13 + len(path)))
        torch.testing.assert_close(out.logits[path[-1]], alone.logits[0], atol=1e-4, rtol=0)


def test_byte_counts():
    assert TINY_TARGET.kv_bytes_per_token == 4 * 160 * 2
    target, _ = random_pair(0)
    matrices = sum(p.numel() for p in target.parameters() if p.dim() > 1)
    assert matrices == TINY_TARGET.params


def test_prefill_refuses_wrong_slots(pair):
    target, _ = pair
    pool, _ = pools(target)
    with pytest.raises(ValueError, match="start=3 got 2 slots and 0 prefix slots"):
        target.prefill(torch.tensor([1, 2]), pool, torch.tensor([1, 2]), start=3)
