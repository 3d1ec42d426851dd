"""Device copy of pool rows: one launch moves the listed rows of every layer.

A row of all layers is read and written once, 16 bytes per lane; slots are read once per tile and layer.
"""

import torch
import triton
import triton.language as tl

ROWS_PER_PROGRAM = 16
WORD_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


@triton.jit
def _copy_rows(
    pool,  # [layers, rows, WORDS] words
    sources,  # [n] int64
    targets,  # [n] int64
    n,
    layer_stride,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,  # power of two that divides WORDS
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    base = tl.program_id(1).to(tl.int64) * layer_stride
    source = base + tl.load(sources + row, mask=inside, other=0) * WORDS
    target = base + tl.load(targets + row, mask=inside, other=0) * WORDS
    column = tl.arange(0, COLUMNS)
    for start in tl.static_range(0, WORDS, COLUMNS):
        words = tl.load(pool + source[:, None] + (start + column)[None, :], mask=inside[:, None])
        tl.store(pool + target[:, None] + (start + column)[None, :], words, mask=inside[:, None])


def copy_rows(buffer: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy rows `sources` to rows `targets` in every layer of `buffer` [layers, rows, width], in place.

    Targets must be distinct and disjoint from the sources: programs run in any order.
    """
    words = _as_words(buffer)
    layers, _, row_words = words.shape
    columns = row_words & -row_words  # largest power of two that divides it
    grid = (triton.cdiv(len(sources), ROWS_PER_PROGRAM), layers)
    _copy_rows[grid](
        words,
        sources,
        targets,
        len(sources),
        words.stride(0),
        WORDS=row_words,
        COLUMNS=min(columns, 64),
        ROWS=ROWS_PER_PROGRAM,
    )


def _as_words(buffer: torch.Tensor) -> torch.Tensor:  # [layers, rows, words]
    """The buffer in the widest words that divide a row."""
    row_bytes = buffer.shape[-1] * buffer.element_size()
    dtype = next(word for word in WORD_DTYPES if row_bytes % word.itemsize == 0)
    return buffer.view(dtype)
