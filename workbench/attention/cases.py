"""What a verify-attention variant must get right: a case dataclass, a pairwise sample, a corner list."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from workbench.shapes import VerifyShape

Combination = dict[str, Any]


@dataclass(frozen=True)
class AttentionCase:
    """One input of verify_attention, drawn from `seed`; kv_lens count the draft rows too."""

    q_lens: tuple[int, ...] = (4,)
    kv_lens: tuple[int, ...] = (64,)
    heads: int = 8
    dtype: str = "fp32"
    latent: int = 64
    rope: int = 16
    nsplit: int | str = "auto"
    mask: str = "tree"  # causal | tree | full | packed: the layout
    tree: str = "random"  # random | dag | chain | star | ones | none: who sees whom among the draft rows
    indices: str = "random"  # contiguous | random | reversed | repeated
    index_dtype: str = "int32"
    form: str = "listed"  # listed | slots: draft rows at the end of kv_indices, or in draft_slots
    view: str = "contiguous"  # contiguous | wide | odd | transposed: strides of q and kv
    padding_requests: int = 0  # repeat the last indptr
    padding_rows: int = 0  # rows of q behind the last request, NaN
    slack: int = 0  # what the bucket holds beyond the longest request
    kv_row_stride: int = 0  # elements; large ones push offsets past 2^31
    q_row_stride: int = 0
    sm_scale: float = 0.07
    name: str = ""
    seed: int = 0

    @property
    def bs(self) -> int:
        return len(self.q_lens) + self.padding_requests

    @property
    def shape(self) -> VerifyShape:
        """The bucket: maxima of this case plus `slack`."""
        return VerifyShape(
            self.bs, self.heads, max(self.q_lens) + self.slack, max(self.kv_lens) + self.slack, self.dtype,
            self.latent, self.rope, self.index_dtype, self.mask,
        )  # fmt: skip

    def __str__(self) -> str:
        return self.name or (
            f"q{'.'.join(map(str, self.q_lens))}-kv{'.'.join(map(str, self.kv_lens))}-h{self.heads}"
            f"-{self.dtype}-{self.latent}+{self.rope}-s{self.nsplit}-{self.mask}-{self.tree}-{self.indices}"
            f"-{self.index_dtype}-{self.form}-{self.view}"
        )


# Lengths a request may take; "ragged" and "gaps" (q_len 0 inside the batch) draw one per request.
Q_PATTERNS = {"one": (1,), "four": (4,), "sixteen": (16,), "sixtyfive": (65,), "ragged": (1, 2, 3, 7, 16, 33)}
INTERPRETER_AXES = {
    "heads": (1, 8, 12, 16), "bs": (1, 2, 3, 8), "kv_len": (1, 63, 64, 65, 256, "mixed"),
}  # fmt: skip
GPU_AXES = {
    "heads": (1, 8, 12, 16, 64, 128), "bs": (1, 2, 5, 8), "kv_len": (1, 63, 64, 65, 4096, 46080, "mixed"),
}  # fmt: skip
SHARED_AXES = {
    "q": (*Q_PATTERNS, "gaps"), "nsplit": (1, 2, 7, 16, 128, "auto"), "mask": ("causal", "tree", "full",
    "packed"), "tree": ("random", "dag", "chain", "star", "ones", "none"),
    "indices": ("contiguous", "random", "reversed", "repeated"), "index_dtype": ("int32", "int64"),
    "form": ("listed", "slots"), "view": ("contiguous", "wide", "odd", "transposed"), "slack": (0, 37),
    "padding": (0, 3),
}  # fmt: skip
MLA_WIDTHS, SMALL_WIDTHS = ((512, 64),), ((64, 16), (32, 0), (20, 12), (512, 64))


def interpreter_cases(seed: int = 0, limit_programs: int = 120) -> list[AttentionCase]:
    """Pairwise sample for Triton's interpreter, which takes about a millisecond per program of a grid."""
    axes = INTERPRETER_AXES | SHARED_AXES | {"dtype": ("bf16", "fp16", "fp32"), "widths": SMALL_WIDTHS}
    return pairwise_cases(axes, seed, lambda case: _programs(case) <= limit_programs)


