"""Paged KV with one token per slot: who hands slots out, how scattered they get, and how to move them."""

from importlib import import_module
from typing import Any

_HOME = {
    "KVPool": "pool",
    "TokenKVAllocator": "allocator",
    "LayoutScore": "fragmentation",
    "layout_score": "fragmentation",
    "plan_relocation": "relocation_plan",
    "relocate": "relocation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'workbench.kv' has no attribute {name!r}")
    return getattr(import_module(f"workbench.kv.{_HOME[name]}"), name)
