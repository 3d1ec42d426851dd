"""Grouped products over routed experts: sorted by expert, no loop over experts, no host sync.

On CUDA the Triton kernels of `grouped_gemm_triton`, on CPU torch's grouped product.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def grouped_mlp(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """sum over a token's experts e of weight * down_e(silu(gate_e(x)) * up_e(x)).

    x [T, hidden], ids and weights [T, k], gate_up [E, 2 * width, hidden], down [E, hidden, width].
    """
    if x.is_cuda:
        from workbench.model.grouped_gemm_triton import grouped_mlp_triton

        return grouped_mlp_triton(x, ids, weights, gate_up, down)
    tokens, picks = ids.shape
    order = ids.flatten().argsort(stable=True)  # [T * k], pairs sorted by expert
    counts = torch.zeros(len(gate_up), dtype=torch.int32, device=x.device)
    counts.index_add_(0, ids.flatten(), torch.ones_like(order, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = x.index_select(0, order // picks)
    gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    out = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)  # [T * k, hidden]
    unsorted = torch.empty_like(out).index_copy_(0, order, out).view(tokens, picks, -1)
    return torch.einsum("tkh,tk->th", unsorted, weights.to(out.dtype))
