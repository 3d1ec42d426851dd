"""What a step bench is given: context, batch, budget, slot layout; and the memory around it."""

import gc
from dataclasses import dataclass
from typing import Any

import torch

NAME = "eager_vs_graph"


@dataclass(frozen=True)
class StepCase:
    """One context length on one pair of models."""

    model: str
    context: int
    bs: int = 1
    budget: int = 16
    shape: Any = "tree"
    layout: str = "random"  # of the slots: random or contiguous
    accept_length: float | None = None  # synthetic law's mean; None = the models' own acceptance
    random_kv: bool = False

    @property
    def axes(self) -> dict[str, Any]:
        return {
            "model": self.model, "ctx": self.context, "bs": self.bs, "budget": self.budget,
            "shape": self.shape, "layout": self.layout, "kv": "noise" if self.random_kv else "prefill",
            "acceptance": "model" if self.accept_length is None else f"geometric {self.accept_length:g}",
        }  # fmt: skip

    def case_id(self, mode: str) -> str:
        return f"{self.model}-ctx{self.context}-bs{self.bs}-b{self.budget}-{self.shape}-{mode}"


def make_allocator(size: int, layout: str, seed: int) -> Any:
    """An allocator whose free list is in order (contiguous) or shuffled (random)."""
    from workbench.kv.allocator import TokenKVAllocator

    allocator = TokenKVAllocator(size)
    if layout == "contiguous":
        return allocator
    if layout != "random":
        raise ValueError(f"layout={layout!r}: choose contiguous or random")
    slots = allocator.alloc(size)
    assert slots is not None
    allocator.free(slots[torch.randperm(size, generator=torch.Generator().manual_seed(seed))])
    return allocator


def release_memory() -> None:
    """Give pools and graphs back before the next case builds its own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
