"""Temperature, top-k, top-p and the draw itself, as fixed-shape tensor operations."""

import torch
from torch import Tensor


def target_probs(
    logits: Tensor, *, temperature: float | Tensor, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The distribution sampled from, [rows, V] fp32: softmax(logits / temperature), cut to top-k, then top-p.

    Top-k keeps the k best (equal logits: smaller id first). Top-p keeps the smallest head of the remaining
    distribution whose mass reaches top_p, and at least one token.
    """
    _check(temperature, top_k, top_p)
    scaled = logits.float() / temperature
    if not top_k and top_p is None:
        return torch.softmax(scaled, -1)
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    if top_k and top_k < ordered.shape[1]:
        ordered[:, top_k:] = -torch.inf
    probs = torch.softmax(ordered, -1)
    if top_p is not None and top_p < 1.0:
        before = probs.cumsum(-1) - probs
        probs = torch.where(before < top_p, probs, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(1, ids, probs)


def draw_tokens(
    logits: Tensor,
    noise: Tensor,
    *,
    temperature: float | Tensor,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """One token per row [rows] int64 by inverse transform of `noise` [rows], uniform in [0, 1)."""
    probs = target_probs(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    cumulative = probs.double().cumsum(-1)
    # the sum is 1 up to rounding; scaling the noise by it keeps every draw inside the support
    threshold = noise.double().unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=logits.shape[1] - 1)


def _check(temperature: float | Tensor, top_k: int | None, top_p: float | None) -> None:
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise ValueError(
            f"temperature={temperature} cannot be sampled: use a positive one, or greedy acceptance for 0"
        )
    if top_k is not None and top_k < 0:
        raise ValueError(f"top_k={top_k}: use a positive count, or None for no cut")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: use a number in (0, 1], or None for no cut")
