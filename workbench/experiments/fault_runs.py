"""Runs of the fault laboratory as rows: one fault for long, its repair, and a survey of every fault."""

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workbench.measure.statistics import is_stable, quantile
from workbench.rows import Origin, Row, RowStatus, Scalar, Timing
from workbench.targets import HardwareTarget

if TYPE_CHECKING:
    from workbench.decode.faults import Fault
    from workbench.decode.investigation import Conclusion, Evidence
    from workbench.decode.laboratory import Laboratory
    from workbench.decode.result import DecodeResult
    from workbench.diagnose import Diagnosis

EXPERIMENT = "moment_of_truth"
PROMPT_BYTES = 48
WARMUP_STEPS = 2


@dataclass
class LongRun:
    """The chosen fault, decoded for many steps, with everything that was found out about it."""

    evidence: "Evidence"
    conclusion: "Conclusion"
    diagnosis: "Diagnosis"
    held_tokens: int


def make_laboratory(
    target: HardwareTarget, *, budget: int, steps: int, log_interval: int, seed: int
) -> "Laboratory":
    """The trained tiny pair on the target's device, with the prompts of data/prompts."""
    from workbench.decode.laboratory import Laboratory
    from workbench.model.prompts import load_prompts
    from workbench.model.weights import load_pair

    model, drafter = load_pair("tiny", device="cuda" if target.backend == "cuda" else "cpu")
    prompts = [list(prompt.text.encode())[-PROMPT_BYTES:] for prompt in load_prompts()]
    turn = seed % len(prompts)
    tokens = min(8 * steps, 1200)
    return Laboratory(
        model, drafter, prompts[turn:] + prompts[:turn], budget=budget, max_new_tokens=tokens,
        max_context=PROMPT_BYTES + tokens + 4 * (budget + 1), log_interval=log_interval, seed=seed,
        trace_steps=2,
    )  # fmt: skip


def run_long(lab: "Laboratory", fault: "Fault", steps: int) -> LongRun:
    """Decode `steps` steps with the fault, trace two more, investigate, diagnose the log."""
    from workbench.decode.audit import audit, find_lies
    from workbench.decode.investigation import Evidence, investigate
    from workbench.diagnose import diagnose

    decoder = lab.make(fault)
    result = lab.generate(decoder, fault, max_steps=steps)
    decoder.shadow_steps = frozenset()
    with tempfile.TemporaryDirectory() as folder:
        trace, log = Path(folder) / "trace.json", Path(folder) / "decode.log"
        claims = lab.trace(trace, decoder, fault)
        log.write_text("\n".join(result.log_lines) + "\n")
        found = audit(trace)
        diagnosis = diagnose([log])
    lies = find_lies(found, claims)
    evidence = Evidence(result, found, lies, claims, lambda: lab.eager_accept_length(fault))
    held = sum(len(prompt) for prompt in lab.prompts[: fault.prompts]) + sum(map(len, result.tokens)) // 2
    return LongRun(evidence, investigate(evidence), diagnosis, held)


def step_row(
    name: str, result: "DecodeResult", fault: "Fault", target: HardwareTarget, extra: dict[str, Scalar]
) -> Row:
    """One run as a row: ledger and replay, and its step times when the shadow check found nothing wrong."""
    replay, skip = result.replay, min(WARMUP_STEPS, len(result.ledger.records) - 1)
    ledger = result.ledger.summary(skip=skip)
    metrics: dict[str, Scalar] = {f"ledger_{key}": value for key, value in ledger.items()}
    metrics |= {
        "replayed": replay.replayed, "eager": replay.eager, "unknown": replay.unknown,
        "replay_share": replay.share, "accept_length": result.mean_accept_length,
        "tokens_per_s": result.tokens_per_s, "reasons": replay.sentence(),
    }  # fmt: skip
    status, reason = shadow_verdict(result)
    return Row(
        case_id=f"{fault.name}-{name}", experiment=EXPERIMENT, variant=fault.name, target=target.name,
        origin=Origin.MEASURED, status=status, reason=reason, axes={"run": name, "fault": fault.name},
        timing=step_timing(result, target) if status is RowStatus.PASSED else None, metrics=metrics | extra,
        repro=f"workbench run 60_moment_of_truth --target {target.name} -p fault={fault.name}",
    )  # fmt: skip


def shadow_verdict(result: "DecodeResult") -> tuple[RowStatus, str]:
    """Whether the steps that were recomputed eagerly agree with what the run did."""
    wrong = next((report for report in result.shadow if not report.is_ok), None)
    if wrong is not None:
        return RowStatus.INCORRECT, wrong.sentence()
    return (RowStatus.PASSED, "") if result.shadow else (RowStatus.SKIPPED, "no step was recomputed")


