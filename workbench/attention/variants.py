"""The one table of verify-attention variants: name -> launcher module, where it runs, what it takes.

A launcher is a module (for a peer, an object in one) with these functions (see `triton_split` for a
complete one). It is imported only when its variant is asked for, imports without its optional package, and
names whatever it lacks in `supports`:

    # reason why this machine cannot run the bucket, or None
    supports(shape, target) -> str | None
    # one value for each name in `tunables`
    default_tunables(shape, target, batch_invariant) -> dict[str, Any]
    # what nsplit="auto" means for a bucket
    choose_nsplit(shape, target, tunables, batch_invariant) -> int
    # sizes and dtypes of the buffers the plan allocates (`plan.partial_sizes` gives the usual ones)
    workspaces(shape, nsplit, tunables) -> dict[str, tuple[tuple[int, ...], torch.dtype]]
    # write every row of call.out and call.lse
    launch(plan: VerifyPlan, call: VerifyCall) -> None
    # backend "cuda" only, called by make_plan: compile and load what the first call may already capture
    prepare(plan) -> None

`launch` of a capturable variant makes no allocation, copy or host sync and no decision that depends on tensor
contents. `call` holds checked tensors (`workbench.attention.plan.VerifyCall`).
"""

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from workbench import targets
from workbench.measure.correctness import LSE_ERROR, PEER_LSE_ERROR
from workbench.shapes import VerifyShape
from workbench.targets import HardwareTarget

MASK_LAYOUTS = ("causal", "tree", "full", "packed")  # "causal" is tree_mask=None
FLOATS = frozenset({"bf16", "fp16", "fp32"})
HALVES = frozenset({"bf16", "fp16"})


@dataclass(frozen=True)
class Variant:
    """One way to compute verify attention; the table checks what is common, the launcher the rest."""

    name: str
    backend: Literal["torch", "triton", "cuda", "peer"]
    module: str
    title: str
    min_arch: tuple[int, int] = (0, 0)
    max_arch: tuple[int, int] = (99, 9)
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    dtypes: frozenset[str] = FLOATS
    widths: tuple[int, int] | None = None  # (latent, rope); None takes any
    mask_layouts: tuple[str, ...] = MASK_LAYOUTS
    splits: bool = True  # divides the KV rows of a request over `nsplit` workers
    capturable: bool = True
    gives_lse: bool = True  # False: lse comes back as NaN
    tunables: tuple[str, ...] = ()

    @property
    def lse_bar(self) -> float:
        """Largest LSE error over max(1, |lse|) that passes."""
        return PEER_LSE_ERROR if self.backend == "peer" else LSE_ERROR

    def load(self) -> Any:
        """The launcher; `module` may name an object in a module as package.module:object."""
        module, _, name = self.module.partition(":")
        loaded = importlib.import_module(module)
        return getattr(loaded, name) if name else loaded

    def supports(self, shape: VerifyShape, target: HardwareTarget | None = None) -> str | None:
        """None when `shape` runs on `target` (default: this machine), else the reason why not."""
        target = target or targets.detect()
        return self._table_reason(shape, target) or self.load().supports(shape, target)

    def _table_reason(self, shape: VerifyShape, target: HardwareTarget) -> str | None:
        if target.backend not in self.devices:
            return f"{self.name} runs on {' and '.join(sorted(self.devices))}, not on {target.backend}"
        if target.backend == "cuda" and not self.min_arch <= target.compute_capability <= self.max_arch:
            return f"{self.name} needs {_arch_range(self)}, {target.name} is {target.arch}"
        if shape.dtype not in self.dtypes:
            return f"{self.name} takes {', '.join(sorted(self.dtypes))}, not {shape.dtype}"
        if self.widths and (shape.latent, shape.rope) != self.widths:
            latent, rope = self.widths
            return f"{self.name} takes {latent} + {rope} columns, not {shape.latent} + {shape.rope}"
        if shape.mask_layout not in self.mask_layouts:
            return f"{self.name} takes masks {', '.join(self.mask_layouts)}, not {shape.mask_layout}"
        return None


