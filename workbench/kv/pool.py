"""The pool: one row per token slot and layer, row 0 of every layer the dummy that padding writes to."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class KVPool:
    """Latent rows of all layers in one allocation: slots 1..size are usable, slot 0 is the padding dummy."""

    layers: int
    size: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    device: torch.device | str = "cpu"
    buffer: torch.Tensor = field(init=False, repr=False, compare=False)  # [layers, size + 1, width]

    def __post_init__(self) -> None:
        for name in ("layers", "size", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"KVPool {name}={getattr(self, name)} must be at least 1")
        buffer = torch.zeros(self.layers, self.size + 1, self.width, dtype=self.dtype, device=self.device)
        object.__setattr__(self, "buffer", buffer)

    def layer(self, index: int) -> torch.Tensor:  # [size + 1, width]
        """The rows of one layer, a view."""
        return self.buffer[index]

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot in one layer."""
        return self.width * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one slot over all layers."""
        return self.layers * self.row_bytes

    @property
    def bytes(self) -> int:
        """Bytes of the whole pool, the dummy row included."""
        return self.token_bytes * (self.size + 1)
