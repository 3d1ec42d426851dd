"""DDTree for a batch in four Triton kernels: no host sync, fixed shapes, capturable.

1. `_scan_kernel` reads the logits once: maximum of every group of G neighbours, and partial
   log-normalisers.
2. `_rank_kernel`, one program a slot: the K best tokens lie in the K groups of greatest maximum (ties:
   smaller group, hence smaller token, first), so it sorts the group maxima, reads those K groups again and
   sorts their tokens.
3. `_select_kernel`, one program a request: depth by depth the best prefixes, as in `ddtree_torch`.
4. `_link_kernel`: ancestors, first children, next siblings.

Least time: reading the logits once. Keys carry the index below the value, so equal values are settled as on
the host.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.tree.buffers import TreeBuffers
from workbench.tree.ddtree_torch import TRITON_MAX_BUDGET, pair_table

GROUPS_PER_PROGRAM = 128
LINK_ROWS = 16


@triton.jit
def _pack(value, index):
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _unpack_value(key):
    ordered = (key >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _unpack_index(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _pack_narrow(value, index, dtype: tl.constexpr):
    """int32 key of a value that a 16-bit type holds exactly and an index below 65,536: half the work of a
    sort."""
    bits = tl.where(value == 0.0, 0.0, value).to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
    ordered = bits ^ ((bits >> 15) & 0x7FFF)
    return (ordered << 16) | (0xFFFF - index)


@triton.jit
def _unpack_narrow_value(key, dtype: tl.constexpr):
    ordered = key >> 16
    bits = ordered ^ ((ordered >> 15) & 0x7FFF)
    return bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _scan_kernel(
    logits, group_max, partial, vocab, groups, stride_b, stride_l, slots,
    G: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """partial [rows, programs, 2]: (maximum, sum of exp(x - maximum)) of each program's M groups."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    base = logits + (row // slots).to(tl.int64) * stride_b + (row % slots).to(tl.int64) * stride_l
    group = chunk * M + tl.arange(0, M)
    token = group[:, None] * G + tl.arange(0, G)[None, :]
    x = tl.load(base + token, mask=token < vocab, other=float("-inf")).to(tl.float32)  # [M, G]
    top = tl.max(x, 1)
    tl.store(group_max + row * groups + group, top, mask=group < groups)
    peak = tl.max(top, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.sum(tl.exp(x - shift), 1), 0)
    out = partial + (row * tl.num_programs(1) + chunk) * 2
    tl.store(out, peak)
    tl.store(out + 1, total)


