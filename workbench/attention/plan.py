"""A plan: the resolved variant, split count, tunables and workspaces of one bucket, reused by every step."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch

from workbench import targets
from workbench.attention.variants import Variant, resolve
from workbench.shapes import VerifyShape
from workbench.targets import HardwareTarget

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
MAX_NSPLIT = 1024


@dataclass(frozen=True, slots=True)
class VerifyCall:
    """The tensors of one call; a request attends to its kv_indices, then to its draft_slots."""

    q: torch.Tensor  # [T, H, D], last dimension contiguous
    kv: torch.Tensor  # [pool, D], any row stride
    qo_indptr: torch.Tensor  # [bs+1] int32
    kv_indptr: torch.Tensor  # [bs+1] int32; prefix only when draft_slots is given
    kv_indices: torch.Tensor  # [>= kv_indptr[bs]] int32|int64
    tree_mask: torch.Tensor | None  # launchers get `checks.canonical_mask` of it
    draft_slots: torch.Tensor | None  # [>= qo_indptr[bs]] int32|int64
    mask_layout: str  # one of variants.MASK_LAYOUTS; "causal" when tree_mask is None
    sm_scale: float
    latent: int
    out: torch.Tensor  # [T, H, latent] in q.dtype
    lse: torch.Tensor  # [T, H] fp32, natural log

    @property
    def bs(self) -> int:
        return self.qo_indptr.shape[0] - 1


@dataclass(eq=False)
class VerifyPlan:
    """Owns every buffer a bucket's calls write besides out and lse; keep it as long as a graph of it."""

    variant: str
    nsplit: int
    shape: VerifyShape
    device: torch.device
    target: HardwareTarget
    batch_invariant: bool
    tunables: dict[str, Any]
    workspaces: dict[str, torch.Tensor]
    launch: Callable[["VerifyPlan", VerifyCall], None]
    state: dict[str, Any] = field(
        default_factory=dict
    )  # the launcher's own: a loaded kernel, a peer's wrapper
    handle: int = 0

    @property
    def workspace_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self.workspaces.values())


_handles = itertools.count(1)
_live: WeakValueDictionary[int, VerifyPlan] = WeakValueDictionary()


def find_plan(handle: int) -> VerifyPlan:
    """The live plan with this handle. Raises ValueError once it was dropped."""
    plan = _live.get(handle)
    if plan is None:
        raise ValueError(
            f"plan={handle} no longer exists: keep the VerifyPlan as long as what was recorded with it"
        )
    return plan


def make_plan(
    shape: VerifyShape,
    *,
    variant: str = "auto",
    nsplit: int | str = "auto",
    device: torch.device | str,
    batch_invariant: bool = False,
    **tunables: Any,
) -> VerifyPlan:
    """Resolve `auto` from the bucket and the target only, and allocate every workspace.

    `tunables` override the variant's own choice (`Variant.tunables` lists the names). Raises ValueError that
    names the argument for an unknown variant, a bucket it cannot run, nsplit < 1 or an unknown tunable.
    """
    device = torch.device(device)
    target = targets.load("cpu") if device.type == "cpu" else targets.detect()
    chosen = resolve(variant, shape, target)
    launcher = chosen.load()
    values = launcher.default_tunables(shape, target, batch_invariant) | _check_tunables(chosen, tunables)
    count = _resolve_nsplit(
        nsplit, chosen, lambda: launcher.choose_nsplit(shape, target, values, batch_invariant)
    )
    sizes = launcher.workspaces(shape, count, values)
    workspaces = {
        name: torch.empty(size, dtype=dtype, device=device) for name, (size, dtype) in sizes.items()
    }
    plan = VerifyPlan(
        chosen.name, count, shape, device, target, batch_invariant, values, workspaces, launcher.launch
    )
    if chosen.backend == "cuda":
        launcher.prepare(plan)  # compiles and loads: the first call may already be captured
    plan.handle = next(_handles)
    _live[plan.handle] = plan
    return plan


def _check_tunables(chosen: Variant, tunables: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(tunables.keys() - set(chosen.tunables))
    if unknown:
        raise ValueError(
            f"{unknown[0]}={tunables[unknown[0]]!r}: {chosen.name} has"
            f" {', '.join(chosen.tunables) or 'no tunables'}"
        )
    return tunables


def _resolve_nsplit(nsplit: int | str, chosen: Variant, choose: Callable[[], int]) -> int:
    if nsplit == "auto":
        return choose()
    if not isinstance(nsplit, int) or isinstance(nsplit, bool) or not 1 <= nsplit <= MAX_NSPLIT:
        raise ValueError(f"nsplit={nsplit!r}: expected 'auto' or an integer from 1 to {MAX_NSPLIT}")
    if nsplit > 1 and not chosen.splits:
        raise ValueError(f"nsplit={nsplit}: {chosen.name} does not split the KV rows, use 1 or 'auto'")
    return nsplit


def partial_sizes(
    shape: VerifyShape, nsplit: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Workspaces of a split-KV variant: normalised partial outputs and LSE, per request, split and row."""
    rows = max(shape.rows, 1)
    return {
        "partial_out": ((shape.bs, nsplit, rows, shape.latent), dtype),
        "partial_lse": ((shape.bs, nsplit, rows), torch.float32),
    }