def step_timing(result: "DecodeResult", target: HardwareTarget) -> Timing:
    """Step times without the first ones; the mode is what most steps did."""
    samples = [record.step_us for record in result.ledger.records]
    samples = samples[WARMUP_STEPS:] or samples
    mode: Literal["host", "graph", "eager"] = (
        "host" if target.backend == "cpu" else "graph" if result.replay.share > 0.5 else "eager"
    )
    periods = result.ledger.periods_us()
    return Timing(
        mode=mode, l2="n/a", n=len(samples), median_us=quantile(samples, 0.5), p10_us=quantile(samples, 0.1),
        p90_us=quantile(samples, 0.9), samples=tuple(round(s, 1) for s in samples), stable=is_stable(samples),
        span_us=quantile(periods, 0.5) if periods else None,
    )  # fmt: skip


def survey(
    lab: "Laboratory", target: HardwareTarget, step: Callable[[str], None], left_out: str
) -> Iterable[Row]:
    """Short runs of every fault and every healthy run, investigated without telling what was injected."""
    from workbench.decode.faults import FAULTS, HEALTHY
    from workbench.decode.investigation import investigate

    short = replace(lab, budget=12, max_new_tokens=14, max_context=160, trace_steps=1, log_interval=1)
    for fault in (*FAULTS, *HEALTHY):
        if fault.name == left_out:
            continue
        step(f"inject {fault.name}")
        evidence = short.gather(fault)
        yield verdict_row(fault, evidence, investigate(evidence), target)


def verdict_row(
    fault: "Fault", evidence: "Evidence", conclusion: "Conclusion", target: HardwareTarget
) -> Row:
    """PASSED when the cause that was injected is the one that was concluded."""
    is_right = (conclusion.cause, conclusion.found_by) == (fault.cause, fault.found_by)
    replay, found = evidence.result.replay, evidence.audit
    metrics: dict[str, Scalar] = {
        "injected": fault.cause, "concluded": conclusion.cause, "found_by": conclusion.found_by,
        "is_right": is_right, "because": conclusion.text, "symptom": fault.symptom, "log": fault.log,
        "fix": fault.fix, "replay_share": replay.share, "replayed": replay.replayed, "eager": replay.eager,
        "unknown": replay.unknown,
        "accept_length": evidence.result.mean_accept_length, "lies": len(evidence.lies),
        "graph_launches": found.mean("graph_launches"), "eager_launches": found.mean("eager_launches"),
        "busy_share": found.mean("busy_share"),
    }  # fmt: skip
    reason = (
        "" if is_right else f"injected {fault.cause}, concluded {conclusion.cause} by {conclusion.found_by}"
    )
    return Row(
        case_id=f"{fault.name}-verdict", experiment=EXPERIMENT, variant=fault.name, target=target.name,
        origin=Origin.MEASURED, status=RowStatus.PASSED if is_right else RowStatus.INCORRECT, reason=reason,
        axes={"run": "verdict", "fault": fault.name}, metrics=metrics,
        repro=f"workbench run 60_moment_of_truth --target {target.name} -p fault={fault.name}",
    )  # fmt: skip


def user_rows(paths: str, target: HardwareTarget) -> Iterable[Row]:
    """What the user's own logs and traces say: one row for the verdict, one per cause."""
    from workbench.diagnose import diagnose

    diagnosis = diagnose([part.strip() for part in paths.split(",") if part.strip()])
    replay = diagnosis.replay
    shared: dict[str, Any] = {
        "experiment": EXPERIMENT, "variant": "user_input", "target": target.name, "origin": Origin.DERIVED,
        "status": RowStatus.PASSED,
    }  # fmt: skip
    yield Row(
        case_id="user-verdict", axes={"run": "user"}, **shared,
        metrics={
            "state": replay.state, "unit": replay.unit, "replayed": replay.replayed, "eager": replay.eager,
            "unknown": replay.unknown, "accept_length": diagnosis.mean_accept_len,
            "findings": ", ".join(finding.id for finding in diagnosis.findings),
        },
    )  # fmt: skip
    for cause in diagnosis.causes:
        yield Row(
            case_id=f"user-{cause.id}", axes={"run": "user_cause"}, **shared,
            metrics={
                "cause": cause.id, "likelihood": cause.likelihood, "because": cause.why,
                "next": cause.next_experiment,
            },
        )  # fmt: skip
