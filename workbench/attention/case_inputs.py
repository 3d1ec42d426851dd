"""Tensors of an AttentionCase: what a kernel must not rely on is NaN, junk bits or 2147480000."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from workbench.attention.cases import AttentionCase
from workbench.attention.plan import DTYPES

UNUSED_SLOT = 2147480000  # FlashMLA's poison for table entries that no request owns


@dataclass(frozen=True)
class CaseInputs:
    """Arguments of one verify_attention call."""

    q: torch.Tensor  # [T, H, D]
    kv: torch.Tensor  # [pool, D], NaN outside the rows in use
    qo_indptr: torch.Tensor  # [bs+1] int32
    kv_indptr: torch.Tensor  # [bs+1] int32
    kv_indices: torch.Tensor  # unused entries at the end
    tree_mask: torch.Tensor | None
    draft_slots: torch.Tensor | None
    mask_layout: str
    sm_scale: float
    latent: int

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of verify_attention."""
        values = dict(vars(self))
        if self.tree_mask is None:
            del values["mask_layout"]
        return values


def build(case: AttentionCase, device: str = "cpu") -> CaseInputs:
    """Random inputs of a case, the same for the same seed on every device."""
    draw = torch.Generator().manual_seed(case.seed)
    drafts_apart = case.form == "slots"
    kv_lens = [kv - q if drafts_apart else kv for q, kv in zip(case.q_lens, case.kv_lens)]
    total, tokens = sum(case.kv_lens), sum(case.q_lens)
    slots = _slots(case, total, draw)
    kv = _pool(case, slots, device, draw)
    listed, drafts = _divide(case, slots) if drafts_apart else (slots, None)
    visible = [_visibility(case, q, kv_len, draw) for q, kv_len in zip(case.q_lens, case.kv_lens)]
    mask = None if case.mask == "causal" else pack_mask(visible, case.mask, tokens + case.padding_rows)
    index_dtype = getattr(torch, case.index_dtype)
    return CaseInputs(
        q=_queries(case, tokens + case.padding_rows, tokens, device, draw),
        kv=kv,
        qo_indptr=_indptr(case.q_lens, case.padding_requests).to(device),
        kv_indptr=_indptr(kv_lens, case.padding_requests).to(device),
        kv_indices=_with_unused(listed).to(device, index_dtype),
        tree_mask=None if mask is None else mask.to(device),
        draft_slots=None if drafts is None else _with_unused(drafts).to(device, index_dtype),
        mask_layout=case.mask,
        sm_scale=case.sm_scale,
        latent=case.latent,
    )


def _indptr(lens: list[int] | tuple[int, ...], padding: int) -> torch.Tensor:
    ends = [0, *accumulate(lens)]
    return torch.tensor(ends + ends[-1:] * padding, dtype=torch.int32)


def _with_unused(slots: torch.Tensor) -> torch.Tensor:
    return torch.cat([slots, torch.full((5,), UNUSED_SLOT)])


