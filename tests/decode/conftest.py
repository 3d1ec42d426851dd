"""A small pair whose drafts are often right: the target nearly follows bigrams, the drafter knows them."""

import dataclasses

import pytest
import torch

from workbench.model.config import DrafterConfig, MoEConfig, TargetConfig
from workbench.model.pair import random_pair

TARGET = TargetConfig(
    name="small",
    vocab_size=40,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    latent=16,
    rope=8,
    nope=8,
    v_head_dim=16,
    intermediate_size=48,
    first_dense=1,
    moe=MoEConfig(routed=4, per_token=2, width=16),
    max_position=512,
    tap_layers=(0, 1),
)
DRAFTER = DrafterConfig(
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=32,
    block_size=5,
    mask_token_id=39,
    tap_layers=(0, 1),
    vocab_size=40,
)


class BigramDrafter:
    """The real drafter plus a bigram table: slot d continues slot d - 1's table entry."""

    def __init__(self, drafter, table):
        self.real, self.table = drafter, table
        self.config, self.dtype, self.device = drafter.config, drafter.dtype, drafter.device
        self.make_pool, self.write_context = drafter.make_pool, drafter.write_context

    def draft(self, bonus, start, kv_indptr, kv_indices, pool, attend):
        logits = self.real.draft(bonus, start, kv_indptr, kv_indices, pool, attend)
        token, rows = bonus, []
        for _ in range(logits.shape[1]):
            guess = self.table.index_select(0, token)
            rows.append(guess)
            token = guess.argmax(-1)
        return 0.02 * logits + 0.2 * torch.stack(rows, 1)


def bigram_pair(seed=0, strength=0.12):
    target, drafter = random_pair(
        seed, target_config=TARGET, drafter_config=dataclasses.replace(DRAFTER), std=0.3
    )
    for layer in target.layers:
        layer.self_attn.o_proj.weight.mul_(strength)
        for name, weight in layer.mlp.named_parameters():
            if "down_proj" in name:
                weight.mul_(strength)
    with torch.no_grad():
        target.lm_head.weight[torch.randperm(40, generator=torch.Generator().manual_seed(seed))] = (
            target.embed_tokens.weight.clone()
        )
        table = target.head(target.embed_tokens.weight)  # [V, V]
    return target, BigramDrafter(drafter, table)


@pytest.fixture(scope="session")
def pair():
    return bigram_pair()


@pytest.fixture
def make_prompts():
    def make(lengths, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(0, 38, (n,), generator=generator).tolist() for n in lengths]

    return make


def slow_greedy(target, prompt, limit, stop=()):
    """Plain greedy decoding without a pool: the oracle, one full pass per token."""
    tokens = list(prompt)
    for _ in range(limit):
        hidden, _, _ = target.score(torch.tensor([tokens]))
        tokens.append(int(target.head(hidden[0, -1:]).argmax()))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def oracle(pair):
    """slow_greedy of the pair's target, remembered."""
    known = {}

    def decode(prompt, limit, stop=()):
        key = (tuple(prompt), limit, tuple(stop))
        if key not in known:
            known[key] = slow_greedy(pair[0], prompt, limit, stop)
        return known[key]

    return decode
