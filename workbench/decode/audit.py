"""The audit: what a profiler trace shows of each decode step, and where the runner's claims differ from it.

It reads the trace only. A step's verify pass was eager when operations or kernels were launched inside its
verify stage; it was replayed when a graph was launched and nothing there. What is launched around it belongs
to no stage of the models and decides nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from workbench.measure import trace as traces
from workbench.measure.trace import StepRecord, Trace

Observed = Literal["replayed", "eager", "mixed", "empty"]
LieKind = Literal["says_replayed_but_did_not", "says_eager_but_did"]
REPLAYED_SHARE = 0.9  # of the kernels, in a trace that marks no stages


class Claim(Protocol):
    """What the runner says of a step (`workbench.decode.decision.StepClaim`)."""

    @property
    def step(self) -> int: ...
    @property
    def replayed(self) -> bool | None: ...
    @property
    def draft_replayed(self) -> bool | None: ...


@dataclass(frozen=True)
class StepAudit:
    """One step as the trace shows it; `draft` is None where the trace does not tell the drafter apart."""

    record: StepRecord
    verify: Observed
    draft: Observed | None


@dataclass(frozen=True)
class Audit:
    """All steps of a trace."""

    steps: list[StepAudit]

    def count(self, observed: Observed) -> int:
        """Steps whose verify pass was observed so."""
        return sum(step.verify == observed for step in self.steps)

    @property
    def eager_drafts(self) -> int:
        """Steps whose drafter was launched operation by operation beside a replayed verify pass."""
        return sum(step.draft == "eager" and step.verify == "replayed" for step in self.steps)

    def mean(self, name: str) -> float:
        """Mean of a StepRecord field over the steps; 0 for an empty trace."""
        values = [float(getattr(step.record, name)) for step in self.steps]
        return sum(values) / len(values) if values else 0.0

    def sentence(self) -> str:
        """`5 steps replayed, 1 eager: 1.0 graph launches and 6.0 eager launches per step, busy 80 %`."""
        other = self.count("mixed") + self.count("empty")
        rest = f", {other} undecided" if other else ""
        return (
            f"{self.count('replayed')} steps replayed, {self.count('eager')} eager{rest}: "
            f"{self.mean('graph_launches'):.1f} graph launches and {self.mean('eager_launches'):.1f} eager"
            f" launches per step, busy {100 * self.mean('busy_share'):.0f} %"
        )


@dataclass(frozen=True)
class Lie:
    """A step whose claim the trace contradicts."""

    step: int
    kind: LieKind
    part: Literal["verify", "draft"]
    detail: str


def audit(trace: Trace | Path | str) -> Audit:
    """Audit every `decode_step#k` of a trace, or of the file it lies in."""
    loaded = trace if isinstance(trace, Trace) else traces.load(trace)
    has_stages = bool(loaded.stages)
    return Audit([_judge(record, has_stages) for record in traces.steps(loaded)])


def _judge(record: StepRecord, has_stages: bool) -> StepAudit:
    if not record.graph_launches and not record.eager_launches:
        return StepAudit(record, "empty", None)
    eager_verify, eager_draft = (record.eager_by_stage.get(stage, 0) for stage in ("verify", "draft"))
    if has_stages and (eager_verify or record.graph_launches):
        verify: Observed = "eager" if eager_verify else "replayed"
        return StepAudit(record, verify, _judge_draft(record, verify, eager_draft))
    total = record.kernels_in_graphs + record.kernels_eager
    share = record.kernels_in_graphs / total if total else 0.0
    return StepAudit(record, "replayed" if share >= REPLAYED_SHARE else "mixed" if share else "eager", None)


def _judge_draft(record: StepRecord, verify: Observed, eager_draft: int) -> Observed:
    """The draft stage of an eager verify pass also holds the drafter's context, so graphs decide there."""
    if verify == "eager":
        return "replayed" if record.graph_launches else "eager"
    return "eager" if eager_draft else "replayed"


def find_lies(found: Audit, claims: Iterable[Claim]) -> list[Lie]:
    """Steps whose claim says another thing than the trace; a claim that states nothing is no lie."""
    by_step = {claim.step: claim for claim in claims}
    lies: list[Lie] = []
    for step in found.steps:
        claim = by_step.get(step.record.index)
        if claim is None:
            continue
        for part, said, seen in (
            ("verify", claim.replayed, step.verify),
            ("draft", claim.draft_replayed, step.draft),
        ):
            kind = _contradiction(said, seen)
            if kind:
                lies.append(Lie(step.record.index, kind, part, _detail(step.record)))  # type: ignore[arg-type]
    return lies


def _contradiction(said: bool | None, seen: Observed | None) -> LieKind | None:
    if said is True and seen == "eager":
        return "says_replayed_but_did_not"
    if said is False and seen == "replayed":
        return "says_eager_but_did"
    return None


def _detail(record: StepRecord) -> str:
    return (
        f"step {record.index}: {record.graph_launches} graph launches with {record.kernels_in_graphs} "
        f"operations, {record.eager_launches} launched one by one"
    )


def describe(lies: Sequence[Lie]) -> str:
    """One line: how many steps of which kind, and the first of them."""
    if not lies:
        return "no claim contradicts the trace"
    names: tuple[LieKind, ...] = ("says_replayed_but_did_not", "says_eager_but_did")
    kinds = {name: sum(lie.kind == name for lie in lies) for name in names}
    counts = ", ".join(f"{kind.replace('_', ' ')}: {n} steps" for kind, n in kinds.items() if n)
    return f"{counts} ({lies[0].detail})"
