"""From what a run shows to its cause, without knowing what was injected.

In order: what the trace says against the claims, what the shadow check found, what the decisions say, whether
the drafter runs eagerly beside a replayed target, whether acceptance differs from an eager run. When none of
it speaks, the run has no graph problem, however slow it is.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from workbench.decode.audit import Audit, Lie, describe
from workbench.decode.decision import Reason, StepClaim
from workbench.decode.result import DecodeResult

NO_GRAPH_PROBLEM = "not_a_graph_problem"
COLLAPSED = 0.75  # acceptance under graphs over that of an eager run with the same seed
ALTERNATIVES = (
    "something captured for the drafter is stale, most likely the choice of the layers that feed it; "
    "acceptance alone does not tell that from replaced weights or inputs of the drafter, or a draft cache "
    "written elsewhere: compare taps and draft logits of a replayed step with those of an eager run"
)
DIRECT = {
    Reason.GRAPH_DISABLED: "graph_disabled",
    Reason.CAPTURE_FAILED: "capture_failed",
    Reason.NOT_CAPTURED: "graph_disabled",
    Reason.MIXED_BATCH: "mixed_prefill_batch",
    Reason.HIDDEN_MODE_MISMATCH: "hidden_mode_mismatch",
    Reason.SAMPLING_NOT_CAPTURED: "sampling_not_captured",
    Reason.SIZE_NOT_CAPTURED: "padding_gap",
    Reason.CONTEXT_ABOVE_CAPTURED: "context_above_captured",
    Reason.RANKS_DISAGREE: "ranks_disagree",
    Reason.BUFFER_MOVED: "buffer_moved",
}


@dataclass
class Evidence:
    """What a run left behind: results, the audit of a trace of a few steps, and an eager run's acceptance."""

    result: DecodeResult
    audit: Audit
    lies: list[Lie]
    traced: list[StepClaim] = field(default_factory=list)
    eager_accept_length: Callable[[], float] | None = None  # run only when it decides


@dataclass(frozen=True)
class Conclusion:
    """The cause, what found it, and the sentence with the values that decided."""

    cause: str
    found_by: Literal["decision", "audit", "shadow", "acceptance", "nothing"]
    text: str


def investigate(evidence: Evidence) -> Conclusion:
    """Name the cause of lost or wrong replay, or say that there is none."""
    for look in (_ask_audit, _ask_shadow, _ask_decisions, _ask_draft, _ask_acceptance):
        conclusion = look(evidence)
        if conclusion is not None:
            return conclusion
    return Conclusion(NO_GRAPH_PROBLEM, "nothing", _healthy(evidence))


def _ask_audit(evidence: Evidence) -> Conclusion | None:
    lies = [lie for lie in evidence.lies if lie.part == "verify"]
    if not lies:
        return None
    kinds = Counter(lie.kind for lie in lies)
    cause = "silent_eager" if kinds["says_replayed_but_did_not"] else "flag_not_propagated"
    return Conclusion(cause, "audit", describe(lies))


def _ask_shadow(evidence: Evidence) -> Conclusion | None:
    wrong = [report for report in evidence.result.shadow if not report.is_ok]
    if not wrong:
        return None
    stray = any(report.stray_slots for report in wrong)
    differing = any(report.differing for report in wrong)
    cause = "padding_writes_live_slot" if stray else "stale_input" if differing else "replayed_but_wrong"
    return Conclusion(cause, "shadow", wrong[0].sentence())


def _ask_decisions(evidence: Evidence) -> Conclusion | None:
    refused = [claim for claim in evidence.result.replay.claims if claim.reason is not Reason.REPLAYED]
    if not refused:
        return None
    reason = Counter(claim.reason for claim in refused).most_common(1)[0][0]
    mine = [claim for claim in refused if claim.reason is reason]
    cause = DIRECT.get(reason) or _refine(reason, mine, evidence.result)
    total = len(evidence.result.replay.claims)
    return Conclusion(cause, "decision", f"{len(mine)} of {total} steps: {mine[0].detail}")


def _refine(reason: Reason, refused: Sequence[StepClaim], result: DecodeResult) -> str:
    """Reasons that several causes share."""
    if reason is Reason.WIDTH_MISMATCH:
        return _refine_width(refused, result)
    if reason is Reason.BATCH_ABOVE_LARGEST:
        compared = re.match(r"batch (\d+)", refused[0].detail)
        is_batch = compared is not None and int(compared[1]) == refused[0].bs
        return "batch_above_captured" if is_batch else "dp_attention_token_sum"
    if any(claim.draft_replayed for claim in refused):
        return "backend_downgrade"
    return "speculation_off_without_graph" if result.mean_accept_length == 1.0 else "mode_not_allowed"


def _refine_width(refused: Sequence[StepClaim], result: DecodeResult) -> str:
    """Never the captured width: the key is wrong. Only at the end: the last drafts. Else the trees vary."""
    widths = {claim.width for claim in result.replay.claims}
    if len(widths) == 1 and not any(bucket["replays"] for bucket in result.replay.captures):
        return "never_dispatched"
    first = refused[0].step
    after = [claim for claim in result.replay.claims if claim.step >= first]
    falling = all(a.width >= b.width for a, b in pairwise(after))
    before = len(result.replay.claims) - len(after)
    at_end = before >= len(after) and falling and all(claim.replayed is False for claim in after)
    return "partial_draft" if at_end else "verify_width_mismatch"


def _ask_draft(evidence: Evidence) -> Conclusion | None:
    eager = evidence.audit.eager_drafts
    if not eager:
        return None
    steps = evidence.audit.steps
    each = sum(step.record.eager_by_stage.get("draft", 0) for step in steps) / len(steps)
    text = f"{eager} of {len(steps)} traced steps launch the drafter singly, {each:.0f} operations each"
    return Conclusion("drafter_not_captured", "audit", text)


def _ask_acceptance(evidence: Evidence) -> Conclusion | None:
    if evidence.eager_accept_length is None:
        return None
    graphs, eager = evidence.result.mean_accept_length, evidence.eager_accept_length()
    if eager <= 1.0 or (graphs - 1) >= COLLAPSED * (eager - 1):
        return None
    checked = (
        ", though the shadow-checked steps equal their eager recomputation" if evidence.result.shadow else ""
    )
    text = f"accept length {graphs:.2f} under graphs, {eager:.2f} eagerly{checked}: {ALTERNATIVES}"
    return Conclusion("stale_capture", "acceptance", text)


def _healthy(evidence: Evidence) -> str:
    """Where the time of a run without a graph problem goes."""
    shadow = len(evidence.result.shadow)
    stage, share = largest_stage(evidence.result)
    return (
        f"every step replayed, {describe(evidence.lies)}, {shadow} shadow steps equal an eager one; "
        f"{100 * time_outside(evidence.result):.0f} % of the decode time lies outside the steps, "
        f"inside them {stage} takes {100 * share:.0f} %"
    )


def time_outside(result: DecodeResult) -> float:
    """Share of the decode time between the steps, where no graph reaches."""
    in_steps_s = sum(record.step_us for record in result.ledger.records) / 1e6
    return max(0.0, 1 - in_steps_s / max(result.seconds - result.prefill_s, 1e-9))


def largest_stage(result: DecodeResult) -> tuple[str, float]:
    """The stage that takes most of the steps' time, and its share."""
    totals: Counter[str] = Counter()
    for record in result.ledger.records:
        totals.update(record.stages_us)
    whole = sum(record.step_us for record in result.ledger.records)
    stage, time_us = max(totals.items(), key=lambda item: item[1], default=("nothing", 0.0))
    return stage, time_us / whole if whole else 0.0
