"""Static buffers of a batch of draft trees and of their acceptance: fixed width, written in place, one
address for life."""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(init=False)
class TreeBuffers:
    """Trees of `bs` requests, `width` rows each (root included). Rows at and behind `num_nodes[b]` are
    padding: they see only themselves and no walk array leads to them."""

    token_ids: Tensor  # [bs, N] int64
    depths: Tensor  # [bs, N] int32
    parents: Tensor  # [bs, N] int32; -1 for the root and for padding
    log_probs: Tensor  # [bs, N] fp32, of the whole path; -inf for padding
    num_nodes: Tensor  # [bs] int32
    mask: Tensor  # [bs, N, N] bool; flat it is the "tree" layout with q_len N
    retrieve_index: Tensor  # [bs, N] int64, row of the verify batch
    next_token: Tensor  # [bs, N] int64, first child or -1
    next_sibling: Tensor  # [bs, N] int64, next sibling or -1
    nan_slot: Tensor  # [bs] int32, first draft slot with a NaN or +inf logit, -1 if none
    workspace: dict[tuple[int, ...], Any] = field(repr=False)  # scratch of the device builders, by shape

    def __init__(self, bs: int, num_nodes: int, device: torch.device | str = "cpu") -> None:
        if bs < 1 or num_nodes < 1:
            raise ValueError(f"bs={bs}, num_nodes={num_nodes}: both must be at least 1 (the root is a node)")
        shape = (bs, num_nodes)
        self.token_ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self.depths = torch.zeros(shape, dtype=torch.int32, device=device)
        self.parents = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.log_probs = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
        self.log_probs[:, 0] = 0.0
        self.num_nodes = torch.ones(bs, dtype=torch.int32, device=device)
        self.mask = torch.eye(num_nodes, dtype=torch.bool, device=device).repeat(bs, 1, 1)
        self.retrieve_index = torch.arange(bs * num_nodes, device=device).view(shape)
        self.next_token = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.next_sibling = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.nan_slot = torch.full((bs,), -1, dtype=torch.int32, device=device)
        self.workspace = {}

    @property
    def bs(self) -> int:
        return self.token_ids.shape[0]

    @property
    def width(self) -> int:
        """Rows per request, root and padding included."""
        return self.token_ids.shape[1]

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    def tensors(self) -> list[Tensor]:
        """Every output tensor, in field order."""
        return [getattr(self, f.name) for f in fields(self) if f.name != "workspace"]

    def positions(self, start: Tensor) -> Tensor:
        """[bs, N] int64: committed length `start` [bs] plus depth."""
        return start.view(-1, 1) + self.depths

    def check(self) -> None:
        """Raise ValueError that names the request and slot of a NaN or +inf draft logit. Synchronises."""
        slots = self.nan_slot.tolist()
        bad = [f"request {b} slot {slot}" for b, slot in enumerate(slots) if slot >= 0]
        if bad:
            raise ValueError(f"NaN or +inf draft logit at {', '.join(bad)}: check the drafter's output")


@dataclass(init=False)
class AcceptBuffers:
    """What one verify pass emits per request; `max_accept` = draft depth + 1 (a narrower buffer would cut
    paths)."""

    node_index: Tensor  # [bs, max_accept] int64, accepted tree rows, root first; -1 behind the end
    tokens: Tensor  # [bs, max_accept] int64, accepted drafts, then the bonus; -1 behind the end
    accept_length: Tensor  # [bs] int32, tokens emitted, bonus included
    bonus: Tensor  # [bs] int64

    def __init__(self, bs: int, max_accept: int, device: torch.device | str = "cpu") -> None:
        if bs < 1 or max_accept < 1:
            raise ValueError(
                f"bs={bs}, max_accept={max_accept}: both must be at least 1 (the bonus is emitted)"
            )
        self.node_index = torch.full((bs, max_accept), -1, dtype=torch.int64, device=device)
        self.tokens = torch.full((bs, max_accept), -1, dtype=torch.int64, device=device)
        self.accept_length = torch.zeros(bs, dtype=torch.int32, device=device)
        self.bonus = torch.zeros(bs, dtype=torch.int64, device=device)

    @property
    def max_accept(self) -> int:
        return self.tokens.shape[1]
