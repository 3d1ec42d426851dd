"""Notebook 60: a slow run, its hypotheses, the decisive experiment, the cause, the fix, and after."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, field_validator

from workbench import targets
from workbench.experiments.stored_rows import NOISE_FLOOR, judge
from workbench.measure import timing
from workbench.rows import Origin, Row, RowStatus, Scalar
from workbench.targets import HardwareTarget

if TYPE_CHECKING:
    from workbench.experiments.fault_runs import LongRun

STAGES = ("draft", "tree", "mask", "verify", "accept", "commit", "other", "unattributed")
COLUMNS = (
    "case_id", "status", "reason", "metric_injected", "metric_concluded", "metric_found_by", "metric_because",
    "metric_symptom", "metric_log", "metric_fix", "metric_replay_share", "metric_accept_length",
    "metric_graph_launches", "metric_eager_launches",
)  # fmt: skip


class Params(BaseModel):
    """Parameters of notebook 60."""

    model_config = ConfigDict(extra="forbid")
    target: str = Field("cpu", description="hardware target, one of data/targets")
    seed: int = Field(0, description="seed; also picks the prompts")
    fault: str = Field("tree_cut", description="the fault of the long run, one of workbench.decode.faults")
    lines: int = Field(37, ge=2, le=400, description="decode log lines of the long run")
    log_interval: int = Field(2, ge=1, le=40, description="decode steps per log line")
    budget: int = Field(16, ge=2, le=64, description="tree nodes besides the root")
    every_fault: bool = Field(True, description="also inject every other fault and check the verdicts")
    inputs: str = Field("", description="paths of your own logs and traces, with commas between")

    @field_validator("fault")
    @classmethod
    def _known_fault(cls, name: str) -> str:
        from workbench.decode.faults import find

        return find(name).name

    @field_validator("inputs")
    @classmethod
    def _present_inputs(cls, text: str) -> str:
        paths = [part.strip() for part in text.split(",")] if text else []
        for path in paths:
            if not path or not Path(path).exists():
                raise ValueError(
                    f"no file {path!r} of inputs={text!r}: give paths of logs, traces or profiler summaries"
                    " with commas between"
                )
        return text


def run(params: Params, step: Callable[[str], None] = print) -> list[Row]:
    """Rows: before, hypotheses, after, one verdict per fault, and the user's own files."""
    from workbench.experiments.fault_runs import user_rows

    target = targets.load(params.target)
    targets.require_hardware(target)
    theirs: list[Row] = []
    if params.inputs:
        step("diagnose your files")  # first: a wrong path is told at once
        theirs = list(user_rows(params.inputs, target))
    with timing.one_thread(target):
        return run_all(params, target, step) + theirs


def run_all(params: Params, target: HardwareTarget, step: Callable[[str], None]) -> list[Row]:
    """The chosen fault: before, hypotheses with the time each could explain, the cause, after the fix."""
    from workbench.decode.faults import find
    from workbench.experiments import fault_runs
    from workbench.experiments.hypotheses import state_hypotheses, utilisation_row

    fault, steps = find(params.fault), params.lines * params.log_interval
    lab = fault_runs.make_laboratory(
        target, budget=params.budget, steps=steps, log_interval=params.log_interval, seed=params.seed
    )
    step(f"decode {steps} steps with the fault {fault.name}, trace two, investigate")
    long = fault_runs.run_long(lab, fault, steps)
    before = fault_runs.step_row("before", long.evidence.result, fault, target, _seen(long))
    step("state the hypotheses")
    rows = [before, utilisation_row(long, lab, fault, target), *state_hypotheses(long, lab, target)]
    step("apply the fix, decode again")
    repaired = lab.generate(lab.make(fault, repaired=True), fault, max_steps=steps)
    rows.append(fault_runs.step_row("after", repaired, fault, target, {"fix": fault.fix}))
    rows.append(fault_runs.verdict_row(fault, long.evidence, long.conclusion, target))
    if params.every_fault:
        rows += fault_runs.survey(lab, target, step, left_out=fault.name)
    return rows


def _seen(long: "LongRun") -> dict[str, Scalar]:
    """What log, diagnosis and audit say of the long run."""
    replay, audit = long.diagnosis.replay, long.evidence.audit
    return {
        "log_lines": replay.replayed + replay.eager + replay.unknown, "log_true": replay.replayed,
        "log_false": replay.eager, "log_unknown": replay.unknown, "log_state": replay.state,
        "log_causes": ", ".join(c.id for c in long.diagnosis.causes if c.likelihood != "excluded"),
        "audit": audit.sentence(), "busy_share": audit.mean("busy_share"),
        "graph_launches": audit.mean("graph_launches"), "eager_launches": audit.mean("eager_launches"),
        "concluded": long.conclusion.cause, "found_by": long.conclusion.found_by,
        "because": long.conclusion.text,
    }  # fmt: skip


def findings(rows: list[Row]) -> list[str]:
    """What the rows say, in sentences."""
    return [*_long_findings(rows), *_survey_findings(rows), *_user_findings(rows)]