def _programs(case: AttentionCase) -> int:
    """Programs of the split and reduce grids, with the interpreter's 64-row tiles."""
    tiles, nsplit = -(-case.shape.rows // 64), case.nsplit if isinstance(case.nsplit, int) else 4
    reduced = (sum(case.q_lens) + case.padding_rows) * case.heads * -(-case.latent // 128)
    return tiles * nsplit * case.bs + reduced


def gpu_cases(
    seed: int = 0,
    dtypes: tuple[str, ...] = ("bf16", "fp16"),
    widths: tuple[tuple[int, int], ...] = MLA_WIDTHS,
) -> list[AttentionCase]:
    """Pairwise sample of the full axes, bounded so that the fp64 oracle takes seconds a case on a GPU."""
    axes = GPU_AXES | SHARED_AXES | {"dtype": dtypes, "widths": widths}
    return pairwise_cases(axes, seed, lambda c: sum(c.q_lens) * max(c.kv_lens) * c.heads <= 3e9)


def pairwise_cases(
    axes: dict[str, tuple[Any, ...]], seed: int, allowed: Callable[[AttentionCase], bool]
) -> list[AttentionCase]:
    """Cases that cover every pair of axis values that `allowed` leaves reachable, greedily, few per pair."""
    draw = random.Random(seed)
    left = {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(axes, 2)
        for x in axes[a]
        for y in axes[b]
    }
    cases: list[AttentionCase] = []
    for wanted in sorted(left, key=lambda pair: sorted(map(str, pair))):
        if wanted not in left:
            continue
        candidates = [
            {axis: draw.choice(values) for axis, values in axes.items()} | dict(wanted) for _ in range(40)
        ]
        built = [(c, _case_of(c, seed * 10_000 + len(cases))) for c in candidates]
        usable = [(len(left & _pairs(c)), i) for i, (c, case) in enumerate(built) if allowed(case)]
        if usable:
            chosen = built[max(usable)[1]]
            left -= _pairs(chosen[0])
            cases.append(chosen[1])
    return cases


def _pairs(combination: Combination) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in itertools.combinations(combination.items(), 2)}


def _case_of(values: Combination, seed: int) -> AttentionCase:
    draw = random.Random(seed)
    bs = values["bs"]
    if values["q"] == "gaps":
        q_lens = [draw.choice((0, 1, 5)) for _ in range(bs)]
    else:
        q_lens = [draw.choice(Q_PATTERNS[values["q"]]) for _ in range(bs)]
    mixed = (1, 17, 64, 200)
    kv_lens = [draw.choice(mixed) if values["kv_len"] == "mixed" else values["kv_len"] for _ in range(bs)]
    latent, rope = values["widths"]
    same = ("heads", "dtype", "nsplit", "mask", "tree", "indices", "index_dtype", "form", "view", "slack")
    return AttentionCase(
        tuple(q_lens), tuple(max(q, kv) for q, kv in zip(q_lens, kv_lens)), latent=latent, rope=rope,
        seed=seed, padding_requests=values["padding"], padding_rows=2 * values["padding"], **{k: values[k]
        for k in same},
    )  # fmt: skip


def corner_cases(dtype: str = "fp32", latent: int = 64, rope: int = 16) -> list[AttentionCase]:
    """Small inputs that broke other kernels (B numbers: public bugs, listed in tests/attention/README.md)."""
    base = AttentionCase(dtype=dtype, latent=latent, rope=rope, nsplit=4)
    big = 1 << 25  # 65 rows of this stride reach past 2^31 elements
    corners = [
        replace(base, name="B1-pool-past-2^31", q_lens=(3,), kv_lens=(70,), kv_row_stride=big),
        replace(base, name="B2-pool-past-2^31-slots", q_lens=(3,), kv_lens=(70,), kv_row_stride=big,
        form="slots"), replace(base, name="B4-queries-past-2^31", q_lens=(70,), kv_lens=(80,), heads=2,
        q_row_stride=big), replace(base, name="B6-empty-requests", q_lens=(0, 5, 0), kv_lens=(0, 9, 0),
        padding_rows=2), replace(base, name="B6-prefix-without-queries", q_lens=(0, 2, 0), kv_lens=(40, 9,
        7)), replace(base, name="B7-more-splits-than-tokens", q_lens=(1,), kv_lens=(1,), nsplit=16),
        replace(base, name="B7-every-split-hidden", q_lens=(3,), kv_lens=(3,), tree="none", nsplit=16),
        replace(base, name="B8-padded-batch", q_lens=(2, 3, 1, 4, 2), kv_lens=(9, 30, 1, 64, 65),
                padding_requests=3, padding_rows=9),
        replace(base, name="B10-slot-0-in-use", q_lens=(2,), kv_lens=(20,), indices="contiguous",
        padding_requests=1), replace(base, name="no-rope", q_lens=(5,), kv_lens=(33,), latent=latent + rope,
        rope=0), replace(base, name="draft-only-dag", q_lens=(65,), kv_lens=(65,), heads=3, tree="dag"),
        replace(base, name="draft-only-slots", q_lens=(7, 1), kv_lens=(7, 1), form="slots", tree="dag"),
        replace(base, name="hidden-rows-full-mask", q_lens=(6,), kv_lens=(50,), mask="full", tree="none"),
        replace(base, name="bits-beyond-the-tree", q_lens=(1, 5, 33), kv_lens=(20, 20, 40), mask="packed"),
        replace(base, name="peaked-scores", q_lens=(4,), kv_lens=(130,), sm_scale=2.0),
        replace(base, name="negative-scale", q_lens=(4,), kv_lens=(130,), sm_scale=-0.1),
        replace(base, name="every-row-twice", q_lens=(4,), kv_lens=(130,), indices="repeated"),
        replace(base, name="one-query-one-head", q_lens=(1,), kv_lens=(100,), heads=1, mask="causal"),
    ]  # fmt: skip
    return corners
