"""A captured step may not read a tensor on the host, nor make a shape from one."""

import pytest
import torch
from dense_attention import TestPool
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.model.batch import ForwardBatch
from workbench.model.pair import random_pair

FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.default")


class NoHostReads(TorchDispatchMode):
    """Fails on operations whose result shape or Python value depends on tensor contents."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in str(func) for name in FORBIDDEN), f"{func} reads a tensor on the host"
        return func(*args, **(kwargs or {}))


def copy_attend(latent):
    """Stands in for verify attention: no host reads of its own."""
    return lambda q, kv_layer, batch, index: q[..., :latent] * kv_layer[batch.out_slots][:, None, :latent]


def static_batch(bs, width, prefix, device):
    rows = bs * width
    return ForwardBatch(
        token_ids=torch.randint(0, 256, (rows,), device=device),
        positions=torch.arange(prefix, prefix + width, device=device).repeat(bs),
        out_slots=torch.arange(100, 100 + rows, device=device),
        qo_indptr=torch.arange(0, rows + 1, width, dtype=torch.int32, device=device),
        kv_indptr=torch.arange(0, bs * prefix + 1, prefix, dtype=torch.int32, device=device),
        kv_indices=torch.arange(1, bs * prefix + 1, device=device),
        tree_mask=torch.ones(bs * width * width, dtype=torch.bool, device=device),
        max_q_len=width,
        max_kv_len=prefix + width,
    )


def run_step(target, drafter, batch, pool, drafts):
    """draft, forward, write_context: everything a step runs."""
    bs = len(batch.kv_indptr) - 1
    start = (batch.kv_indptr[1:] - batch.kv_indptr[:-1]).long()
    attend = copy_attend(drafter.config.latent)
    logits = drafter.draft(batch.token_ids[:bs], start, batch.kv_indptr, batch.kv_indices, drafts, attend)
    out = target.forward(batch, pool, copy_attend(target.config.latent))
    drafter.write_context(out.taps, batch.positions, batch.out_slots, drafts)
    return logits, out.logits


@pytest.mark.parametrize("sliding", [False, True])
def test_a_step_reads_nothing_on_the_host(sliding):
    target, drafter = random_pair(0)
    if sliding:
        kinds = ("sliding_attention", "full_attention")
        object.__setattr__(drafter.config, "layer_types", kinds)
        object.__setattr__(drafter.config, "sliding_window", 4)
    c, d = target.config, drafter.config
    pool, drafts = TestPool(c.num_layers, 200, c.width), TestPool(d.num_layers, 260, d.kv_heads * d.width)
    with NoHostReads():
        logits, verified = run_step(target, drafter, static_batch(2, 5, 7, "cpu"), pool, drafts)
    assert logits.shape == (2, 7, 264) and verified.shape == (10, 264)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_replays_on_gpu_with_new_tokens(dtype):
    target, drafter = random_pair(0, device="cuda", dtype=dtype)
    pool, drafts = target.make_pool(200), drafter.make_pool(200, 2)
    batch = static_batch(2, 5, 7, "cuda")
    run_step(target, drafter, batch, pool, drafts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits, verified = run_step(target, drafter, batch, pool, drafts)
    batch.token_ids.copy_(torch.randint(0, 256, (10,), device="cuda"))
    graph.replay()
    replayed = logits.clone(), verified.clone()
    eager = run_step(target, drafter, batch, pool, drafts)
    for got, wanted in zip(replayed, eager):
        torch.testing.assert_close(got, wanted, atol=1e-2 if dtype == "bf16" else 1e-4, rtol=1e-2)
