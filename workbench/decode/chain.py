"""A chain without tree machinery: most probable token per slot, causal mask, matching prefix."""

import torch
from torch import Tensor

from workbench.tree.buffers import AcceptBuffers, TreeBuffers


def draft_chain(logits: Tensor, bonus: Tensor, tree: TreeBuffers) -> None:
    """Write [bonus, argmax of the first N - 1 slots] of logits [bs, L, V] into tree.token_ids [bs, N]."""
    tree.token_ids[:, 0] = bonus
    tree.token_ids[:, 1:] = logits[:, : tree.width - 1].argmax(-1)


def set_chain_geometry(tree: TreeBuffers) -> None:
    """Depths and parents of a chain; once per bucket, a chain never changes shape."""
    rows = torch.arange(tree.width, device=tree.device)
    tree.depths.copy_(rows.expand_as(tree.depths))
    tree.parents.copy_((rows - 1).expand_as(tree.parents))
    tree.num_nodes.fill_(tree.width)
    tree.mask.copy_((rows <= rows[:, None]).expand_as(tree.mask))


def accept_chain(token_ids: Tensor, target_tokens: Tensor, out: AcceptBuffers) -> None:
    """Keep the prefix of token_ids [bs, N] that the target's tokens [bs, N] confirm, then emit the bonus."""
    bs, n = token_ids.shape
    rows = torch.arange(out.max_accept, device=token_ids.device)
    right = (token_ids[:, 1:] == target_tokens[:, :-1]).long().cumprod(1)
    accepted = right.sum(1, keepdim=True)  # [bs, 1] drafts
    bonus = target_tokens.gather(1, accepted)
    padded = torch.nn.functional.pad(token_ids[:, 1:], (0, out.max_accept - n + 1), value=-1)
    out.tokens.copy_(torch.where(rows < accepted, padded, torch.where(rows == accepted, bonus, -1)))
    out.node_index.copy_(torch.where(rows <= accepted, rows, -1).expand(bs, -1))
    out.accept_length.copy_(accepted[:, 0] + 1)
    out.bonus.copy_(bonus[:, 0])
