"""Tile sizes per architecture, and what nsplit="auto" means: both from the bucket and the target only."""

from dataclasses import asdict, dataclass

from workbench.shapes import DTYPE_BYTES, VerifyShape
from workbench.targets import HardwareTarget

INVARIANT_NSPLIT = 64  # batch_invariant: a request is cut the same way whatever else is in the batch
MIN_BLOCKS_PER_SPLIT = 1


@dataclass(frozen=True)
class Tile:
    """block_m query rows x block_n KV rows a step, in num_warps warps, num_stages KV tiles in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def smem_bytes(self, width: int, dtype_bytes: int) -> int:
        """Q tile, KV tiles and weights tile: what Triton allocates for the main loop, or a little more."""
        q_bytes = self.block_m * width * dtype_bytes
        kv_bytes = self.num_stages * self.block_n * width * dtype_bytes
        return q_bytes + kv_bytes + self.block_m * self.block_n * dtype_bytes


# Two-byte dtypes, by (shared memory per block, row classes). wgmma (sm_90) takes 64 rows; mma.sync takes 16.
_HOPPER = {16: Tile(16, 64, 8, 3), 64: Tile(64, 64, 8, 2)}
_BLACKWELL_SM100 = {16: Tile(16, 64, 8, 3), 64: Tile(64, 64, 8, 2)}
_SMALL_SMEM = {16: Tile(16, 32, 4, 2), 64: Tile(32, 16, 8, 3)}  # 101,376 B (sm_86, sm_89, sm_120)
_AMPERE = {16: Tile(16, 32, 4, 3), 64: Tile(64, 32, 8, 2)}  # 163 KB (sm_80)
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
        return _HOPPER
    if target.compute_capability[0] == 10:
        return _BLACKWELL_SM100
    return _AMPERE if target.compute_capability == (8, 0) else _SMALL_SMEM


def choose(
    shape: VerifyShape, target: HardwareTarget, block_m: int, block_n: int, batch_invariant: bool
) -> int:
    """Splits that fill the SMs once: row tiles x splits x requests close to, and not above, the SM count."""
    if batch_invariant:
        return INVARIANT_NSPLIT
    blocks = -(-shape.max_kv_len // block_n)
    row_tiles = max(1, -(-shape.rows // block_m))
    slots = max(target.sm_count, 4)
    return max(1, min(slots // (row_tiles * shape.bs), blocks // MIN_BLOCKS_PER_SPLIT, 256))
