"""Where two decodes of one prompt part, and whether rounding may be the reason: the gap of two logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Largest top-1/top-2 gap that a change of the query width may flip, in logits; fp32 may flip nothing.
GAP_BOUND = {torch.float32: 0.0, torch.float64: 0.0, torch.bfloat16: 0.25, torch.float16: 0.06}


@dataclass(frozen=True)
class Divergence:
    """The first position at which the tokens differ; `gap` is the target's there, in its own precision."""

    position: int
    tokens: tuple[int | None, int | None]
    gap: float
    bound: float

    @property
    def is_rounding(self) -> bool:
        return None not in self.tokens and self.gap <= self.bound

    def sentence(self) -> str:
        """One line for a report."""
        verdict = "within" if self.is_rounding else "above"
        return (
            f"token {self.position} is {self.tokens[0]} or {self.tokens[1]}: top-1/top-2 gap {self.gap:.3g}, "
            f"{verdict} the bound {self.bound:g}"
        )


@torch.no_grad()
def find_divergence(
    target: Any,
    prompt: Sequence[int],
    first: Sequence[int],
    second: Sequence[int],
    bound: float | None = None,
) -> Divergence | None:
    """None when two greedy outputs of `prompt` agree, else where they part and by what gap.

    `bound` takes the place of GAP_BOUND.
    """
    for position in range(max(len(first), len(second))):
        pair = tuple(tokens[position] if position < len(tokens) else None for tokens in (first, second))
        if pair[0] != pair[1]:
            break
    else:
        return None
    context = torch.tensor([[*prompt, *first[:position]]], device=target.device)
    hidden = target.score(context)[0]
    top = target.head(hidden[0, -1:])[0].topk(2).values
    gap = float(top[0] - top[1])
    return Divergence(position, (pair[0], pair[1]), gap, GAP_BOUND[target.dtype] if bound is None else bound)
