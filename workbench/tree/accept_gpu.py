"""Greedy acceptance in one Triton kernel, one program a request: a dozen small launches become one."""

import triton
import triton.language as tl
from torch import Tensor

from workbench.tree.buffers import AcceptBuffers, TreeBuffers


@triton.jit
def _accept_kernel(
    token_ids, depths, parents, num_nodes, target_tokens, node_index, tokens, accept_length, bonus,
    width, max_accept, W: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A node is accepted when its token and those of all its ancestors are the target's at their parents."""
    b = tl.program_id(0)
    base = b * width
    row = tl.arange(0, N)
    live = row < tl.load(num_nodes + b)
    token = tl.load(token_ids + base + row, mask=live, other=-1)
    depth = tl.load(depths + base + row, mask=live, other=-1)
    node = tl.where(live, row, 0)
    accepted = live
    for _ in range(max_accept - 1):  # climb to the root, which needs no match
        below = node > 0
        parent = tl.load(parents + base + node, mask=below, other=0)
        own = tl.load(token_ids + base + node, mask=below, other=0)
        wanted = tl.load(target_tokens + base + parent, mask=below, other=0)
        accepted = accepted & ((own == wanted) | (node == 0))
        node = tl.where(below, parent, 0)
    accepted = accepted & (node == 0)  # deeper than the buffer: not taken
    place = tl.arange(0, W)
    here = accepted[None, :] & (depth[None, :] == place[:, None])  # [W, N], one node a depth
    index = tl.max(tl.where(here, row[None, :], -1), 1)
    next_here = accepted[None, :] & (depth[None, :] == place[:, None] + 1)
    draft = tl.max(tl.where(next_here, token[None, :], -1), 1)
    length = tl.sum((index >= 0).to(tl.int32), 0)
    extra = tl.load(target_tokens + base + tl.max(index, 0))
    emitted = tl.where(place == length - 1, extra, tl.where(place < length - 1, draft, -1))
    inside = place < max_accept
    tl.store(node_index + b * max_accept + place, index.to(tl.int64), mask=inside)
    tl.store(tokens + b * max_accept + place, emitted.to(tl.int64), mask=inside)
    tl.store(accept_length + b, length)
    tl.store(bonus + b, extra)


def accept_greedy_triton(tree: TreeBuffers, target_tokens: Tensor, out: AcceptBuffers) -> None:
    """Fill `out` from the target's token per row [bs, N] int64, contiguous."""
    _accept_kernel[(tree.bs,)](
        tree.token_ids, tree.depths, tree.parents, tree.num_nodes, target_tokens,
        out.node_index, out.tokens, out.accept_length, out.bonus, tree.width, out.max_accept,
        W=max(2, triton.next_power_of_2(out.max_accept)), N=max(2, triton.next_power_of_2(tree.width)),
        num_warps=4,
    )  # fmt: skip
