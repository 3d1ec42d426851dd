"""Normalisation, rotary positions and the gated MLP that both models are built from."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.model.config import Yarn


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Rotary(nn.Module):
    """Angles of `positions`; frequencies are stretched where a YaRN configuration says so."""

    frequencies: Tensor

    def __init__(self, dim: int, theta: float, yarn: Yarn | None = None) -> None:
        super().__init__()
        self.scale = yarn.rope_scale if yarn else 1.0
        self.dim, self.theta, self.yarn = dim, theta, yarn
        self.register_buffer("frequencies", self.make_frequencies(), persistent=False)

    def make_frequencies(self) -> Tensor:
        # [dim / 2] fp32
        base = self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        if self.yarn is None:
            return 1.0 / base
        kept = 1 - yarn_ramp(self.dim, self.theta, self.yarn)
        return (1.0 / (self.yarn.factor * base)) * (1 - kept) + (1.0 / base) * kept

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [..., dim / 2] fp32."""
        angles = positions[..., None].float() * self.frequencies
        return angles.cos() * self.scale, angles.sin() * self.scale


def yarn_ramp(dim: int, theta: float, yarn: Yarn) -> Tensor:
    """0 where a frequency stays as trained, 1 where it is divided by the factor; [dim / 2]."""

    def dimension_of(rotations: float) -> float:
        return dim * math.log(yarn.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = max(high - low, 0.001)
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the last axis of x [..., dim] by cos, sin [..., dim / 2]; the result is de-interleaved."""
    if interleaved:
        a, b = x[..., 0::2].float(), x[..., 1::2].float()
    else:
        a, b = (half.float() for half in x.chunk(2, dim=-1))
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
