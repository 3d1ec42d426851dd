import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.model.config import MoEConfig
from workbench.model.grouped_gemm import grouped_mlp
from workbench.model.grouped_gemm_triton import grouped_mlp_triton, sort_routes
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


def random_case(tokens, experts, picks, hidden, width, seed, dtype=torch.float32, device="cpu"):
    g = torch.Generator(device).manual_seed(seed)
    make = {"generator": g, "device": device}
    x = torch.randn(tokens, hidden, **make).to(dtype)
    ids = torch.rand(tokens, experts, **make).topk(picks, dim=-1).indices
    gate_up = (torch.randn(experts, 2 * width, hidden, **make) * hidden**-0.5).to(dtype)
    down = (torch.randn(experts, hidden, width, **make) * width**-0.5).to(dtype)
    return x, ids, torch.rand(tokens, picks, **make), gate_up, down


@pytest.mark.parametrize(
    ("tokens", "experts", "picks", "hidden", "width"),
    [(1, 4, 2, 32, 16), (19, 3, 2, 48, 24), (40, 2, 1, 16, 16)],
)
def test_triton_grouped_mlp_interpreted(tokens, experts, picks, hidden, width):
    case = random_case(tokens, experts, picks, hidden, width, seed=tokens)
    got = grouped_mlp_triton(*case)
    torch.testing.assert_close(got.double(), loop_over_pairs(*case), atol=1e-4, rtol=1e-4)


def test_repeated_experts_of_one_token_both_count():
    x, ids, weights, gate_up, down = random_case(6, 2, 2, 16, 16, seed=0)
    ids = torch.zeros_like(ids)
    wanted = loop_over_pairs(x, ids, weights, gate_up, down)
    for run in (grouped_mlp, grouped_mlp_triton):
        torch.testing.assert_close(run(x, ids, weights, gate_up, down).double(), wanted, atol=1e-4, rtol=1e-4)


def test_sorted_routes_keep_order_within_an_expert():
    order, experts, rank = sort_routes(torch.tensor([[2, 0], [2, 1], [0, 2]]))
    assert experts.tolist() == [0, 0, 1, 2, 2, 2]
    assert order.tolist() == [1, 4, 3, 0, 2, 5] and rank.tolist() == [0, 1, 0, 0, 1, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 33])
def test_triton_grouped_mlp_on_gpu_replays_with_new_routes(tokens):
    case = random_case(tokens, 128, 8, 7168, 256, seed=1, dtype=torch.bfloat16, device="cuda")
    static = [t.clone() for t in case]
    grouped_mlp(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_mlp(*static)
    for seed in (2, 3):
        fresh = random_case(tokens, 128, 8, 7168, 256, seed=seed, dtype=torch.bfloat16, device="cuda")
        for own, new in zip(static[:3], fresh[:3]):
            own.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        wanted = loop_over_pairs(*fresh[:3], *static[3:])
        assert (out.double() - wanted).norm() / wanted.norm() < 1e-2
