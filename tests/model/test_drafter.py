from dataclasses import replace

import pytest
import torch
from dense_attention import TestPool, dense_attend

from workbench.model.pair import TINY_DRAFTER, random_pair


@pytest.fixture(scope="module")
def pair():
    return random_pair(5)


def draft_pool(drafter, size, max_bs):
    c = drafter.config
    return TestPool(c.num_layers, size + max_bs * c.block_size, c.kv_heads * c.width)


def brute_draft(drafter, taps, bonus):
    """The published formulation: whole context and block in one attention, per query head.

    Sliding layers keep the last window - 1 context tokens and are causal in the block unless told otherwise.
    """
    c = drafter.config
    context = drafter.context(taps)
    start = len(taps)
    x = drafter.embed_tokens(torch.tensor([bonus] + [c.mask_token_id] * (c.block_size - 1)))
    cos_c, sin_c = drafter.rotary(torch.arange(start))
    cos_x, sin_x = drafter.rotary(torch.arange(start, start + c.block_size))
    for index, layer in enumerate(drafter.layers):
        attention = layer.self_attn
        normed = layer.input_layernorm(x)
        hidden = torch.zeros(c.block_size, start + c.block_size, dtype=torch.bool)
        if c.is_sliding(index):
            hidden[:, : max(0, start - c.sliding_window + 1)] = True
            if c.is_causal is None:
                hidden[:, start:] = torch.ones(c.block_size, c.block_size, dtype=torch.bool).triu(1)
        rows = torch.cat((attention.rows(context, cos_c, sin_c), attention.rows(normed, cos_x, sin_x)))
        q = attention.query(normed, cos_x, sin_x)
        outs = []
        for head in range(c.num_heads):
            v, k = rows[:, head // c.group_heads].double().chunk(2, dim=-1)
            scores = q[:, head].double() @ k.T * c.head_dim**-0.5
            outs.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v)
        x = x + attention.o_proj(torch.cat(outs, dim=-1).float())
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return drafter.logits(drafter.norm(x)[1:])


SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}


@pytest.mark.parametrize(
    "changes", [{}, SLIDING, SLIDING | {"is_causal": False}, SLIDING | {"sliding_window": 90}]
)
def test_draft_equals_the_published_formulation(changes):
    _, drafter = random_pair(5, drafter_config=replace(TINY_DRAFTER, **changes))
    c = drafter.config
    lengths, size = [13, 1], 60
    pool = draft_pool(drafter, size, max_bs=3)
    slots = torch.randperm(size)[: sum(lengths)] + 1
    all_taps = [torch.randn(n, len(c.tap_layers) * c.hidden_size) for n in lengths]
    for taps, own in zip(all_taps, slots.split(lengths)):
        drafter.write_context(taps, torch.arange(len(taps)), own, pool)
    bonus = torch.tensor([65, 10])
    kv_indptr = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
    indices = torch.cat(
        (slots, torch.full((20,), 10**6))
    )  # static capacity: entries behind the end are never read
    attend = dense_attend(c.sm_scale, c.latent)
    logits = drafter.draft(bonus, torch.tensor(lengths), kv_indptr, indices, pool, attend)
    assert logits.shape == (2, c.block_size - 1, c.vocab_size)
    for b, taps in enumerate(all_taps):
        torch.testing.assert_close(logits[b], brute_draft(drafter, taps, int(bonus[b])), atol=1e-4, rtol=0)


def test_scratch_rows_lie_behind_the_slots(pair):
    _, drafter = pair
    pool = draft_pool(drafter, size=30, max_bs=2)
    batch = drafter.block_batch(
        torch.tensor([1, 2]),
        torch.tensor([4, 4]),
        torch.tensor([0, 4, 8], dtype=torch.int32),
        torch.arange(8),
        pool,
    )
    assert batch.out_slots.min() == 31 and len(batch.out_slots.unique()) == 2 * drafter.config.block_size


def test_params_count_matrices(pair):
    _, drafter = pair
    assert sum(p.numel() for p in drafter.parameters() if p.dim() > 1) == TINY_DRAFTER.params
