"""diagnose(paths): read every file, let the rules speak, weigh the sources, answer with one Diagnosis."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.diagnose import (
    gpu_monitor,
    kineto,
    nsys_sqlite,
    nsys_text,
    rules,
    server_info,
    sglang,
    tensorrt_llm,
    vllm,
)
from workbench.diagnose.catalogue import cause
from workbench.diagnose.lines import decode_text, looks_binary, read_bytes, split_lines
from workbench.diagnose.reading import UNRECOGNISED, Cause, Finding, Reading, Replay, state_of

SCHEMA_VERSION = 1
LIKELIHOODS = ("stated", "likely", "possible", "excluded")
SEVERITIES = ("problem", "warning", "info")
STRENGTH = (kineto.KIND, nsys_sqlite.KIND, nsys_text.KIND, vllm.KIND, sglang.KIND, tensorrt_llm.KIND)
TRACES = (kineto.KIND, nsys_sqlite.KIND)


@dataclass
class Diagnosis:
    """The answer: were graphs replayed during decode, and what may be said from these files."""

    sources: list[dict[str, Any]] = field(default_factory=list)
    replay: Replay = field(default_factory=lambda: Replay("not_applicable"))
    mean_accept_len: float | None = None
    mean_tok_s: float | None = None
    excluded_lines: int = 0
    findings: list[Finding] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The documented schema, ready for JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "sources": self.sources,
            "replay": asdict(self.replay),
            "acceptance": {"mean_len": self.mean_accept_len},
            "throughput": {"mean_tok_s": self.mean_tok_s, "excluded_lines": self.excluded_lines},
            "findings": [asdict(finding) for finding in self.findings],
            "causes": [asdict(one) for one in self.causes],
            "warnings": self.warnings,
        }


def diagnose(paths: str | Path | Sequence[str | Path]) -> Diagnosis:
    """Diagnose files, or the files directly inside folders. Raises FileNotFoundError for a missing path."""
    files = list(expand([paths] if isinstance(paths, str | Path) else paths))
    if not files:
        raise ValueError("nothing to diagnose: give at least one log, trace or profiler summary")
    readings = [reading for path in files for reading in read_file(path)]
    for reading in readings:
        rules.apply(reading)
    return combine(readings)


def expand(paths: Iterable[str | Path]) -> Iterable[Path]:
    """Files as they are, folders as their files in order of name."""
    for path in map(Path, paths):
        if path.is_dir():
            yield from sorted(
                child for child in path.iterdir() if child.is_file() and not child.name.startswith(".")
            )
        elif path.is_file():
            yield path
        else:
            raise FileNotFoundError(f"no file {path}: give the path of a log, a trace or a profiler summary")


def read_file(path: Path) -> list[Reading]:
    """What the file is, decided by its content; more than one reading when two engines wrote into it."""
    raw, warnings = read_bytes(path)
    if raw.startswith(nsys_sqlite.MAGIC):
        readings = [nsys_sqlite.read(path)]
    elif raw.lstrip()[:1] in (b"{", b"["):
        readings = _read_json(raw) or _read_text(decode_text(raw))
    elif looks_binary(raw):
        readings = [Reading(UNRECOGNISED, warnings=["binary data: export it as text, SQLite or JSON first"])]
    else:
        readings = _read_text(decode_text(raw))
    for reading in readings:
        reading.path = str(path)
        reading.warnings = warnings + reading.warnings
    return readings


def _read_json(raw: bytes) -> list[Reading]:
    """A Chrome trace, or nothing; text that only starts like JSON goes to the text readers."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        if b'"traceEvents"' not in raw[:1_000_000]:
            return []
        return [Reading(UNRECOGNISED, warnings=["the trace is cut or damaged: export it again"])]
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if isinstance(document, dict) and "disable_cuda_graph" in document:
        return [server_info.read(document)]
    if not isinstance(events, list) or not any(isinstance(event, dict) and "ph" in event for event in events):
        return []
    return [kineto.read(document)]


def _read_text(text: str) -> list[Reading]:
    """The engines whose lines are in the text, else a profiler or monitor table, else unrecognised."""
    lines = split_lines(text)
    engines = [found for found in (sglang.read(lines), vllm.read(lines), tensorrt_llm.read(text)) if found]
    engines = [one for one in engines if _has_evidence(one)] or engines[:1]
    if len(engines) > 1:
        finding = Finding(
            "two_engines_in_one_file", "warning", "two engines wrote into this file: read separately"
        )
        engines[0].findings.append(finding)
    found = engines or [one for one in (nsys_text.read(lines), gpu_monitor.read(lines)) if one]
    return found or [Reading(UNRECOGNISED)]


