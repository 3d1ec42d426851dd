"""Verify attention: one contract, one table of variants."""

from typing import Any

# On purpose the function shadows its module: `from workbench.attention import variants` gives the function.
from workbench.attention.variants import Variant, variants

__all__ = ["Variant", "VerifyPlan", "make_plan", "variants", "verify_attention"]


def __getattr__(name: str) -> Any:
    """Load torch only when a call or a plan is asked for, not for the table."""
    if name in ("make_plan", "verify_attention", "VerifyPlan"):
        from workbench.attention import api

        return getattr(api, name)
    raise AttributeError(f"module 'workbench.attention' has no attribute {name!r}")
