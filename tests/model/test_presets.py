from dataclasses import replace

import pytest
import torch
from dense_attention import TestPool

from workbench.model.config import MoEConfig
from workbench.model.pair import TINY_TARGET, random_target
from workbench.model.presets import (
    KIMI_DRAFTER,
    KIMI_K2,
    PRESETS,
    build,
    compare_reads,
    preset,
    step_reads,
)

GB, GIB = 1e9, 2**30


def test_kimi_k2_has_the_published_sizes():
    assert KIMI_K2.params == pytest.approx(1.027e12, rel=2e-3)  # "1T total parameters"
    assert KIMI_K2.kv_bytes_per_token == 70_272
    assert KIMI_DRAFTER.weight_bytes / GIB == pytest.approx(
        6.48, abs=0.01
    )  # size of the published checkpoint
    assert KIMI_DRAFTER.kv_bytes_per_token == 24_576


def test_k2_rank_fits_an_h200_with_46k_tokens_of_context():
    rank = PRESETS["k2-rank"].target
    assert (rank.num_heads, rank.moe.width, rank.moe.routed, rank.moe.resident_experts) == (8, 256, 384, 128)
    assert rank.kv_bytes_per_token == 70_272
    held = rank.weight_bytes + PRESETS["k2-rank"].drafter.weight_bytes + 46_000 * rank.kv_bytes_per_token
    assert held < 110 * GIB
    assert PRESETS["k2-rank-shared"].target.weight_bytes < 30 * GB


def test_shared_layers_hold_the_experts_once():
    moe = MoEConfig(routed=4, per_token=2, width=16)
    config = replace(
        TINY_TARGET, num_layers=5, first_dense=1, shared_layers=2, moe=moe, dtype="fp32", tap_layers=()
    )
    target = random_target(config, std=0.1)
    blocks = [layer.mlp for layer in target.layers[1:]]
    assert blocks[0].experts is blocks[2].experts and blocks[1].experts is blocks[3].experts
    assert blocks[0].gate is not blocks[2].gate
    assert sum(p.numel() for p in target.parameters() if p.dim() > 1) == config.params
    pool = TestPool(5, 20, config.width)
    out = target.prefill(torch.arange(9), pool, torch.arange(1, 10))
    assert out.logits.isfinite().all()


def test_fewer_resident_experts_still_route_over_all():
    moe = MoEConfig(routed=16, per_token=4, width=16, resident=4)
    target = random_target(replace(TINY_TARGET, moe=moe, dtype="fp32"), std=0.1)
    block = target.layers[3].mlp
    assert block.experts.gate_up_proj.shape[0] == 4 and block.gate.weight.shape[0] == 16
    assert block(torch.randn(7, 256)).isfinite().all()


def test_expected_distinct_experts_by_monte_carlo():
    reads = step_reads(KIMI_K2, tokens=33, kv_tokens=0)
    g = torch.Generator().manual_seed(0)
    counts = [torch.rand(33, 384, generator=g).topk(8).indices.unique().numel() for _ in range(200)]
    assert reads.distinct_experts == pytest.approx(sum(counts) / len(counts), rel=0.01)
    one = step_reads(KIMI_K2, tokens=1, kv_tokens=0)
    assert one.distinct_experts == pytest.approx(8)


def test_reads_are_stated_beside_the_real_model():
    text = compare_reads(PRESETS["k2-rank"], tokens=17, kv_tokens=46_000)
    assert "kimi-k2 TP8 rank" in text and "all-reduce" in text and text.count("GB a step") == 2


def test_unknown_presets_and_missing_checkpoints():
    with pytest.raises(ValueError, match="unknown preset 'k3': choose one of k2-rank"):
        preset("k3")
    with pytest.raises(ValueError, match="give the folder of its checkpoint"):
        build("dsv2-lite")
