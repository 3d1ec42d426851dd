"""Why a step is replayed or not: one reason for every step, with both values in the detail."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Reason(StrEnum):
    """Codes of `GraphRunner.decide`; all but REPLAYED mean that the step runs eagerly."""

    REPLAYED = "replayed"
    GRAPH_DISABLED = "graph_disabled"
    CAPTURE_FAILED = "capture_failed"
    NOT_CAPTURED = "not_captured"
    MODE_NOT_ALLOWED = "mode_not_allowed"
    MIXED_BATCH = "mixed_batch"
    HIDDEN_MODE_MISMATCH = "hidden_mode_mismatch"
    SAMPLING_NOT_CAPTURED = "sampling_not_captured"
    WIDTH_MISMATCH = "width_mismatch"
    BATCH_ABOVE_LARGEST = "batch_above_largest"
    SIZE_NOT_CAPTURED = "size_not_captured"
    CONTEXT_ABOVE_CAPTURED = "context_above_captured"
    RANKS_DISAGREE = "ranks_disagree"
    BUFFER_MOVED = "buffer_moved"


ForwardMode = Literal["verify", "decode", "mixed", "draft"]


@dataclass(frozen=True, order=True)
class Bucket:
    """What one graph was captured for."""

    bs: int
    width: int  # rows per request, root included


@dataclass(frozen=True)
class StepBatch:
    """What `decide` may look at: facts of the batch that is about to run, never its tensors' contents."""

    bs: int
    width: int
    mode: ForwardMode = "verify"
    new_prefill_tokens: int = 0
    hidden_mode: Literal["none", "taps", "full"] = "taps"
    sampling: tuple[bool, int | None, float | None] = (False, None, None)  # (sampled, top_k, top_p)
    max_kv_len: int = 0
    rank_agrees: bool = True


@dataclass(frozen=True)
class ReplayDecision:
    """The verdict on one step; `detail` names the condition that failed with both values."""

    replay: bool
    reason: Reason
    detail: str = ""
    bucket: Bucket | None = None


@dataclass(frozen=True)
class StepClaim:
    """What the runner says of one step that has run; an audit of a trace must agree."""

    step: int
    replayed: bool | None  # None: not stated
    reason: Reason
    detail: str = ""
    bs: int = 0
    width: int = 0
    draft_replayed: bool | None = None  # the drafter's own graph in split_graph mode; None: part of the step


class ReplayRefused(ValueError):
    """Strict mode: a step that should have been replayed would run eagerly."""
