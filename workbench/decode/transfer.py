"""Between host and device without waiting: inputs go up in one copy, results come down one step behind."""

from typing import Any

import numpy as np
import torch

from workbench.decode.buffers import StepBuffers, StepResult


class Pending:
    """A step's results on their way to the host."""

    def __init__(self, b: StepBuffers, host: torch.Tensor, event: Any) -> None:
        self._buffers, self._host, self._event = b, host, event

    def close(self) -> None:
        """Nothing more of this step will be queued."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> StepResult:
        """Wait for this step only, then read."""
        if self._event is not None:
            self._event.synchronize()
        return self._buffers.unpack(self._host.numpy())


class Transfer:
    """Staging buffers, two per bucket: a step's are reused two steps later, when it is long over."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._staging: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, Any]] = {}

    def _buffers_of(self, b: StepBuffers, index: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
        key = (id(b), b.bs, index % 2)
        if key not in self._staging:
            up, down = torch.zeros_like(b.inputs, device="cpu"), torch.zeros_like(b.result, device="cpu")
            event = None
            if self.device.type == "cuda":
                up, down, event = up.pin_memory(), down.pin_memory(), torch.cuda.Event()
            self._staging[key] = (up, down, event)
        return self._staging[key]

    def upload(self, b: StepBuffers, index: int, rows: list[int], slots: np.ndarray) -> None:
        """Write table rows [n] and reserved slots [n, width] of step `index`; padding is row 0 and slot 0."""
        up = self._buffers_of(b, index)[0]
        view, n = up.numpy(), len(rows)
        view[:] = 0
        view[:n] = rows
        view[b.bs : b.bs + slots.size] = slots.reshape(-1)
        b.inputs.copy_(up, non_blocking=True)

    def download(self, b: StepBuffers, index: int) -> Pending:
        """Queue the copy of step `index`'s results behind the step; `close` what comes back."""
        _, down, event = self._buffers_of(b, index)
        down.copy_(b.result, non_blocking=True)
        return Pending(b, down, event)
