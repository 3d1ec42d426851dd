"""Between host and device without waiting: inputs go up in one copy, results come down one step behind."""

from array import array
from dataclasses import dataclass
from typing import Any, cast

import torch

from workbench.decode.buffers import StepBuffers, StepResult


class Pending:
    """A step's results on their way to the host."""

    def __init__(self, b: StepBuffers, host: memoryview, event: Any) -> None:
        self._buffers, self._host, self._event = b, host, event

    def close(self) -> None:
        """Nothing more of this step will be queued."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> StepResult:
        """Wait for this step only, then read."""
        if self._event is not None:
            self._event.synchronize()
        return self._buffers.unpack(cast(list[list[int]], self._host.tolist()))


@dataclass(frozen=True, slots=True)
class Staged:
    """A step's inputs and results on the host, pinned for a GPU."""

    up: torch.Tensor  # [bs * (1 + width)]
    up_view: memoryview  # plain views: the first call into torch or NumPy after a wait costs tens of us
    down: torch.Tensor  # [bs, 2 * max_accept + 3]
    down_view: memoryview
    event: Any  # behind everything of the step; None on CPU


class Transfer:
    """Staging buffers, two per bucket: a step's are reused two steps later, when it is long over."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._staging: dict[tuple[int, int, int], Staged] = {}

    def _buffers_of(self, b: StepBuffers, index: int) -> "Staged":
        key = (id(b), b.bs, index % 2)
        if key not in self._staging:
            up, down = torch.zeros_like(b.inputs, device="cpu"), torch.zeros_like(b.result, device="cpu")
            event = None
            if self.device.type == "cuda":
                up, down, event = up.pin_memory(), down.pin_memory(), torch.cuda.Event()
            up_view = memoryview(up.numpy()).cast("B").cast("q")
            self._staging[key] = Staged(up, up_view, down, memoryview(down.numpy()), event)
        return self._staging[key]

    def upload(self, b: StepBuffers, index: int, rows: list[int], slots: list[list[int]]) -> None:
        """Write table rows [n] and slots [n][width] of step `index`; padding is row 0 and slot 0."""
        staged, padding = self._buffers_of(b, index), b.bs - len(rows)
        flat = [*rows, *[0] * padding, *(slot for row in slots for slot in row), *[0] * (padding * b.width)]
        staged.up_view[:] = array("q", flat)
        b.inputs.copy_(staged.up, non_blocking=True)

    def download(self, b: StepBuffers, index: int) -> Pending:
        """Queue the copy of step `index`'s results behind the step; `close` what comes back."""
        staged = self._buffers_of(b, index)
        staged.down.copy_(b.result, non_blocking=True)
        return Pending(b, staged.down_view, staged.event)
