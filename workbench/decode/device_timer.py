"""A kernel that writes the GPU's timer into a buffer: a time stamp that a graph takes on every replay."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["index"])
def _stamp_kernel(stamps, index):
    tl.store(stamps + index, globaltimer())


def stamp_device_time(stamps_ns: torch.Tensor, index: int) -> None:
    """Write the device's clock, in nanoseconds, to stamps_ns[index] in stream order."""
    _stamp_kernel[(1,)](stamps_ns, index, num_warps=1)