def _has_evidence(reading: Reading) -> bool:
    """More than a setting that both engines could print."""
    summary = reading.summary
    counted = (
        "decode_lines",
        "prefill_lines",
        "stat_lines",
        "spec_lines",
        "iterations",
        "dispatch",
        "captured_bs",
    )
    return any(summary.get(name) for name in counted) or bool(summary.get("configured_mode"))


def combine(readings: list[Reading]) -> Diagnosis:
    """One answer: the strongest source that tells decides the state, contradictions become causes."""
    diagnosis = Diagnosis()
    diagnosis.sources = [{"path": r.path, "kind": r.kind, "summary": r.summary} for r in readings]
    diagnosis.replay = weigh(readings)
    accepted = [r.mean_accept_len for r in readings if r.mean_accept_len is not None]
    rates = [r.mean_tok_s for r in readings if r.mean_tok_s is not None]
    diagnosis.mean_accept_len = round(sum(accepted) / len(accepted), 4) if accepted else None
    diagnosis.mean_tok_s = round(sum(rates) / len(rates), 4) if rates else None
    diagnosis.excluded_lines = sum(r.excluded_lines for r in readings)
    diagnosis.findings = _sort_findings([finding for r in readings for finding in r.findings])
    diagnosis.causes = _sort_causes([*contradictions(readings), *(one for r in readings for one in r.causes)])
    for reading in readings:
        diagnosis.warnings += [text for text in reading.warnings if text not in diagnosis.warnings]
    return diagnosis


def weigh(readings: list[Reading]) -> Replay:
    """The strongest kind with a definite state; its files are added up. Else unknown, else not applicable."""
    for kind in STRENGTH:
        own = [r.replay for r in readings if r.kind == kind]
        definite = [replay for replay in own if replay.state in ("all_replayed", "all_eager", "mixed")]
        if definite:
            return _add_up(own, definite)
    unknown = [r.replay for r in readings if r.replay.state == "unknown"]
    return unknown[0] if unknown else Replay("not_applicable")


def _add_up(own: list[Replay], definite: list[Replay]) -> Replay:
    if len(own) == 1:
        return own[0]
    replayed, eager = sum(r.replayed for r in own), sum(r.eager for r in own)
    states = {replay.state for replay in definite}
    state = next(iter(states)) if len(states) == 1 else "mixed"
    state = state_of(replayed, eager) if state == "mixed" and not (replayed and eager) else state
    return Replay(state, definite[0].unit, replayed, eager, sum(r.unknown for r in own))


def contradictions(readings: list[Reading]) -> Iterable[Cause]:
    """A log that says False beside a trace or counter that shows replay."""
    logs = [r for r in readings if r.kind == sglang.KIND and r.replay.eager and r.summary["decode_lines"]]
    shown = [r for r in readings if r.kind in TRACES and r.replay.state == "all_replayed"]
    counted = [r for r in readings if r.kind == sglang.KIND and r.facts.counters.get("decode_cuda_graph", 0)]
    counted = [r for r in counted if r.facts.counters.get("decode_none", 0) == 0]
    if logs and (shown or counted):
        said, seen = logs[0].replay, (shown or counted)[0]
        source = "the trace shows" if shown else "the counter says"
        why = (
            f"{said.eager} of {said.replayed + said.eager} log lines say False, {source} replay ({seen.kind})"
        )
        yield cause("flag_not_propagated", "likely", why)


def _sort_findings(findings: list[Finding]) -> list[Finding]:
    kept = {finding.id: finding for finding in reversed(findings)}
    return sorted(kept.values(), key=lambda finding: (SEVERITIES.index(finding.severity), finding.id))


def _sort_causes(causes: list[Cause]) -> list[Cause]:
    """Each cause once, with its strongest likelihood, strongest first."""
    kept: dict[str, Cause] = {}
    for one in causes:
        known = kept.get(one.id)
        if known is None or LIKELIHOODS.index(one.likelihood) < LIKELIHOODS.index(known.likelihood):
            kept[one.id] = one
    return sorted(kept.values(), key=lambda one: (LIKELIHOODS.index(one.likelihood), one.id))