@triton.jit
def _rank_kernel(
    logits, group_max, partial, log_probs, tokens, row_bad,
    vocab, groups, chunks, stride_b, stride_l, slots, k,
    G: tl.constexpr, GROUPS: tl.constexpr, KG: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """log_probs, tokens [rows, K] sorted; entries at and behind k are -inf."""
    row = tl.program_id(0)
    part = tl.arange(0, CHUNKS)
    held = part < chunks
    peaks = tl.load(partial + (row * chunks + part) * 2, mask=held, other=float("-inf"))
    totals = tl.load(partial + (row * chunks + part) * 2 + 1, mask=held, other=0.0)
    peak = tl.max(peaks, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(totals * tl.exp(tl.where(peaks == float("-inf"), 0.0, peaks) - shift), 0)
    lse = shift + tl.log(total)

    group = tl.arange(0, GROUPS)
    top = tl.load(group_max + row * groups + group, mask=group < groups, other=float("-inf"))
    dtype: tl.constexpr = logits.dtype.element_ty
    if NARROW:  # a token is named by its place in the tile, so groups go back into order
        best = tl.sort(0xFFFF - (tl.topk(_pack_narrow(top, group, dtype), KG) & 0xFFFF))  # [KG]
    else:
        best = _unpack_index(tl.topk(_pack(top, group), KG))
    token = best[:, None] * G + tl.arange(0, G)[None, :]  # [KG, G]
    base = logits + (row // slots).to(tl.int64) * stride_b + (row % slots).to(tl.int64) * stride_l
    x = tl.load(base + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    if NARROW:
        place = tl.arange(0, KG * G)
        keys = tl.topk(_pack_narrow(tl.reshape(x, KG * G), place, dtype), K)  # [K]
        place = 0xFFFF - (keys & 0xFFFF)
        value = _unpack_narrow_value(keys, dtype)
        winner = tl.gather(best, place // G, 0) * G + place % G
    else:
        keys = tl.topk(tl.reshape(_pack(x, token), KG * G), K)
        value = _unpack_value(keys)
        winner = _unpack_index(keys)
    rank = tl.arange(0, K)
    lse = tl.zeros([K], tl.float32) + lse
    bad = (lse != lse) | (lse == float("inf"))
    dead = bad | (value == float("-inf")) | (rank >= k)
    tl.store(log_probs + row * K + rank, tl.where(dead, float("-inf"), value - tl.where(dead, 0.0, lse)))
    tl.store(tokens + row * K + rank, tl.where(dead, 0, winner))
    tl.store(row_bad + row, tl.max(bad.to(tl.int32), 0))


@triton.jit
def _select_kernel(
    log_probs, tokens, row_bad, pair_first, pair_second, roots, limits,
    out_tokens, out_depths, out_parents, out_log_probs, out_num_nodes, out_nan_slot,
    pairs, budget, width, floor,
    HAS_ROOTS: tl.constexpr, HAS_LIMITS: tl.constexpr, SLOTS: tl.constexpr, LEVELS: tl.constexpr,
    K: tl.constexpr, B: tl.constexpr, PAIRS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One request. Levels are held as [LEVELS, B] in registers; level d holds prefixes of depth d + 1."""
    b = tl.program_id(0)
    limit = SLOTS
    if HAS_LIMITS:
        limit = tl.minimum(SLOTS, tl.load(limits + b) - 1)
    pair = tl.arange(0, PAIRS)
    first = tl.load(pair_first + pair, mask=pair < pairs, other=0)
    second = tl.load(pair_second + pair, mask=pair < pairs, other=0)
    position = tl.arange(0, B)
    base = log_probs + b * SLOTS * K
    level = tl.load(base + position, mask=(position < K) & (position * 0 < limit), other=float("-inf"))
    row = tl.arange(0, LEVELS)[:, None]
    weights = tl.where(row == 0, level[None, :], float("-inf"))  # [LEVELS, B]
    above = tl.zeros([LEVELS, B], tl.int32)
    ranks = tl.where(row == 0, position[None, :], 0)
    for d in range(1, SLOTS):
        step = tl.load(
            base + d * K + second, mask=(pair < pairs) & (pair * 0 + d < limit), other=float("-inf")
        )
        keys = tl.topk(_pack(tl.gather(level, first, 0) + step, pair), B)
        level = _unpack_value(keys)
        chosen = _unpack_index(keys)
        weights = tl.where(row == d, level[None, :], weights)
        above = tl.where(row == d, tl.load(pair_first + chosen, mask=chosen < pairs, other=0)[None, :], above)
        ranks = tl.where(
            row == d, tl.load(pair_second + chosen, mask=chosen < pairs, other=0)[None, :], ranks
        )
    entry = tl.arange(0, LEVELS * B)
    # an entry's index is its depth first: shallower first where weights are equal
    keys = tl.topk(_pack(tl.reshape(weights, LEVELS * B), entry), B)
    weight = _unpack_value(keys)
    chosen = _unpack_index(keys)
    depth = chosen // B
    rank = tl.gather(tl.reshape(ranks, LEVELS * B), chosen, 0)
    parent_entry = (depth - 1) * B + tl.gather(tl.reshape(above, LEVELS * B), chosen, 0)
    is_parent = (chosen[None, :] == parent_entry[:, None]) & (depth[:, None] > 0)
    parent = tl.sum(tl.where(is_parent, position[None, :] + 1, 0), 1)

    live = (weight > float("-inf")) & (weight >= floor) & (position < budget)
    token = tl.load(tokens + (b * SLOTS + depth) * K + rank, mask=live, other=0)
    column = b * width + 1 + position
    inside = position + 1 < width
    tl.store(out_tokens + column, tl.where(live, token, 0).to(tl.int64), mask=inside)
    tl.store(out_depths + column, tl.where(live, depth + 1, 0), mask=inside)
    tl.store(out_parents + column, tl.where(live, parent, -1), mask=inside)
    tl.store(out_log_probs + column, tl.where(live, weight, float("-inf")), mask=inside)
    tl.store(out_num_nodes + b, tl.sum(live.to(tl.int32), 0) + 1)

    behind = tl.arange(0, N)
    unused = (behind > B) & (behind < width)
    tl.store(out_tokens + b * width + behind, tl.zeros([N], tl.int64), mask=unused)
    fixed = unused | (behind == 0)
    tl.store(out_depths + b * width + behind, tl.zeros([N], tl.int32), mask=fixed)
    tl.store(out_parents + b * width + behind, tl.full([N], -1, tl.int32), mask=fixed)
    root_weight = tl.where(behind == 0, 0.0, float("-inf"))
    tl.store(out_log_probs + b * width + behind, root_weight, mask=fixed)
    if HAS_ROOTS:
        tl.store(out_tokens + b * width, tl.load(roots + b))
    slot = tl.arange(0, LEVELS)
    bad = tl.load(row_bad + b * SLOTS + slot, mask=slot < SLOTS, other=0)
    first_bad = tl.min(tl.where(bad != 0, slot, SLOTS), 0)
    tl.store(out_nan_slot + b, tl.where(first_bad < SLOTS, first_bad, -1))


@triton.jit
def _link_kernel(
    parents, mask, retrieve_index, next_token, next_sibling, width, depth,
    R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """R rows of one request: visibility, first child, next sibling."""
    b = tl.program_id(0)
    row = tl.program_id(1) * R + tl.arange(0, R)
    column = tl.arange(0, N)
    base = parents + b * width
    column_parent = tl.load(base + column, mask=column < width, other=-1)
    row_parent = tl.load(base + row, mask=row < width, other=-1)
    sees = row[:, None] == column[None, :]
    ancestor = row_parent
    for _ in range(depth):
        sees |= ancestor[:, None] == column[None, :]
        ancestor = tl.load(base + ancestor, mask=ancestor > 0, other=-1)
    cell = (b * width + row[:, None]) * width + column[None, :]
    inside = (row[:, None] < width) & (column[None, :] < width)
    tl.store(mask + cell, sees.to(tl.int8), mask=inside)

    is_child = (column_parent[None, :] == row[:, None]) & (column[None, :] > 0)
    child = tl.min(tl.where(is_child, column[None, :], N), 1)
    same = (column_parent[None, :] == row_parent[:, None]) & (row_parent[:, None] >= 0)
    sibling = tl.min(tl.where(same & (column[None, :] > row[:, None]), column[None, :], N), 1)
    place = b * width + row
    tl.store(next_token + place, tl.where(child < N, child, -1).to(tl.int64), mask=row < width)
    tl.store(next_sibling + place, tl.where(sibling < N, sibling, -1).to(tl.int64), mask=row < width)
    tl.store(retrieve_index + place, place.to(tl.int64), mask=row < width)


def _power(n: int) -> int:
    """Next power of two, at least 2: a sort of one element is not a sort."""
    return max(2, triton.next_power_of_2(n))


def pick_group(k: int) -> int:
    """Tokens per group: about as many maxima as tokens to sort, at vocabularies above 100,000."""
    return 64 if k <= 64 else 32 if k <= 256 else 16


@dataclass(frozen=True)
class Scratch:
    """Sizes that follow from the shapes alone, and what one kernel leaves for the next."""

    group: int
    groups: int
    chunks: int
    k: int
    k_padded: int
    level: int  # prefixes kept a depth
    group_max: Tensor  # [rows, groups] fp32
    partial: Tensor  # [rows, chunks, 2] fp32
    log_probs: Tensor  # [rows, k_padded] fp32
    tokens: Tensor  # [rows, k_padded] int32
    row_bad: Tensor  # [rows] int32

    @staticmethod
    def make(rows: int, vocab: int, budget: int, group: int, device: torch.device) -> "Scratch":
        groups = triton.cdiv(vocab, group)
        chunks = triton.cdiv(groups, GROUPS_PER_PROGRAM)
        k = min(budget, vocab)

        def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        return Scratch(
            group, groups, chunks, k, _power(k), _power(budget),
            group_max=empty(rows, groups),
            partial=empty(rows, chunks, 2),
            log_probs=empty(rows, _power(k)),
            tokens=empty(rows, _power(k), dtype=torch.int32),
            row_bad=empty(rows, dtype=torch.int32),
        )  # fmt: skip


def build_ddtree_triton(
    logits: Tensor,
    budget: int,
    out: TreeBuffers,
    root_tokens: Tensor | None,
    max_tokens: Tensor | None,
    min_log_prob: float | None,
    group: int | None = None,
) -> None:
    """Fill `out` from draft logits [bs, L, V], 1 <= budget <= TRITON_MAX_BUDGET, L >= 1.

    Scratch lives as long as the buffers: the first call of a shape allocates it and must not be a capture.
    """
    if budget > TRITON_MAX_BUDGET:
        raise ValueError(
            f"budget={budget}: the Triton builder takes at most {TRITON_MAX_BUDGET}, use method='torch'"
        )
    if logits.stride(2) != 1:
        raise ValueError(f"draft logits have vocabulary stride {logits.stride(2)}: pass them with stride 1")
    for launch in plan_kernels(logits, budget, out, root_tokens, max_tokens, min_log_prob, group).values():
        launch()


def plan_kernels(
    logits: Tensor,
    budget: int,
    out: TreeBuffers,
    root_tokens: Tensor | None = None,
    max_tokens: Tensor | None = None,
    min_log_prob: float | None = None,
    group: int | None = None,
) -> dict[str, Callable[[], None]]:
    """The four launches in order, by name; each may be timed alone."""
    bs, slots, vocab = logits.shape
    group = pick_group(min(budget, vocab)) if group is None else group
    key = (bs, slots, vocab, budget, group)
    if key not in out.workspace:
        out.workspace[key] = Scratch.make(bs * slots, vocab, budget, group, logits.device)
    scratch = out.workspace[key]
    floor = float("-inf") if min_log_prob is None else min_log_prob
    return {
        "scan": lambda: _scan(logits, scratch),
        "rank": lambda: _rank(logits, scratch),
        "select": lambda: _select(scratch, slots, budget, out, root_tokens, max_tokens, floor),
        "link": lambda: _link(out, slots),
    }


def _scan(logits: Tensor, s: Scratch) -> None:
    _scan_kernel[(len(s.row_bad), s.chunks)](
        logits, s.group_max, s.partial, logits.shape[2], s.groups, logits.stride(0), logits.stride(1),
        logits.shape[1], G=s.group, M=GROUPS_PER_PROGRAM, num_warps=8,
    )  # fmt: skip


def _rank(logits: Tensor, s: Scratch) -> None:
    padded = _power(s.groups)
    kept = min(s.k_padded, padded)
    narrow = logits.element_size() == 2 and max(padded, kept * s.group) <= 1 << 16
    _rank_kernel[(len(s.row_bad),)](
        logits, s.group_max, s.partial, s.log_probs, s.tokens, s.row_bad, logits.shape[2], s.groups, s.chunks,
        logits.stride(0), logits.stride(1), logits.shape[1], s.k, G=s.group, GROUPS=padded,
        KG=kept, K=s.k_padded, CHUNKS=_power(s.chunks), NARROW=narrow, num_warps=8 if narrow else 16,
    )  # fmt: skip


def _select(
    s: Scratch,
    slots: int,
    budget: int,
    out: TreeBuffers,
    root_tokens: Tensor | None,
    max_tokens: Tensor | None,
    floor: float,
) -> None:
    first, second = pair_table(s.level, s.k_padded, out.device)
    _select_kernel[(out.bs,)](
        s.log_probs, s.tokens, s.row_bad, first, second, root_tokens, max_tokens,
        out.token_ids, out.depths, out.parents, out.log_probs, out.num_nodes, out.nan_slot,
        len(first), budget, out.width, floor,
        HAS_ROOTS=root_tokens is not None, HAS_LIMITS=max_tokens is not None, SLOTS=slots,
        LEVELS=_power(slots), K=s.k_padded, B=s.level, PAIRS=_power(len(first)), N=_power(out.width),
        num_warps=4 if s.level <= 64 else 8,
    )  # fmt: skip


def _link(out: TreeBuffers, slots: int) -> None:
    _link_kernel[(out.bs, triton.cdiv(out.width, LINK_ROWS))](
        out.parents, out.mask, out.retrieve_index, out.next_token, out.next_sibling,
        out.width, slots, R=LINK_ROWS, N=_power(out.width), num_warps=4,
    )  # fmt: skip