def _arch_range(variant: Variant) -> str:
    low, high = ("sm_{}{}".format(*arch) for arch in (variant.min_arch, variant.max_arch))
    return low if low == high else f"{low} or newer" if variant.max_arch == (99, 9) else f"{low} to {high}"


_TRITON_TUNABLES = ("block_m", "block_n", "num_warps", "num_stages")

_PEER: dict[str, Any] = {
    "devices": frozenset({"cuda"}), "dtypes": HALVES, "widths": (512, 64), "splits": False,
}  # fmt: skip
_TABLE = (
    Variant("reference", "torch", "workbench.attention.reference", "fp64 torch, the oracle",
            dtypes=FLOATS | {"fp64"}, splits=False, capturable=False),
    Variant("torch_split", "torch", "workbench.attention.torch_split", "split-KV in torch ops",
            devices=frozenset({"cpu"}), dtypes=FLOATS | {"fp64"}),
    Variant("triton_serial", "triton", "workbench.attention.triton_serial", "one program a prefix, no split",
            min_arch=(8, 0), splits=False, tunables=_TRITON_TUNABLES),
    Variant("triton_split", "triton", "workbench.attention.triton_split", "split-KV, heads x nodes in a tile",
            min_arch=(8, 0),
            tunables=(*_TRITON_TUNABLES, "prefetch", "partial_dtype",
                      "reduce_columns", "reduce_warps", "reduce_ahead", "pdl")),
    Variant("cuda_flash", "cuda", "workbench.attention.cuda_flash", "portable mma.sync kernel",
            min_arch=(8, 0), devices=frozenset({"cuda"}), dtypes=HALVES, widths=(512, 64),
            tunables=("block_m", "block_n", "num_stages", "min_blocks", "partial_dtype", "merge")),
    Variant("flashinfer_fa2", "peer", "workbench.attention.peers:flashinfer_fa2", "FlashInfer fa2, causal",
            min_arch=(8, 0), mask_layouts=("causal",), **_PEER),
    Variant("flashinfer_fa3", "peer", "workbench.attention.peers:flashinfer_fa3", "FlashInfer fa3, causal",
            min_arch=(9, 0), max_arch=(9, 0), mask_layouts=("causal",), **_PEER),
    Variant("flashmla", "peer", "workbench.attention.peers:flashmla", "FlashMLA dense, page 64, causal",
            min_arch=(9, 0), max_arch=(9, 0), mask_layouts=("causal",), **_PEER),
    Variant("sglang_extend", "peer", "workbench.attention.peers:sglang_extend", "SGLang extend, Triton",
            min_arch=(8, 0), gives_lse=False, **_PEER),
    Variant("torch_flex", "peer", "workbench.attention.peers:torch_flex", "FlexAttention over gathered rows",
            splits=False),
)  # fmt: skip
AUTO_ORDER = {"cpu": ("torch_split",), "cuda": ("cuda_flash", "triton_split")}


def variants() -> list[Variant]:
    """Every variant, in the order of tables and legends."""
    return list(_TABLE)


def names() -> list[str]:
    """The names `variant=` accepts besides "auto"."""
    return [variant.name for variant in _TABLE]


def find(name: str) -> Variant:
    """The variant called `name`. Raises ValueError that lists the known ones."""
    for variant in _TABLE:
        if variant.name == name:
            return variant
    raise ValueError(f"variant={name!r}: choose 'auto' or one of {', '.join(names())}")


def resolve(name: str, shape: VerifyShape, target: HardwareTarget) -> Variant:
    """The variant for a bucket; "auto" is the first of AUTO_ORDER that supports it, never a fallback."""
    if name != "auto":
        variant = find(name)
        reason = variant.supports(shape, target)
        if reason:
            raise ValueError(f"variant={name!r} cannot run this bucket: {reason}")
        return variant
    reasons = []
    for candidate in AUTO_ORDER[target.backend]:
        reason = find(candidate).supports(shape, target)
        if reason is None:
            return find(candidate)
        reasons.append(reason)
    raise ValueError(f"variant='auto' finds nothing for this bucket: {'; '.join(reasons)}")
