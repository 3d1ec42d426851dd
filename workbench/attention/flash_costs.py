"""What a cuda_flash launch costs: the model behind its tile and nsplit="auto".

Constants are least squares over the rows of tests/kernels/flash_h200.json with merge="kernel": 3 % rms, at
most 12 % off. The merge by warps costs less (0.006 us a row instead of 0.0225) and is modelled up to 38 % too
slow; with its own constants one of 39 shapes changes its tile, to one that nobody measured: left out.
Other targets take the same numbers: only the order of the candidates matters there, nothing was measured yet.
"""

from collections.abc import Iterable

from workbench.shapes import VerifyShape

# (block_m, block_n) -> one tile on an SM; more than linear in neither: each tile also waits at its barriers
TILE_US = {(64, 64): 3.43, (64, 32): 2.01, (32, 64): 2.36, (32, 32): 1.49, (16, 64): 2.2, (16, 32): 1.3}
LAUNCH_US, WAVE_US = 4.8, 4.8  # two launches and the merge's own chain; another wave's prologue and epilogue
QUERY_TILE_US = 1.5  # 64 rows of Q in, 64 rows of O out
FIRST_WIDE_TILE_US = 1.3  # the first tile of 64 tokens lands later
MERGE_ROW_US, MERGE_SPLIT_US = 0.0225, 0.06  # per query row of the batch, per split of a row
# within the model's error fewer splits (fewer partials) and more rows a tile (KV read less often) win
NEAR_TIE, NARROWER_MUST_SAVE = 0.01, 0.04


def modelled_us(shape: VerifyShape, slots: int, block_m: int, block_n: int, nsplit: int) -> float:
    """Waves of `slots` blocks, each a fixed cost and its tiles; a merge that grows with rows and splits."""
    split = -(-max(1, shape.max_kv_len) // nsplit)
    tiles = -(-split // block_n)
    live = -(-max(1, shape.max_kv_len) // (tiles * block_n))
    waves = -(-shape.bs * max(1, -(-shape.rows // block_m)) * live // slots)
    fixed = QUERY_TILE_US + (FIRST_WIDE_TILE_US if block_n == 64 else 0.0)
    merge = MERGE_ROW_US * shape.bs * shape.rows + MERGE_SPLIT_US * live if nsplit > 1 else 0.0
    tile_us = TILE_US[block_m, block_n]
    return LAUNCH_US + fixed * block_m / 64 + WAVE_US * (waves - 1) + waves * tiles * tile_us + merge


def best_nsplit(shape: VerifyShape, slots: int, block_m: int, block_n: int) -> int:
    """The fewest splits whose modelled time is the least one or close to it."""
    most = min(max(1, -(-shape.max_kv_len // block_n)), 2 * slots)
    costs = [modelled_us(shape, slots, block_m, block_n, nsplit) for nsplit in range(1, most + 1)]
    enough = min(costs) * (1 + NEAR_TIE)
    return 1 + next(i for i, us in enumerate(costs) if us <= enough)


def best_tile(shape: VerifyShape, slots: int, tiles: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The (block_m, block_n) with the least modelled time at its best nsplit; more rows win near ties."""

    def cost(tile: tuple[int, int]) -> float:
        us = modelled_us(shape, slots, *tile, best_nsplit(shape, slots, *tile))
        return us if tile[0] == widest else us * (1 + NARROWER_MUST_SAVE)

    candidates = list(tiles)
    widest = max(block_m for block_m, _ in candidates)
    return min(candidates, key=cost)