def _slots(case: AttentionCase, total: int, draw: torch.Generator) -> torch.Tensor:
    """One slot per KV row, requests one behind the other; slot 0 is as good as any other."""
    if case.indices == "contiguous":
        return torch.arange(total)
    if case.indices == "reversed":
        return torch.arange(total).flip(0)
    if case.indices == "repeated":
        return torch.randint(0, max(1, total // 2), (total,), generator=draw)
    return torch.randperm(total + 7, generator=draw)[:total]


def _divide(case: AttentionCase, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(prefix slots, draft slots), each requests one behind the other."""
    parts = slots.split(list(case.kv_lens))
    prefixes = [part[: len(part) - q] for part, q in zip(parts, case.q_lens)]
    return torch.cat(prefixes), torch.cat([part[len(part) - q :] for part, q in zip(parts, case.q_lens)])


def _pool(case: AttentionCase, slots: torch.Tensor, device: str, draw: torch.Generator) -> torch.Tensor:
    width = case.latent + case.rope
    rows = int(slots.max()) + 4 if len(slots) else 4
    values = torch.full((rows, width), torch.nan)
    used = slots.unique()
    values[used] = torch.randn((len(used), width), generator=draw)
    stride = case.kv_row_stride or width + {"wide": 64, "odd": 1}.get(case.view, 0)
    kv = _strided((rows, width), (stride, 1), DTYPES[case.dtype], device)
    kv.copy_(values)
    return kv


def _queries(case: AttentionCase, rows: int, used: int, device: str, draw: torch.Generator) -> torch.Tensor:
    """[rows, H, D]; rows behind `used` are padding and NaN."""
    width = case.latent + case.rope
    values = torch.randn((rows, case.heads, width), generator=draw)
    values[used:] = torch.nan
    head_stride = width + {"wide": 64, "odd": 1}.get(case.view, 0)
    strides = (case.q_row_stride or case.heads * head_stride, head_stride, 1)
    if case.view == "transposed":
        strides = (width, rows * width, 1)
    q = _strided((rows, case.heads, width), strides, DTYPES[case.dtype], device)
    q.copy_(values)
    return q


def _strided(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: str
) -> torch.Tensor:
    """A view with these strides; on CPU the pages of a huge storage that no row touches take no memory."""
    size = sum((n - 1) * s for n, s in zip(shape, strides)) + 1 if all(shape) else 0
    return torch.empty(size, dtype=dtype, device=device).as_strided(shape, strides)


def _visibility(case: AttentionCase, q_len: int, kv_len: int, draw: torch.Generator) -> torch.Tensor:
    """[q_len, kv_len] bool; prefix columns are all visible except under a full mask, which hides a fifth."""
    visible = torch.ones((q_len, kv_len), dtype=torch.bool)
    if case.mask == "full":
        visible = torch.rand((q_len, kv_len), generator=draw) < 0.8
        visible[q_len // 2 : q_len // 2 + 1] = False  # one row that sees nothing
    visible[:, kv_len - q_len :] = tree_visibility(case.tree, q_len, draw)
    if case.mask == "full":
        visible[q_len // 2 : q_len // 2 + 1] = False
    return visible


def tree_visibility(tree: str, q_len: int, draw: torch.Generator) -> torch.Tensor:
    """[q_len, q_len] bool of a named kind of tree; `random` nodes see themselves and their ancestors."""
    own = torch.eye(q_len, dtype=torch.bool)
    if tree == "chain":
        return torch.ones_like(own).tril()
    if tree == "star":
        own[:, :1] = True
        return own
    if tree in ("ones", "none"):
        return torch.full_like(own, tree == "ones")
    if tree == "dag":  # any bits at all: no implied diagonal, later nodes visible, rows that see nothing
        return torch.rand(own.shape, generator=draw) < 0.4
    for node in range(1, q_len):
        own[node] |= own[int(torch.randint(0, node, (), generator=draw))]
    return own


def pack_mask(visible: list[torch.Tensor], layout: str, tokens: int) -> torch.Tensor:
    """The requests' [q_len, kv_len] visibilities in a mask layout; what lies behind them is all ones."""
    if layout == "full":
        return torch.cat([v.flatten() for v in visible] + [torch.ones(9, dtype=torch.bool)])
    trees = [v[:, v.shape[1] - v.shape[0] :] for v in visible]
    if layout == "tree":
        return torch.cat([t.flatten() for t in trees] + [torch.ones(9, dtype=torch.bool)])
    words = -(-max([1, *(len(t) for t in trees)]) // 32) + 1
    bits = torch.ones((tokens, words * 32), dtype=torch.bool)
    row = 0
    for t in trees:
        bits[row : row + len(t), : len(t)] = t
        row += len(t)
    weights = 2 ** torch.arange(32, dtype=torch.int64)
    return (bits.view(tokens, words, 32) * weights).sum(-1).to(torch.uint32)
