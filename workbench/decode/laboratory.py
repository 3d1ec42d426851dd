"""Runs a fault, or its repaired twin, on a pair of models and gathers what an investigation needs."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.decode.audit import audit, find_lies
from workbench.decode.decision import StepClaim
from workbench.decode.faults import Fault
from workbench.decode.hooks import DecodeHooks
from workbench.decode.investigation import Evidence
from workbench.decode.loop import SpeculativeDecoder
from workbench.decode.result import DecodeResult
from workbench.measure.profilers import record_trace


@dataclass
class Laboratory:
    """Models, prompts and sizes that every fault of a series shares."""

    target: Any
    drafter: Any
    prompts: Sequence[Sequence[int]]
    budget: int = 16
    max_new_tokens: int = 24
    max_context: int = 192
    trace_steps: int = 2
    shadow_steps: Sequence[int] = (2,)
    log_interval: int = 1
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # of every decoder, below the fault's own

    def make(self, fault: Fault, *, repaired: bool = False, **overrides: Any) -> SpeculativeDecoder:
        """A decoder with the fault switched on, or repaired."""
        options: dict[str, Any] = {
            "mode": "step_graph", "budget": self.budget, "max_batch": max(2, fault.prompts),
            "batch_sizes": [max(2, fault.prompts)], "max_context": self.max_context, "seed": self.seed,
            "log_interval": self.log_interval, "shadow_steps": self.shadow_steps,
        } | self.options | fault.options | (fault.repaired if repaired else {}) | overrides  # fmt: skip
        hooks = DecodeHooks() if repaired else fault.hooks()
        return SpeculativeDecoder(self.target, self.drafter, hooks=hooks, **options)

    def decode(self, fault: Fault, *, repaired: bool = False, **overrides: Any) -> DecodeResult:
        """Decode this fault's prompts once."""
        return self.generate(self.make(fault, repaired=repaired, **overrides), fault)

    def generate(self, decoder: SpeculativeDecoder, fault: Fault, **limits: Any) -> DecodeResult:
        """Decode this fault's prompts with a decoder."""
        prompts = self.prompts[: fault.prompts]
        if len(prompts) < fault.prompts:
            raise ValueError(f"fault {fault.name!r} needs {fault.prompts} prompts: {len(prompts)} were given")
        return decoder.generate(prompts, self.max_new_tokens, fault.temperature, **limits)

    def gather(self, fault: Fault, *, repaired: bool = False) -> Evidence:
        """Decode, trace a few more steps with the same decoder, audit the trace."""
        decoder = self.make(fault, repaired=repaired)
        result = self.generate(decoder, fault)
        decoder.shadow_steps = frozenset()  # its recomputation would be in the trace
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            claims = self.trace(path, decoder, fault)
            found = audit(path)
        return Evidence(
            result, found, find_lies(found, claims), claims, lambda: self.eager_accept_length(fault, repaired)
        )

    def eager_accept_length(self, fault: Fault, repaired: bool = False) -> float:
        """Acceptance of the same run without graphs: what it must be under graphs, too."""
        result = self.decode(fault, repaired=repaired, mode="eager", shadow_steps=(), pad_trees=True)
        return result.mean_accept_length

    def trace(self, path: Path, decoder: SpeculativeDecoder, fault: Fault) -> list[StepClaim]:
        """Run a few steps under torch.profiler, write the trace, return what the runner claimed of them."""
        traced = record_trace(path, lambda: self.generate(decoder, fault, max_steps=self.trace_steps))
        return list(traced.replay.claims)
