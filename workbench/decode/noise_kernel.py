"""Philox noise whose seed and offset are read on the device: a replay draws new numbers."""

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def _noise_kernel(out, state, n, BLOCK: tl.constexpr):
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed, drawn = tl.load(state), tl.load(state + 1)
    tl.store(out + cell, tl.rand(seed, drawn + cell), mask=cell < n)


def fill_noise(out: torch.Tensor, state: torch.Tensor) -> None:
    """out [n] fp32 in [0, 1) from state [2] int64: seed, numbers drawn before."""
    n = out.numel()
    _noise_kernel[(triton.cdiv(n, BLOCK),)](out, state, n, BLOCK=BLOCK)
