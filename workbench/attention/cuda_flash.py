"""Launcher of kernels/verify_attn_flash.cu: mma.sync verify attention that fits the blocks of sm_120."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from workbench.attention import build, flash_costs
from workbench.attention.plan import DTYPES, VerifyCall, VerifyPlan
from workbench.attention.splits import INVARIANT_NSPLIT
from workbench.shapes import VerifyShape
from workbench.targets import HardwareTarget

SOURCE = build.KERNELS_DIR / "verify_attn_flash.cu"
KERNEL = "verify_attn_flash"
MERGE_KERNELS = {"kernel": "verify_attn_flash_merge", "warps": "verify_attn_flash_merge_warps"}
THREADS, LATENT, ROW_BYTES = 256, 512, 1152
LOG2E = 1.4426950408889634
MASK_CODES = {"causal": 0, "tree": 1, "full": 2, "packed": 3}
MERGES = (*MERGE_KERNELS, "fused")
PARTIAL_DTYPES = ("same", "fp32")
STATIC_SMEM_BYTES = 128
FEW_ROWS = (
    16  # of a request; 8 rows, 46k on an H200: 24.7 us by kernel, 26.3 by warps; 128 rows: no difference
)


@dataclass(frozen=True)
class Config:
    """Compile-time choices of the kernel."""

    block_m: int = 64
    block_n: int = 32
    num_stages: int = 2
    min_blocks: int = 1
    partial_dtype: str = "same"
    merge: str = "kernel"
    dtype: str = "bf16"
    aligned: bool = True
    dump_scores: bool = False

    @property
    def shared_bytes(self) -> int:
        """Dynamic: KV stages, score exchange, softmax state, scales. The source asserts the same sum."""
        owners = self.block_m // 8
        sources = 3 if self.block_m == 64 else 4
        exchange = sources * owners * (self.block_n // 16) * 512
        return self.num_stages * self.block_n * ROW_BYTES + exchange + owners * 32 * 8 + 256

    @property
    def flags(self) -> tuple[str, ...]:
        """Macro definitions of this configuration."""
        values = {
            "M_TILE": self.block_m,
            "TOKENS": self.block_n,
            "STAGES": self.num_stages,
            "MIN_BLOCKS": self.min_blocks,
            "IS_BF16": int(self.dtype == "bf16"),
            "PARTIAL_F32": int(self.partial_dtype == "fp32"),
            "FUSED_MERGE": int(self.merge == "fused"),
            "ALIGNED": int(self.aligned),
            "DUMP_SCORES": int(self.dump_scores),
            "SHARED_BYTES": self.shared_bytes,
        }
        return tuple(f"-D{name}={value}" for name, value in values.items())


def supports(shape: VerifyShape, target: HardwareTarget) -> str | None:
    """Why this machine cannot run the bucket, or None."""
    if find_spec("cupy") is None:
        return "cuda_flash compiles through CuPy, which is not installed: pip install cupy-cuda13x"
    need = Config().shared_bytes + STATIC_SMEM_BYTES
    if target.smem_per_block_bytes < need:
        return f"cuda_flash needs {need} B of shared memory, {target.name} has {target.smem_per_block_bytes}"
    return None


def default_tunables(shape: VerifyShape, target: HardwareTarget, batch_invariant: bool) -> dict[str, Any]:
    """The tile with the least modelled time; batch-invariant always the widest: tiles round apart.

    Merge by warps unless a request has few rows: a block per row then adds many splits sooner.
    64 KV rows a stage where shared memory holds two of them, else 32 with as many stages as fit, 4 at most;
    64 x 64 on sm_90 only: it spills elsewhere.
    """
    few_rows = shape.rows <= FEW_ROWS and not batch_invariant
    merge = "kernel" if few_rows else "warps"
    rest: dict[str, Any] = {"min_blocks": 1, "partial_dtype": "same", "merge": merge}
    fitting = {}
    for block_m, block_n in flash_costs.TILE_US:
        tile = rest | {"block_m": block_m, "block_n": block_n}
        stages = [
            n for n in (4, 3, 2) if _smem_bytes(tile | {"num_stages": n}) <= target.smem_per_block_bytes
        ]
        if stages and (block_m * block_n < 64 * 64 or target.compute_capability[0] == 9):
            fitting[block_m, block_n] = stages[0]
    whole = min((m for m in (16, 32, 64) if shape.rows <= m), default=64)  # the smallest that holds all rows
    rows = {64} if batch_invariant else {whole, min(whole, 32)}
    candidates = [tile for tile in fitting if tile[0] in rows]
    best = flash_costs.best_tile(shape, target.sm_count, candidates)
    block_m, block_n = (64, max(n for _, n in candidates)) if batch_invariant else best
    return rest | {"block_m": block_m, "block_n": block_n, "num_stages": fitting[block_m, block_n]}


def _smem_bytes(tunables: dict[str, Any]) -> int:
    return Config(**tunables).shared_bytes + STATIC_SMEM_BYTES


def choose_nsplit(
    shape: VerifyShape, target: HardwareTarget, tunables: dict[str, Any], batch_invariant: bool
) -> int:
    """The split count with the least modelled time, see `flash_costs`."""
    if batch_invariant:
        return INVARIANT_NSPLIT
    slots = target.sm_count * tunables["min_blocks"]
    return flash_costs.best_nsplit(shape, slots, tunables["block_m"], tunables["block_n"], tunables["merge"])


def workspaces(
    shape: VerifyShape, nsplit: int, tunables: dict[str, Any]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Partial outputs and LSE (a row's splits lie together), and the counters of the fused merge."""
    _check_tunables(tunables)
    rows = max(shape.rows, 1)
    splits = nsplit if nsplit > 1 else 0
    dtype = torch.float32 if tunables["partial_dtype"] == "fp32" else DTYPES[shape.dtype]
    return {
        "partial_out": ((shape.bs, rows, splits, LATENT), dtype),
        "partial_lse": ((shape.bs, rows, splits), torch.float32),
        "arrivals": ((shape.bs, -(-rows // 16)), torch.int32),
    }


def _check_tunables(tunables: dict[str, Any]) -> None:
    allowed = {
        "block_m": (16, 32, 64), "block_n": (32, 64), "num_stages": (2, 3, 4, 5, 6), "min_blocks": (1, 2, 3),
        "partial_dtype": PARTIAL_DTYPES, "merge": MERGES,
    }  # fmt: skip
    for name, values in allowed.items():
        if tunables[name] not in values:
            raise ValueError(f"{name}={tunables[name]!r}: cuda_flash takes {', '.join(map(str, values))}")


def launch(plan: VerifyPlan, call: VerifyCall) -> None:
    """Attention over (row tiles, nsplit, bs) blocks, then the merge, unless fused or with one split."""
    if call.out.numel() == 0:
        return
    _check_output(call)
    with torch.cuda.device(call.q.device), _current_stream(call.q.device):
        attention, config = _attention_kernel(plan, _is_aligned(call))
        _run(attention, config, plan, call, 0, 0)
        if plan.nsplit > 1 and config.merge != "fused":
            grid, arguments = _merge_launch(plan, call)
            plan.state["merge"](grid, (THREADS,), arguments)


def prepare(plan: VerifyPlan) -> None:
    """Compile and load what `plan` launches on aligned tensors: its first call can already be captured."""
    with torch.cuda.device(plan.device):
        _attention_kernel(plan, aligned=True)


def dump_scores(plan: VerifyPlan, call: VerifyCall) -> torch.Tensor:
    """Debug: the softmax's input, scaled to base 2 and masked; [bs, rows, kv], NaN where never written."""
    rows, width = plan.shape.rows, plan.shape.max_kv_len
    scores = torch.full((plan.shape.bs, rows, width), torch.nan, device=call.q.device)
    with torch.cuda.device(call.q.device), _current_stream(call.q.device):
        config = replace(_config(plan, _is_aligned(call)), dump_scores=True)
        attention = _load(plan, config, KERNEL)
        _run(attention, config, plan, call, scores.data_ptr(), width)
    return scores


def _check_output(call: VerifyCall) -> None:
    if call.out.data_ptr() % 16:
        raise ValueError(
            "out does not start at a multiple of 16 bytes: pass a tensor of its own, not a slice"
        )


def _run(
    attention: Any, config: Config, plan: VerifyPlan, call: VerifyCall, scores: int, scores_width: int
) -> None:
    row_tiles = max(1, -(-plan.shape.rows // config.block_m))
    arguments = _arguments(plan, call, scores, scores_width)
    attention((row_tiles, plan.nsplit, call.bs), (THREADS,), arguments, shared_mem=config.shared_bytes)


def _config(plan: VerifyPlan, aligned: bool) -> Config:
    config = Config(**plan.tunables, dtype=plan.shape.dtype, aligned=aligned)
    # element-wise copies need registers that a tile of 64 rows does not leave
    return config if aligned else replace(config, block_m=min(config.block_m, 32))


def _attention_kernel(plan: VerifyPlan, aligned: bool) -> tuple[Any, Config]:
    """The loaded kernel and its configuration; compiled the first time a plan needs it."""
    name = "aligned" if aligned else "unaligned"
    if name not in plan.state:
        config = _config(plan, aligned)
        _check_fits(plan, config)
        plan.workspaces["arrivals"].zero_()  # every launch leaves them zero
        if config.merge != "fused":
            plan.state.setdefault("merge", _load(plan, config, MERGE_KERNELS[config.merge]))
        plan.state[name] = (_load(plan, config, KERNEL), config)
    return plan.state[name]


def _load(plan: VerifyPlan, config: Config, kernel: str) -> Any:
    cubin = build.compile_cubin(SOURCE, config.flags, plan.target.arch)
    if kernel != KERNEL:
        return build.load(cubin, kernel)
    fused = config.merge == "fused" and plan.nsplit > 1
    return build.load(cubin, kernel, shared_bytes=config.shared_bytes, cooperative=fused)


def _check_fits(plan: VerifyPlan, config: Config) -> None:
    need, limit = config.shared_bytes + STATIC_SMEM_BYTES, plan.target.smem_per_block_bytes
    if need > limit:
        raise ValueError(
            f"block_n={config.block_n}, num_stages={config.num_stages} need {need} B of shared memory,"
            f" {plan.target.name} has {limit}: lower num_stages"
        )
    blocks = max(1, -(-plan.shape.rows // config.block_m)) * plan.nsplit * plan.shape.bs
    slots = plan.target.sm_count * config.min_blocks
    if config.merge == "fused" and plan.nsplit > 1 and blocks > slots:
        raise ValueError(
            f"merge='fused' needs all {blocks} blocks resident, {plan.target.name} holds {slots}: lower"
            f" nsplit to {max(1, plan.nsplit * slots // blocks)} or use merge='kernel'"
        )


def _is_aligned(call: VerifyCall) -> bool:
    """Rows of q and kv start at multiples of 16 bytes; a host-side property of the views, not of contents."""
    strides = (*call.q.stride()[:2], call.kv.stride(0))
    return all(s % 8 == 0 for s in strides) and (call.q.data_ptr() | call.kv.data_ptr()) % 16 == 0


def _current_stream(device: torch.device) -> Any:
    import cupy

    stream = torch.cuda.current_stream(device)
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(stream)
    return cupy.cuda.ExternalStream(stream.cuda_stream, device.index or 0)  # CuPy before 14


def _arguments(plan: VerifyPlan, call: VerifyCall, scores: int, scores_width: int) -> tuple[Any, ...]:
    """In the kernel's order: 64-bit pointers and strides, 32-bit counts."""
    from numpy import float32, int32, int64

    pools, draft_slots, mask = plan.workspaces, call.draft_slots, call.tree_mask
    words = mask.shape[1] if mask is not None and call.mask_layout == "packed" else 0
    rows, heads, _ = call.q.shape
    return (
        call.q.data_ptr(), int64(call.q.stride(0)), int64(call.q.stride(1)),
        call.kv.data_ptr(), int64(call.kv.stride(0)), call.qo_indptr.data_ptr(), call.kv_indptr.data_ptr(),
        call.kv_indices.data_ptr(), int32(call.kv_indices.dtype == torch.int64),
        0 if draft_slots is None else draft_slots.data_ptr(),
        int32(draft_slots is not None and draft_slots.dtype == torch.int64), int32(draft_slots is not None),
        0 if mask is None else mask.data_ptr(), int32(MASK_CODES[call.mask_layout]), int32(words),
        int32(heads), int32(plan.shape.rows), int32(rows), float32(call.sm_scale * LOG2E),
        call.out.data_ptr(), call.lse.data_ptr(), pools["partial_out"].data_ptr(),
        pools["partial_lse"].data_ptr(), pools["arrivals"].data_ptr(), scores, int32(scores_width),
    )  # fmt: skip


def merge_groups(nsplit: int) -> int:
    """Warps of merge="warps" that share half a row: 6 splits each, all in flight, unless 8 are too few."""
    return next((groups for groups in (1, 2, 4) if nsplit <= 6 * groups), 8)


def _merge_launch(plan: VerifyPlan, call: VerifyCall) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Grid and arguments of the merge kernel this plan uses."""
    from numpy import int32

    pools, rows = plan.workspaces, call.q.shape[0] * plan.shape.heads
    arguments = (
        call.qo_indptr.data_ptr(), call.kv_indptr.data_ptr(), int32(call.draft_slots is not None),
        int32(call.bs), int32(plan.shape.heads), int32(plan.shape.rows), int32(plan.nsplit),
        call.out.data_ptr(), call.lse.data_ptr(), pools["partial_out"].data_ptr(),
        pools["partial_lse"].data_ptr(),
    )  # fmt: skip
    if plan.tunables["merge"] == "kernel":
        return (rows, 4), arguments
    groups = merge_groups(plan.nsplit)
    return (-(-2 * rows * groups // 8),), (*arguments, int32(rows), int32(groups))
