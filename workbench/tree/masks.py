"""Visibility of draft rows in the layouts servers use, and the way back. A tree's mask is a square bool
matrix.

"tree" (SGLang QLEN_ONLY): q_len x q_len flags per request. "full" (FULL_MASK): q_len x (prefix + q_len),
prefix columns true. "bytes" (QLEN_ONLY_BITPACKING): 1, 2 or 4 bytes a row, q_len <= 32. "packed":
ceil(q_len / 32) words a row. All are row-major, least significant bit first, requests one behind the other
without gaps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SGLANG_MAX_PACKED_ROWS = 32


def to_tree(masks: Sequence[Tensor]) -> Tensor:
    """Flat bool [sum q_len^2] of square masks [q_len, q_len]."""
    return torch.cat([mask.reshape(-1) for mask in masks])


def from_tree(flat: Tensor, q_lens: Sequence[int]) -> list[Tensor]:
    """Square masks of a "tree" layout."""
    _check_size(flat, sum(q * q for q in q_lens), "tree")
    return [part.view(q, q) for part, q in zip(flat.split([q * q for q in q_lens]), q_lens)]


def to_full(masks: Sequence[Tensor], prefix_lens: Sequence[int]) -> Tensor:
    """Flat bool [sum q_len * (prefix + q_len)], every prefix column true."""
    if len(masks) != len(prefix_lens):
        raise ValueError(
            f"{len(masks)} masks and {len(prefix_lens)} prefix lengths: give one length per mask"
        )
    rows = [torch.nn.functional.pad(m, (s, 0), value=True) for m, s in zip(masks, prefix_lens)]
    return torch.cat([r.reshape(-1) for r in rows])


def from_full(flat: Tensor, q_lens: Sequence[int], prefix_lens: Sequence[int]) -> list[Tensor]:
    """Square masks of a "full" layout. Raises ValueError where a prefix column is hidden: no tree says
    that."""
    sizes = [q * (s + q) for q, s in zip(q_lens, prefix_lens, strict=True)]
    _check_size(flat, sum(sizes), "full")
    masks = []
    for b, (part, q, s) in enumerate(zip(flat.split(sizes), q_lens, prefix_lens)):
        rows = part.view(q, s + q)
        if not bool(rows[:, :s].all()):
            raise ValueError(f"request {b} hides part of its prefix: the tree layouts cannot express that")
        masks.append(rows[:, s:])
    return masks


def to_packed(masks: Sequence[Tensor], words: int | None = None) -> Tensor:
    """uint32 [sum q_len, words]; `words` defaults to what the longest request needs."""
    need = max((-(-m.shape[1] // 32) for m in masks), default=1)
    words = need if words is None else words
    if words < need:
        raise ValueError(f"{words} words hold {32 * words} draft rows: use at least {need} words")
    weights = 2 ** torch.arange(32)  # int64: bit 31 must not overflow
    packed = [
        (torch.nn.functional.pad(m, (0, 32 * words - m.shape[1])).view(-1, words, 32) * weights).sum(-1)
        for m in masks
    ]
    unsigned = torch.cat(packed)
    return torch.where(unsigned >= 2**31, unsigned - 2**32, unsigned).int().view(torch.uint32)


def from_packed(words: Tensor, q_lens: Sequence[int]) -> list[Tensor]:
    """Square masks of the "packed" layout [sum q_len, words]."""
    _check_size(words[:, 0], sum(q_lens), "packed")
    bits = (words.view(torch.int32).unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
    flat = bits.bool().flatten(1)
    return [part[:, :q] for part, q in zip(flat.split(list(q_lens)), q_lens)]


def to_bytes(masks: Sequence[Tensor]) -> Tensor:
    """uint8 [sum q_len * width], width 1, 2 or 4 by the number of rows, which is the same for all and at
    most 32."""
    sizes = {m.shape[0] for m in masks}
    if len(sizes) != 1 or max(sizes) > SGLANG_MAX_PACKED_ROWS:
        raise ValueError(f"rows per request are {sorted(sizes)}: this layout needs one size of at most 32")
    width = byte_width(max(sizes))
    return to_packed(masks).view(torch.uint8)[:, :width].reshape(-1)


def from_bytes(flat: Tensor, bs: int, q_len: int) -> list[Tensor]:
    """Square masks of the "bytes" layout."""
    width = byte_width(q_len)
    _check_size(flat, bs * q_len * width, "bytes")
    bits = (flat.view(-1, width, 1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return list(bits.bool().flatten(1)[:, :q_len].view(bs, q_len, q_len))


def byte_width(q_len: int) -> int:
    """Bytes SGLang spends on a row of `q_len` <= 32 flags."""
    return 1 if q_len <= 8 else 2 if q_len <= 16 else 4


def _check_size(flat: Tensor, expected: int, layout: str) -> None:
    if flat.numel() != expected:
        raise ValueError(
            f"{layout} mask has {flat.numel()} entries, the lengths ask for {expected}: check q_lens"
        )
