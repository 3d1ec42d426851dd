"""What a cuda_flash launch costs: the model behind its tile and nsplit="auto".

Constants are least squares: tiles and the merge by kernel over the 180 rows of tests/kernels/flash_h200.json
with merge="kernel" (2.9 % rms, at most 11 % off); the merge by warps, with those tiles, over the rows of more
than one split: 93 of that file and 375 of data/reference/h200/splits.parquet (4.8 % rms, at most 24 % off).
The merge by kernel was not fitted to splits.parquet: its 30 rows there, of two shapes with one node, come out
12.6 % rms and at most 19 % off, 28 of them modelled too slow.

Tiles are chosen as if the merge were by kernel: with the constants of warps one of both files' 59 shapes
changes its tile, to one that was not timed with that merge. Other targets take the same numbers: only the
order of the candidates matters there, nothing was measured yet.
"""

from collections.abc import Iterable

from workbench.shapes import VerifyShape

# (block_m, block_n) -> one tile on an SM; more than linear in neither: each tile also waits at its barriers
TILE_US = {(64, 64): 3.43, (64, 32): 2.01, (32, 64): 2.36, (32, 32): 1.49, (16, 64): 2.2, (16, 32): 1.3}
LAUNCH_US, WAVE_US = 4.8, 4.8  # two launches and the merge's own chain; another wave's prologue and epilogue
QUERY_TILE_US = 1.5  # 64 rows of Q in, 64 rows of O out
FIRST_WIDE_TILE_US = 1.3  # the first tile of 64 tokens lands later
# merge -> per query row of the batch, per split of a row, per split of each row
MERGE_US = {"kernel": (0.0225, 0.06, 0.0), "warps": (0.0017, 0.041, 0.00037)}
# within the model's error fewer splits (fewer partials) and more rows a tile (KV read less often) win
NEAR_TIE, NARROWER_MUST_SAVE = 0.005, 0.04


def modelled_us(shape: VerifyShape, slots: int, block_m: int, block_n: int, nsplit: int, merge: str) -> float:
    """Waves of `slots` blocks, each a fixed cost and its tiles; a merge that grows with rows and splits."""
    split = -(-max(1, shape.max_kv_len) // nsplit)
    tiles = -(-split // block_n)
    live = -(-max(1, shape.max_kv_len) // (tiles * block_n))
    waves = -(-shape.bs * max(1, -(-shape.rows // block_m)) * live // slots)
    fixed = QUERY_TILE_US + (FIRST_WIDE_TILE_US if block_n == 64 else 0.0)
    main = (
        LAUNCH_US + fixed * block_m / 64 + WAVE_US * (waves - 1) + waves * tiles * TILE_US[block_m, block_n]
    )
    return main + (merge_us(shape.bs * shape.rows, live, merge) if nsplit > 1 else 0.0)


def merge_us(rows: int, live: int, merge: str) -> float:
    """Adding up `live` splits of `rows` query rows; a fused merge counts as the one by kernel."""
    per_row, per_split, per_cell = MERGE_US.get(merge, MERGE_US["kernel"])
    return per_row * rows + per_split * live + per_cell * rows * live


def best_nsplit(shape: VerifyShape, slots: int, block_m: int, block_n: int, merge: str) -> int:
    """The fewest splits whose modelled time is the least one or close to it."""
    most = min(max(1, -(-shape.max_kv_len // block_n)), 2 * slots)
    costs = [modelled_us(shape, slots, block_m, block_n, nsplit, merge) for nsplit in range(1, most + 1)]
    enough = min(costs) * (1 + NEAR_TIE)
    return 1 + next(i for i, us in enumerate(costs) if us <= enough)


def best_tile(shape: VerifyShape, slots: int, tiles: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The (block_m, block_n) with the least modelled time at its best nsplit; more rows win near ties."""

    def cost(tile: tuple[int, int]) -> float:
        us = modelled_us(shape, slots, *tile, best_nsplit(shape, slots, *tile, "kernel"), "kernel")
        return us if tile[0] == widest else us * (1 + NARROWER_MUST_SAVE)

    candidates = list(tiles)
    widest = max(block_m for block_m, _ in candidates)
    return min(candidates, key=cost)