def select(rows: list[Row], run: str) -> list[Row]:
    """Rows of one kind: before, after, hypothesis, verdict, user, user_cause."""
    return [row for row in rows if row.axes.get("run") == run]


def _long_findings(rows: list[Row]) -> Iterable[str]:
    for before, after in zip(select(rows, "before"), select(rows, "after")):
        seen, fixed = before.metrics, after.metrics
        yield (
            f"{seen['log_false']} of {seen['log_lines']} decode log lines say False; the runner's own"
            f" count over all steps: {seen['reasons']}."
        )
        yield f"The trace: {seen['audit']}."
        yield from _utilisation(rows)
        named = sorted(select(rows, "hypothesis"), key=lambda row: -number(row, "explains_us"))
        parts = [f"{row.variant} {number(row, 'explains_us'):.0f} µs" for row in named]
        step_us = number(before, "ledger_step_us")
        wrong = "" if before.timing else " (of a run whose results are wrong: no measurement)"
        yield f"Of a step of {step_us:.0f} µs{wrong} could be explained at most: {', '.join(parts)}."
        yield f"The cause is {seen['concluded']}, found by {_found_by(seen['found_by'])}: {seen['because']}."
        share = f"{number(after, 'replay_share'):.0%} of the steps are replayed"
        yield f"After the fix ({fixed['fix']}) {share}; {_change(before, after)}."


def _change(before: Row, after: Row) -> str:
    """The median step before and after, with what its noise allows to say; no time of a run that is wrong."""
    if before.timing is None or after.timing is None:
        untimed = [row for row in (before, after) if row.timing is None]
        reasons = "; ".join(f"{row.axes['run']} is {row.status}, {row.reason}" for row in untimed)
        return f"no times are compared: {reasons}"
    ratio, low, high, verdict = judge(before.timing, after.timing)
    emitted = " and ".join(f"{number(row, 'accept_length'):.2f}" for row in (before, after))
    return (
        f"the median step goes from {before.timing.median_us:.0f} to {after.timing.median_us:.0f} µs"
        f" ({ratio:.2f} times, {low:.2f} to {high:.2f}: {verdict}; {NOISE_FLOOR:.0%} count as noise),"
        f" with {emitted} tokens per step"
    )


def _utilisation(rows: list[Row]) -> Iterable[str]:
    for row in select(rows, "utilisation"):
        if "dram_util" in row.metrics:
            yield (
                f"While it ran, DRAM was {number(row, 'dram_util'):.0%} and the tensor cores"
                f" {number(row, 'tensor_util'):.0%} busy (GPM)."
            )
        else:
            yield (
                f"Derived, not measured: the least bytes of a step would take"
                f" {number(row, 'derived_dram_share'):.1%} of its time at the target's bandwidth."
            )


def _found_by(name: Scalar) -> str:
    texts = {
        "decision": "the decision's reason", "audit": "the audit of the trace", "shadow": "the shadow check",
        "acceptance": "the acceptance of an eager run", "nothing": "exclusion",
    }  # fmt: skip
    return texts.get(str(name), str(name))


def number(row: Row, name: str) -> float:
    """A metric as a float; 0 where it is missing."""
    value = row.metrics.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _survey_findings(rows: list[Row]) -> Iterable[str]:
    verdicts = select(rows, "verdict")
    faults = [row for row in verdicts if row.metrics["injected"] != "not_a_graph_problem"]
    healthy = [row for row in verdicts if row not in faults]
    right = [row for row in faults if row.status is RowStatus.PASSED]
    yield f"{len(right)} of {len(faults)} injected faults are named without being told."
    if healthy:
        clean = sum(row.status is RowStatus.PASSED for row in healthy)
        yield f"{clean} of {len(healthy)} runs without a fault, slow ones too, have no graph problem."
    for row in verdicts:
        if row.status is not RowStatus.PASSED:
            yield f"Wrong verdict for {row.variant}: {row.reason}."
    hidden = [row.variant for row in faults if number(row, "replay_share") == 1.0]
    if hidden:
        yield f"Invisible in the log, every step says replayed: {', '.join(hidden)}."


def _user_findings(rows: list[Row]) -> Iterable[str]:
    for row in select(rows, "user"):
        seen = row.metrics
        yield (
            f"Your files: {seen['state']}, replayed {seen['replayed']} / eager {seen['eager']} / unknown"
            f" {seen['unknown']} ({seen['unit'] or 'nothing counted'})."
        )
    for row in select(rows, "user_cause"):
        seen = row.metrics
        yield f"Your files, cause {seen['cause']} ({seen['likelihood']}): {seen['because']}; {seen['next']}."


def stage_shares(row: Row) -> dict[str, float]:
    """Microseconds per stage of a before or after row, the unattributed rest included."""
    assert row.origin is Origin.MEASURED
    return {stage: max(0.0, number(row, f"ledger_{stage}_us")) for stage in STAGES}
