"""Grouped expert products on the GPU: every program finds its expert from the sorted routes.

Nothing is read back to the host, so one captured graph serves every routing. Grid: one program per sorted
route and column tile. A program works only if its route is the first of a group of BLOCK_M routes of the same
expert; the others return at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M = 16


@triton.jit
def _group(expert_at, rank_at, routes, BLOCK_M: tl.constexpr):
    """(works, expert, sorted rows [BLOCK_M], which of them belong to this expert)."""
    first = tl.program_id(0)
    expert = tl.load(expert_at + first)
    works = tl.load(rank_at + first) % BLOCK_M == 0
    rows = first + tl.arange(0, BLOCK_M)
    same = tl.load(expert_at + rows, mask=rows < routes, other=-1) == expert
    return works, expert, rows, same


@triton.jit
def gate_up_kernel(
    x, order, expert_at, rank_at, weight, hidden_out, routes, picks,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """hidden_out[r] = silu(gate_e(x)) * up_e(x) for sorted route r; weight [E, 2 * WIDTH, HIDDEN]."""
    works, expert, rows, same = _group(expert_at, rank_at, routes, BLOCK_M)
    if works:
        tokens = tl.load(order + rows, mask=same, other=0) // picks
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        base = weight + expert.to(tl.int64) * 2 * WIDTH * HIDDEN
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, HIDDEN, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            inside = k < HIDDEN
            a = tl.load(
                x + tokens[:, None] * HIDDEN + k[None, :], mask=same[:, None] & inside[None, :], other=0.0
            )
            tile = columns[None, :] * HIDDEN + k[:, None]
            mask = (columns[None, :] < WIDTH) & inside[:, None]
            gate = tl.dot(a, tl.load(base + tile, mask=mask, other=0.0), gate, input_precision="ieee")
            up_tile = tl.load(base + WIDTH * HIDDEN + tile, mask=mask, other=0.0)
            up = tl.dot(a, up_tile, up, input_precision="ieee")
        out = gate * tl.sigmoid(gate) * up
        at = hidden_out + rows[:, None] * WIDTH + columns[None, :]
        tl.store(at, out.to(hidden_out.dtype.element_ty), mask=same[:, None] & (columns[None, :] < WIDTH))


@triton.jit
def down_kernel(
    hidden, order, expert_at, rank_at, weight, route_weight, out, routes,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[route] = weight * down_e(hidden), back in the order of the routes; weight [E, HIDDEN, WIDTH]."""
    works, expert, rows, same = _group(expert_at, rank_at, routes, BLOCK_M)
    if works:
        route = tl.load(order + rows, mask=same, other=0)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        base = weight + expert.to(tl.int64) * HIDDEN * WIDTH
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            inside = k < WIDTH
            a = tl.load(
                hidden + rows[:, None] * WIDTH + k[None, :], mask=same[:, None] & inside[None, :], other=0.0
            )
            mask = (columns[None, :] < HIDDEN) & inside[:, None]
            b = tl.load(base + columns[None, :] * WIDTH + k[:, None], mask=mask, other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
        total *= tl.load(route_weight + route, mask=same, other=0.0)[:, None]
        at = out + route[:, None].to(tl.int64) * HIDDEN + columns[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=same[:, None] & (columns[None, :] < HIDDEN))


def sort_routes(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(route at each sorted place, its expert, its rank within it), each [T * k] int32; ids [T, k]."""
    experts, order = ids.flatten().sort(stable=True)
    places = torch.arange(len(experts), dtype=torch.int32, device=ids.device)
    rank = places - torch.searchsorted(experts, experts, out_int32=True)
    return order.int(), experts.int(), rank


def grouped_mlp_triton(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As `grouped_gemm.grouped_mlp`: x [T, hidden], ids and weights [T, k] -> [T, hidden]."""
    (tokens, picks), (_, hidden, width) = ids.shape, down.shape
    routes = tokens * picks
    order, expert_at, rank_at = sort_routes(ids)
    inner = torch.empty(routes, width, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, picks, hidden, dtype=x.dtype, device=x.device)
    wide = min(64, triton.next_power_of_2(width))
    deep = max(16, min(64 if x.dtype.itemsize == 2 else 32, triton.next_power_of_2(hidden)))
    gate_up_kernel[(routes, triton.cdiv(width, max(16, wide)))](
        x.contiguous(), order, expert_at, rank_at, gate_up, inner, routes, picks,
        WIDTH=width, HIDDEN=hidden, BLOCK_M=BLOCK_M, BLOCK_N=max(16, wide), BLOCK_K=deep,
    )  # fmt: skip
    columns = max(16, min(128, triton.next_power_of_2(hidden)))
    depth = max(16, min(64, triton.next_power_of_2(width)))
    down_kernel[(routes, triton.cdiv(hidden, columns))](
        inner, order, expert_at, rank_at, down, weights.float().contiguous(), out, routes,
        WIDTH=width, HIDDEN=hidden, BLOCK_M=BLOCK_M, BLOCK_N=columns, BLOCK_K=depth,
    )  # fmt: skip
    return out.sum(1)
