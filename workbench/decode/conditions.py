"""The conditions of replay, each a place where it can be lost; the first that fails is the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from workbench.decode.decision import Reason, StepBatch

if TYPE_CHECKING:
    from workbench.decode.graph_runner import GraphRunner

Condition = tuple[Reason, Callable[["GraphRunner", StepBatch], str | None]]  # detail of a failure, or None


def _graph_disabled(runner: GraphRunner, batch: StepBatch) -> str | None:
    return None if runner.mode != "eager" else "mode='eager' runs no graphs"


def _capture_failed(runner: GraphRunner, batch: StepBatch) -> str | None:
    return str(runner.capture_error) if runner.capture_error else None


def _not_captured(runner: GraphRunner, batch: StepBatch) -> str | None:
    return None if runner.captured else "nothing has been captured yet: call capture()"


def _mode_not_allowed(runner: GraphRunner, batch: StepBatch) -> str | None:
    if batch.mode in runner.allowed_modes or batch.mode == "mixed":
        return None
    return f"mode {batch.mode!r}, captured {', '.join(sorted(runner.allowed_modes))}"


def _mixed_batch(runner: GraphRunner, batch: StepBatch) -> str | None:
    if batch.mode != "mixed" and not batch.new_prefill_tokens:
        return None
    return f"{batch.new_prefill_tokens} prefill tokens in a decode batch of {batch.bs}"


def _hidden_mode(runner: GraphRunner, batch: StepBatch) -> str | None:
    if batch.hidden_mode in ("none", runner.hidden_mode):
        return None
    return f"hidden states {batch.hidden_mode!r}, captured {runner.hidden_mode!r}"


def _sampling(runner: GraphRunner, batch: StepBatch) -> str | None:
    if batch.sampling == runner.sampling:
        return None
    return f"sampling (on, top_k, top_p) {batch.sampling}, captured {runner.sampling}"


def _width(runner: GraphRunner, batch: StepBatch) -> str | None:
    if any(bucket.width == batch.width for bucket in runner.captured):
        return None
    widths = sorted({bucket.width for bucket in runner.captured})
    return f"width {batch.width}, captured {', '.join(map(str, widths))}"


def _batch_size(runner: GraphRunner, batch: StepBatch) -> str | None:
    size, largest = runner.compared_size(batch), runner.sizes(batch.width)[-1]
    return f"batch {size}, largest captured {largest}" if size > largest else None


def _padding(runner: GraphRunner, batch: StepBatch) -> str | None:
    size, sizes = runner.compared_size(batch), runner.sizes(batch.width)
    if runner.padding or size in sizes:
        return None
    return f"batch {size}, captured {', '.join(map(str, sizes))}, padding off"


def _context(runner: GraphRunner, batch: StepBatch) -> str | None:
    if batch.max_kv_len <= runner.max_context:
        return None
    return f"kv_len up to {batch.max_kv_len}, captured for {runner.max_context}"


def _ranks(runner: GraphRunner, batch: StepBatch) -> str | None:
    return None if batch.rank_agrees else "another rank cannot replay this step"


def _buffers(runner: GraphRunner, batch: StepBatch) -> str | None:
    moved = runner.moved_buffers(runner.pick_bucket(batch))
    return f"{', '.join(moved)} moved since capture" if moved else None


CONDITIONS: tuple[Condition, ...] = (
    (Reason.GRAPH_DISABLED, _graph_disabled),
    (Reason.CAPTURE_FAILED, _capture_failed),
    (Reason.NOT_CAPTURED, _not_captured),
    (Reason.MODE_NOT_ALLOWED, _mode_not_allowed),
    (Reason.MIXED_BATCH, _mixed_batch),
    (Reason.HIDDEN_MODE_MISMATCH, _hidden_mode),
    (Reason.SAMPLING_NOT_CAPTURED, _sampling),
    (Reason.WIDTH_MISMATCH, _width),
    (Reason.BATCH_ABOVE_LARGEST, _batch_size),
    (Reason.SIZE_NOT_CAPTURED, _padding),
    (Reason.CONTEXT_ABOVE_CAPTURED, _context),
    (Reason.RANKS_DISAGREE, _ranks),
    (Reason.BUFFER_MOVED, _buffers),
)
