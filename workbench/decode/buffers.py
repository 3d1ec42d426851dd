"""What a step reads and writes besides weights and KV rows: on the device, at one address for life."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from workbench.decode.transfer import Mailbox
from workbench.tree.buffers import AcceptBuffers, TreeBuffers


@dataclass(init=False)
class RequestTable:
    """State of the running requests, one row each; row 0 belongs to padding and stays empty."""

    req_to_token: Tensor  # [rows, max_context] int32, pool slot of each committed token
    kv_len: Tensor  # [rows] int64, committed tokens
    bonus: Tensor  # [rows] int64, the last emitted token, not in the pool yet
    remaining: Tensor  # [rows] int32, tokens the request may still emit
    temperature: Tensor  # [rows] fp32
    turn: Tensor  # [1] int64, the half of every mailbox that the next step works on

    def __init__(self, rows: int, max_context: int, device: torch.device | str) -> None:
        self.req_to_token = torch.zeros(rows, max_context, dtype=torch.int32, device=device)
        self.kv_len = torch.zeros(rows, dtype=torch.int64, device=device)
        self.bonus = torch.zeros(rows, dtype=torch.int64, device=device)
        self.remaining = torch.zeros(rows, dtype=torch.int32, device=device)
        self.temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def max_context(self) -> int:
        return self.req_to_token.shape[1]

    def set_row(
        self, row: int, slots: Tensor, bonus: Tensor | int, remaining: int, temperature: float
    ) -> None:
        """Fill one row after a prefill: slots [kv_len]."""
        self.req_to_token[row, : len(slots)] = slots.to(self.req_to_token)
        self.kv_len[row] = len(slots)
        self.bonus[row] = bonus
        self.remaining[row] = remaining
        self.temperature[row] = temperature or 1.0

    def tensors(self) -> list[Tensor]:
        return [getattr(self, f.name) for f in fields(self)]


class StepBuffers:
    """Inputs, intermediate results and outputs of one bucket of `bs` requests of `width` rows each."""

    def __init__(
        self,
        bs: int,
        width: int,
        max_accept: int,
        max_context: int,
        device: torch.device,
        num_stamps: int = 0,  # of the clock, sent with the results
    ) -> None:
        if width < 1 or max_accept < 1:
            raise ValueError(
                f"width={width}, max_accept={max_accept}: both count the root and must be at least 1"
            )
        self.bs, self.width, self.max_accept, self.max_context = bs, width, max_accept, max_context
        self.device = device
        self.inputs = torch.zeros(bs * (1 + width), dtype=torch.int64, device=device)
        self.qo_indptr = torch.arange(0, bs * width + 1, width, dtype=torch.int32, device=device)
        self.kv_len = torch.zeros(bs, dtype=torch.int64, device=device)
        self.bonus = torch.zeros(bs, dtype=torch.int64, device=device)
        self.remaining = torch.zeros(bs, dtype=torch.int32, device=device)
        self.temperature = torch.ones(bs, dtype=torch.float32, device=device)
        self.kv_indptr = torch.zeros(bs + 1, dtype=torch.int32, device=device)
        self.kv_indices = torch.zeros(bs * max_context, dtype=torch.int32, device=device)
        self.positions = torch.zeros(bs * width, dtype=torch.int64, device=device)
        self.mask = torch.zeros(bs * width * width, dtype=torch.bool, device=device)
        self.tree = TreeBuffers(bs, width, device)
        self.accept = AcceptBuffers(bs, max_accept, device)
        self.noise = torch.zeros(bs * width, dtype=torch.float32, device=device)
        self.result = torch.zeros(bs, 2 * max_accept + 3, dtype=torch.int64, device=device)
        self.mail = Mailbox(len(self.inputs), self.result.numel() + num_stamps, device)
        self.flat_index = torch.arange(bs * max_context, device=device)
        self.host_tree: TreeBuffers | None = None  # of split_graph mode: written by the host, then sent up
        self.draft_logits: Tensor | None = None  # [bs, L, V], of the last step or of the graph
        self.logits: Tensor | None = None  # [bs * width, V] fp32
        self.taps: Tensor | None = None  # [bs * width, F]

    @property
    def req_index(self) -> Tensor:
        """[bs] rows of the table, 0 = padding; a view of whatever `inputs` is now."""
        return self.inputs[: self.bs]

    @property
    def out_slots(self) -> Tensor:
        """[bs * width], reserved by the host a step ahead."""
        return self.inputs[self.bs :]

    def adopt(self, other: "StepBuffers") -> None:
        """Take over inputs and tree of another bucket of the same batch, cut or padded to this one."""
        n, w = min(self.bs, other.bs), self.width
        self.inputs.zero_()
        self.req_index[:n] = other.req_index[:n]
        self.out_slots.view(self.bs, w)[:n] = other.out_slots.view(other.bs, other.width)[:n, :w]
        for name in ("kv_len", "bonus", "remaining", "temperature"):
            getattr(self, name)[:n] = getattr(other, name)[:n]
            getattr(self, name)[n:] = 0
        self.kv_indptr[: n + 1] = other.kv_indptr[: n + 1]
        self.kv_indptr[n + 1 :] = other.kv_indptr[n]
        listed = min(len(self.kv_indices), len(other.kv_indices))
        self.kv_indices[:listed] = other.kv_indices[:listed]
        self.kv_indices[listed:] = 0
        self.draft_logits = other.draft_logits
        _cut_tree(self.tree, other.tree, n)

    def unpack(self, flat: list[int]) -> "tuple[StepResult, list[int]]":
        """Split what came down: `result` [bs][2 * max_accept + 3], then stamps of the device."""
        a = self.max_accept
        stride = 2 * a + 3
        rows = [flat[at : at + stride] for at in range(0, self.bs * stride, stride)]
        result = StepResult(
            tokens=[row[:a] for row in rows],
            node_index=[row[a : 2 * a] for row in rows],
            accept_length=[row[2 * a] for row in rows],
            num_nodes=[row[2 * a + 1] for row in rows],
            depth=[row[2 * a + 2] for row in rows],
        )
        return result, flat[self.bs * stride :]


def _cut_tree(narrow: TreeBuffers, wide: TreeBuffers, n: int) -> None:
    w = narrow.width
    for name in ("token_ids", "depths", "parents", "log_probs", "next_token", "next_sibling"):
        getattr(narrow, name)[:n] = getattr(wide, name)[:n, :w]
    narrow.mask[:n] = wide.mask[:n, :w, :w]
    narrow.num_nodes[:n] = wide.num_nodes[:n]


@dataclass(frozen=True)
class StepResult:
    """What the host reads of a step; lists, cheaper for the host than small arrays."""

    tokens: list[list[int]]  # [bs, max_accept], -1 behind the end
    node_index: list[list[int]]  # [bs, max_accept], accepted rows, -1 behind the end
    accept_length: list[int]  # [bs], bonus included
    num_nodes: list[int]  # [bs], root included
    depth: list[int]  # [bs], deepest drafted node
