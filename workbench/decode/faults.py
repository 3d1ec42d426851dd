"""The fault laboratory: causes of lost or wrong replay, each injected by one switch into our own decode.

A fault is worth keeping only with its negative control: the same run without it replays every step. `cause`
is what an investigation has to conclude.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from workbench.decode.fault_hooks import (
    Alternating,
    BatchHooks,
    DropsFlag,
    MovesBuffer,
    OtherKey,
    PlainDecode,
    RunnerHooks,
    RunsEagerly,
    SlowHost,
    StaleChoice,
    StepHooks,
    compare_tokens,
    freeze_positions,
    only_modes,
    open_mask,
    rank_votes,
    read_on_host,
    waste_time,
    write_live_slot,
)
from workbench.decode.hooks import DecodeHooks

FoundBy = Literal["decision", "audit", "shadow", "acceptance", "nothing"]


@dataclass(frozen=True)
class Fault:
    """What is switched on, what it looks like, what finds it, and what repairs it."""

    name: str
    cause: str
    symptom: str
    log: str  # what the decode lines say
    found_by: FoundBy
    fix: str
    options: dict[str, Any] = field(default_factory=dict)  # of SpeculativeDecoder
    repaired: dict[str, Any] = field(default_factory=dict)  # options after the fix; hooks are always removed
    hooks: Callable[[], DecodeHooks] = DecodeHooks
    prompts: int = 2
    temperature: float = 0.0


TREE_CUT: dict[str, Any] = {"mode": "split_graph", "pad_trees": False, "padding": False}

FAULTS: tuple[Fault, ...] = (
    Fault(
        "tree_cut", "verify_width_mismatch", "trees are cut by a probability floor, the graph has one width",
        "False on nearly every line, True where a tree happened to be full", "decision",
        "pad every tree to the captured width",
        TREE_CUT | {"min_log_prob": -3.0, "batch_sizes": [1]}, {"pad_trees": True}, prompts=1,
    ),
    Fault(
        "partial_draft", "partial_draft", "trees shrink to the tokens a request may still produce",
        "True, then False in the last steps of each request", "decision",
        "pad the last trees, or let them run past the limit and discard",
        TREE_CUT | {"cut_to_remaining": True, "batch_sizes": [1]}, {"pad_trees": True}, prompts=1,
    ),
    Fault(
        "batch_over_ceiling", "batch_above_captured", "more requests run than the largest captured batch",
        "False above a number of requests, True below", "decision",
        "capture the batch sizes that occur",
        {"max_batch": 4, "batch_sizes": [1, 2]}, {"batch_sizes": [1, 2, 4]}, prompts=4,
    ),
    Fault(
        "tokens_as_batch", "dp_attention_token_sum", "tokens are compared with batch sizes",
        "False throughout although the batch is small", "decision",
        "divide by the tokens per request, as for the algorithms on the list", hooks=compare_tokens,
    ),
    Fault(
        "rank_vote", "ranks_disagree", "one rank of the group cannot replay",
        "False at random, at any number of requests", "decision", "give every rank a batch of the same kind",
        hooks=rank_votes,
    ),
    Fault(
        "hidden_mode", "hidden_mode_mismatch", "the batch asks for hidden states that were not captured",
        "False throughout", "decision", "capture with the hidden states that the batch needs",
        hooks=lambda: BatchHooks(lambda batch, n: replace(batch, hidden_mode="full")),
    ),
    Fault(
        "no_plain_graph", "speculation_off_without_graph", "speculation is off, plain decode has no graph",
        "accept len 1.00 and False", "decision", "capture plain decode too",
        {"min_log_prob": 0.0}, {"min_log_prob": None}, hooks=PlainDecode,
    ),
    Fault(
        "one_family", "mode_not_allowed", "two forward modes alternate, one of them was captured",
        "True and False alternate", "decision", "capture both modes", hooks=Alternating,
    ),
    Fault(
        "size_gap", "padding_gap", "a size between two captured ones, and no padding",
        "False at that number of requests only", "decision", "pad to the next size, or capture it",
        {"max_batch": 4, "batch_sizes": [1, 4], "padding": False}, {"padding": True},
    ),
    Fault(
        "never_dispatched", "never_dispatched", "captured under one key, looked up under another",
        "False throughout, no bucket is ever replayed", "decision", "build both keys by one function",
        hooks=OtherKey,
    ),
    Fault(
        "mixed_batch", "mixed_prefill_batch", "prefill joins every third decode batch",
        "False on the steps that hold prefill", "decision", "run prefill in steps of its own",
        hooks=lambda: BatchHooks(lambda batch, n: replace(batch, new_prefill_tokens=0 if n % 3 else 64)),
    ),
    Fault(
        "sampling", "sampling_not_captured", "the request samples, the graph was captured greedy",
        "False for sampling requests", "decision", "capture the sampling path",
        hooks=lambda: BatchHooks(lambda batch, n: replace(batch, sampling=(True, 50, 0.9))),
    ),
    Fault(
        "mode_downgrade", "backend_downgrade", "the attention backend supports no full graph",
        "False, though the drafter is replayed", "decision", "use a backend that supports full graphs",
        {"mode": "split_graph"}, {}, hooks=lambda: RunnerHooks(only_modes("draft")),
    ),
    Fault(
        "capture_failed", "capture_failed", "a value is read on the host inside the step",
        "a capture error at the start, then False throughout", "decision", "keep the value on the device",
        hooks=lambda: StepHooks("accept", read_on_host),
    ),
    Fault(
        "moved_buffer", "buffer_moved", "a static input is bound to a new tensor",
        "True, then False from one step on", "decision", "write into the static input in place",
        hooks=lambda: MovesBuffer(1),
    ),
    Fault(
        "not_reported", "flag_not_propagated", "the worker does not hand its flag on",
        "False throughout, and as fast as ever", "audit",
        "pass the flag on; trust a trace or the counter meanwhile",
        hooks=DropsFlag,
    ),
    Fault(
        "silent_eager", "silent_eager", "the runner takes the eager path and reports a replay",
        "True throughout, and slow", "audit", "set the flag where the graph is launched",
        hooks=lambda: RunsEagerly("step", True),
    ),
    Fault(
        "draft_eager", "drafter_not_captured", "only the target's pass is replayed",
        "True throughout: the flag speaks of the target only", "audit", "capture the drafter too",
        {"mode": "split_graph"}, {}, hooks=lambda: RunsEagerly("draft", False),
    ),
    Fault(
        "stale_positions", "stale_input", "the graph reads positions that nobody refreshes",
        "True throughout, wrong text", "shadow", "write positions in place before every replay",
        hooks=lambda: StepHooks("place_rows", freeze_positions),
    ),
    Fault(
        "open_mask", "stale_input", "the graph reads a mask without the tree in it",
        "True throughout, wrong text", "shadow", "copy the tree's mask into the static buffer on every step",
        hooks=lambda: StepHooks("place_rows", open_mask),
    ),
    Fault(
        "live_slot", "padding_writes_live_slot", "padded rows write into a slot that a request holds",
        "True throughout, text that loses its subject", "shadow", "point padded rows at the dummy slot 0",
        hooks=lambda: StepHooks("verify", write_live_slot),
    ),
    Fault(
        "stale_choice", "stale_capture", "the layers that feed the drafter are chosen after capture",
        "True throughout, accept len far below the eager run's", "acceptance", "choose first, then capture",
        hooks=StaleChoice,
    ),
)  # fmt: skip

# Slow for other reasons: an investigation has to say that this is not a graph problem.
HEALTHY: tuple[Fault, ...] = (
    Fault("healthy", "not_a_graph_problem", "none", "True throughout", "nothing", "nothing to repair"),
    Fault(
        "slow_host", "not_a_graph_problem", "the host is slow between steps",
        "True throughout, and slow", "nothing",
        "look at the scheduler: graphs end where the step ends", hooks=SlowHost,
    ),
    Fault(
        "slow_kernel", "not_a_graph_problem", "one stage computes too long",
        "True throughout, and slow", "nothing",
        "look at the stage that the ledger names: a graph replays slow kernels, too",
        hooks=lambda: StepHooks("verify", waste_time),
    ),
)  # fmt: skip


def find(name: str) -> Fault:
    """The fault called `name`. Raises ValueError that lists the known ones."""
    for fault in (*FAULTS, *HEALTHY):
        if fault.name == name:
            return fault
    known = ", ".join(fault.name for fault in (*FAULTS, *HEALTHY))
    raise ValueError(f"fault {name!r}: choose one of {known}")
