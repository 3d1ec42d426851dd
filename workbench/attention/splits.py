"""Tile sizes per architecture, and what nsplit="auto" means: both from the bucket and the target only."""

from dataclasses import asdict, dataclass

from workbench.shapes import DTYPE_BYTES, VerifyShape
from workbench.targets import HardwareTarget

INVARIANT_NSPLIT = 64  # batch_invariant: a request is cut the same way whatever else is in the batch
MAX_AUTO_NSPLIT = 256
# Starting values of the cost model, to be fitted to sweeps (notebook 20): what a program spends around its
# blocks, the share of the tensor peak its loop reaches, the rate at which partials are written and read back.
PROGRAM_US, TENSOR_SHARE, L2_GBPS = 4.0, 0.5, 4000.0


@dataclass(frozen=True)
class Tile:
    """block_m query rows x block_n KV rows a step, in num_warps warps, num_stages KV tiles in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Two-byte dtypes, up to 16 rows and above. Chosen by what compiles without spills in the loop and fits shared
# memory (tests/attention/test_triton_compile.py): wgmma (sm_90) takes 64 rows, mma.sync 16.
_HOPPER = {16: Tile(16, 64, 8, 3), 64: Tile(64, 64, 8, 2)}
# Other widths than 512 + 64 on sm_90 stay on mma.sync: Triton 3.6 reads past shared memory in the wgmma of a
# 128 + 32 tile (compute-sanitizer), and a padded width (576 -> 1024) does not fit beside 64 rows of q.
_HOPPER_ANY_WIDTH = {16: Tile(16, 32, 4, 2), 64: Tile(32, 32, 4, 2)}
_BLACKWELL_SM100 = {16: Tile(16, 64, 8, 3), 64: Tile(64, 64, 8, 2)}
_SMALL_SMEM = {16: Tile(16, 32, 8, 3), 64: Tile(32, 16, 8, 4)}  # 101,376 B (sm_86, sm_89, sm_120)
_AMPERE = {16: Tile(16, 32, 8, 4), 64: Tile(32, 32, 8, 3)}  # 163 KB (sm_80)
_FP32 = {16: Tile(16, 16, 4, 1), 64: Tile(16, 16, 4, 1)}  # no tensor cores in IEEE fp32: small and correct
_INTERPRETED = {16: Tile(16, 32, 1, 1), 64: Tile(64, 32, 1, 1)}  # time goes by programs, not by rows


def tile(shape: VerifyShape, target: HardwareTarget, batch_invariant: bool) -> dict[str, int]:
    """Tunables of a bucket; one tile for all row counts when batch invariant, since tiles change rounding."""
    classes = _tiles_of(shape, target)
    return asdict(classes[16 if shape.rows <= 16 and not batch_invariant else 64])


def _tiles_of(shape: VerifyShape, target: HardwareTarget) -> dict[int, Tile]:
    if target.backend == "cpu":
        return _INTERPRETED
    if DTYPE_BYTES[shape.dtype] == 4:
        return _FP32
    if target.compute_capability[0] == 9:
        return _HOPPER if (shape.latent, shape.rope) == (512, 64) else _HOPPER_ANY_WIDTH
    if target.compute_capability[0] == 10:
        return _BLACKWELL_SM100
    return _AMPERE if target.compute_capability == (8, 0) else _SMALL_SMEM


def choose(
    shape: VerifyShape, target: HardwareTarget, block_m: int, block_n: int, batch_invariant: bool
) -> int:
    """The split count with the least modelled time; ties go to fewer splits. See `modelled_us`."""
    if batch_invariant:
        return INVARIANT_NSPLIT
    if target.backend == "cpu":
        return max(1, min(4, -(-shape.max_kv_len // block_n)))
    blocks = max(1, -(-shape.max_kv_len // block_n))
    candidates = range(1, min(blocks, MAX_AUTO_NSPLIT) + 1)
    return min(candidates, key=lambda nsplit: (modelled_us(shape, target, block_m, block_n, nsplit), nsplit))


def modelled_us(shape: VerifyShape, target: HardwareTarget, block_m: int, block_n: int, nsplit: int) -> float:
    """Waves of one program per SM, each a fixed cost and its blocks, then the reduction of all partials.

    A block costs the slower of its flops at TENSOR_SHARE of an SM's peak and its bytes at an SM's share of
    DRAM bandwidth, where row tiles of the same request find each other's rows in L2.
    """
    row_tiles = max(1, -(-shape.rows // block_m))
    blocks = max(1, -(-shape.max_kv_len // block_n))
    chunk = -(-blocks // nsplit)
    active = -(-blocks // chunk)  # splits that have columns at all
    flops = 2 * block_m * block_n * (shape.width + shape.latent)
    row_bytes = shape.width * DTYPE_BYTES[shape.dtype]
    compute_us = flops / (TENSOR_SHARE * target.tensor_tflops * 1e6 / target.sm_count)
    memory_us = block_n * row_bytes / row_tiles / (target.dram_gbps * 1e3 / target.sm_count)
    waves = -(-row_tiles * shape.bs * active // target.sm_count)
    partial_bytes = 2 * shape.bs * shape.rows * active * shape.latent * DTYPE_BYTES[shape.dtype]
    return waves * (PROGRAM_US + chunk * max(compute_us, memory_us)) + partial_bytes / (L2_GBPS * 1e3)
