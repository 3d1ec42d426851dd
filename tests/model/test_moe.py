import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.model.config import MoEConfig
from workbench.model.grouped_gemm import grouped_mlp
from workbench.model.moe import MoE
from workbench.model.pair import init_weights


def loop_over_pairs(x, ids, weights, gate_up, down):
    out = torch.zeros_like(x, dtype=torch.float64)
    for t in range(len(x)):
        for pick, e in enumerate(ids[t].tolist()):
            gate, up = (gate_up[e].double() @ x[t].double()).chunk(2)
            out[t] += float(weights[t, pick]) * (down[e].double() @ (gate * torch.sigmoid(gate) * up))
    return out


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 9), st.integers(0, 10**6))
def test_grouped_mlp_equals_a_loop(tokens, experts, seed):
    g = torch.Generator().manual_seed(seed)
    picks = min(experts, 3)
    x = torch.randn(tokens, 16, generator=g)
    ids = torch.stack([torch.randperm(experts, generator=g)[:picks] for _ in range(tokens)])
    weights = torch.rand(tokens, picks, generator=g)
    gate_up = torch.randn(experts, 16, 16, generator=g)
    down = torch.randn(experts, 16, 8, generator=g)
    got = grouped_mlp(x, ids, weights, gate_up, down)
    torch.testing.assert_close(
        got.double(), loop_over_pairs(x, ids, weights, gate_up, down), atol=1e-3, rtol=1e-4
    )


@pytest.mark.parametrize("groups", [1, 4])
def test_dense_training_path_equals_routed(groups):
    config = MoEConfig(
        routed=8, per_token=2, width=16, groups=groups, groups_kept=max(1, groups // 2), scaling=1.7
    )
    moe = MoE(config, 32)
    init_weights(moe, 1, std=0.2)
    x = torch.randn(11, 32)
    out, load = moe.forward_dense(x)
    torch.testing.assert_close(out, moe(x), atol=1e-5, rtol=1e-4)
    assert load.shape == (8,)
