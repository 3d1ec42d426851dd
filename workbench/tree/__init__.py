"""Draft trees: build, mask, accept. Names load on first use, so importing the package costs nothing."""

from importlib import import_module
from typing import Any

_HOME = {
    "AcceptBuffers": "buffers",
    "DraftTree": "ddtree",
    "TreeBuffers": "buffers",
    "accept_greedy": "accept",
    "accept_greedy_batch": "accept",
    "accept_sampled": "accept",
    "accept_sampled_batch": "accept",
    "build_chain": "ddtree",
    "build_chain_batch": "batch",
    "build_ddtree": "ddtree",
    "build_ddtree_batch": "batch",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'workbench.tree' has no attribute {name!r}")
    return getattr(import_module(f"workbench.tree.{_HOME[name]}"), name)
