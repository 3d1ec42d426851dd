"""What a graph goes on reading where it was captured: static buffers and weights, watched for moves."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from workbench.decode.buffers import StepBuffers
from workbench.decode.step import DecodeStep


@dataclass(frozen=True)
class Watched:
    """Tensors that one object keeps: which they were at capture, and where they lay."""

    attributes: dict[str, Any]  # of the object
    names: tuple[str, ...]  # there
    prefix: str  # of their names for people
    ids: tuple[int, ...]
    addresses: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]  # held, so that no id is used again

    @classmethod
    def make(cls, attributes: dict[str, Any], names: Iterable[str], prefix: str) -> "Watched":
        chosen = tuple(names)
        tensors = tuple(attributes[name] for name in chosen)
        ids, addresses = tuple(map(id, tensors)), tuple(t.data_ptr() for t in tensors)
        return cls(attributes, chosen, prefix, ids, addresses, tensors)

    def replaced(self) -> list[str]:
        """Names under which another tensor is kept now; once a step, so no Python per tensor."""
        now = tuple(map(id, map(self.attributes.__getitem__, self.names)))
        return [] if now == self.ids else self._differing(now, self.ids)

    def moved(self) -> list[str]:
        """Names of tensors that no longer lie where they lay."""
        now = tuple(self.attributes[name].data_ptr() for name in self.names)
        return self._differing(now, self.addresses)

    def _differing(self, now: tuple[int, ...], then: tuple[int, ...]) -> list[str]:
        return [self.prefix + name for name, a, b in zip(self.names, now, then) if a != b]


def watch_buffers(step: DecodeStep, b: StepBuffers, ignored: Collection[str]) -> list[Watched]:
    """Every static tensor of a step but those of `b` called `ignored`."""
    holders = {
        "": b, "mail.": b.mail, "tree.": b.tree, "accept.": b.accept, "table.": step.table,
        "pool.": step.pool, "noise.": step.noise, "clock.": step.clock,
    }  # fmt: skip
    if step.draft_pool is not None:
        holders["draft_pool."] = step.draft_pool
    return [
        Watched.make(vars(holder), _tensor_names(vars(holder), ignored if holder is b else ()), prefix)
        for prefix, holder in holders.items()
    ]


def _tensor_names(attributes: dict[str, Any], ignored: Collection[str]) -> list[str]:
    return [n for n, value in attributes.items() if isinstance(value, torch.Tensor) and n not in ignored]


def watch_weights(step: DecodeStep) -> list[Watched]:
    """Every parameter of both models; many that seldom move: look at their addresses only."""
    models = {"target.": step.target, "drafter.": step.drafter}
    return [
        Watched.make(module._parameters, _tensor_names(module._parameters, ()), f"{prefix}{path}.")
        for prefix, model in models.items()
        if isinstance(model, torch.nn.Module)
        for path, module in model.named_modules()
    ]
