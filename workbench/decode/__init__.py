"""Decode: one step function, its graphs, and a continuous batch around them. Names load on first use."""

from importlib import import_module
from typing import Any

_HOME = {
    "DecodeHooks": "hooks",
    "DecodeResult": "result",
    "GraphRunner": "graph_runner",
    "Reason": "decision",
    "ReplayDecision": "decision",
    "SpeculativeDecoder": "loop",
    "StepClaim": "decision",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'workbench.decode' has no attribute {name!r}")
    return getattr(import_module(f"workbench.decode.{_HOME[name]}"), name)
