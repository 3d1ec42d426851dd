"""Between host and device without waiting: a step finds its inputs in a mailbox and leaves its results there.

Both ends are part of the step, so a graph holds them too and the host calls the device twice a step: to
launch it and to mark its end. Each direction has two halves used in turn: the step in flight works on one
while the host works on the other. A step copies both halves; the other one travels unused on the way up,
unchanged on the way down.
"""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from workbench.decode.buffers import StepBuffers, StepResult


class Mailbox:
    """The tensors of a bucket, pinned on the host for a GPU: up [2, inputs], down [2, results], int64."""

    def __init__(self, inputs: int, results: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.up_host = torch.zeros(2, inputs, dtype=torch.int64, pin_memory=is_cuda)
        self.down_host = torch.zeros(2, results, dtype=torch.int64, pin_memory=is_cuda)
        self.up = torch.zeros(2, inputs, dtype=torch.int64, device=device)
        self.down = torch.zeros(2, results, dtype=torch.int64, device=device)
        self._up_views, self._down_views = HostViews(self.up_host), HostViews(self.down_host)
        self._written: list[list[int]] = [[], []]
        self._events = [torch.cuda.Event(), torch.cuda.Event()] if is_cuda else [None, None]

    def write(self, index: int, rows: Sequence[int], slots: Sequence[Sequence[int]], bs: int) -> None:
        """Inputs of step `index`: rows of the table [n], slots [n][width]; padding to `bs`: row 0, slot 0."""
        view = self._up_views.half(self.up_host, index)
        padding = bs - len(rows)
        flat = [*rows, *[0] * padding]
        for row in slots:
            flat += row
        flat += [0] * (len(view) - len(flat))
        view[:] = array("q", flat)
        self._written[index % 2] = flat

    def pending(self, b: "StepBuffers", index: int) -> "Pending":
        """The results of step `index`; call it when all of the step has been launched."""
        event = self._events[index % 2]
        if event is not None:
            event.record()
        return Pending(b, self._down_views.half(self.down_host, index), event)

    def written(self, index: int) -> list[int]:
        """What `write` was given for step `index`, whatever became of it."""
        return self._written[index % 2]

    def arrived(self, index: int) -> list[int]:
        """What the host will read of step `index`; wait for the device first."""
        return list(self._down_views.half(self.down_host, index).tolist())


class HostViews:
    """Plain views of a tensor's halves: the first call into torch or NumPy after a wait costs tens of us."""

    def __init__(self, tensor: Tensor) -> None:
        self._see(tensor)

    def _see(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._halves = [memoryview(half.numpy()).cast("B").cast("q") for half in tensor]

    def half(self, tensor: Tensor, index: int) -> memoryview:
        """The half of step `index`; of another tensor when `tensor` has been replaced."""
        if tensor is not self._tensor:
            self._see(tensor)
        return self._halves[index % 2]


class Pending:
    """A step's results on their way to the host."""

    def __init__(self, b: "StepBuffers", view: memoryview, event: Any) -> None:
        self._buffers, self._view, self._event = b, view, event

    def wait(self) -> "tuple[StepResult, list[int]]":
        """Wait for this step only, then read: (result, the clock's stamps of the device, in nanoseconds)."""
        if self._event is not None:
            self._event.synchronize()
        return self._buffers.unpack(self._view.tolist())


def receive_inputs(mail: Mailbox, turn: Tensor, inputs: Tensor) -> None:
    """Device side: inputs [n] from the half that `turn` [1] names."""
    mail.up.copy_(mail.up_host, non_blocking=True)
    torch.index_select(mail.up, 0, turn, out=inputs.view(1, -1))


def send_results(mail: Mailbox, turn: Tensor, results: Tensor) -> None:
    """Device side: results [m] into the half that `turn` [1] names, then the turn passes to the other."""
    mail.down.index_copy_(0, turn, results.view(1, -1))
    mail.down_host.copy_(mail.down, non_blocking=True)
    turn.bitwise_xor_(1)
