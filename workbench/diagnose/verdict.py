"""diagnose(paths): read every file, let the rules speak, weigh the sources, answer with one Diagnosis."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.diagnose import (
    gpu_monitor,
    kineto,
    large_text,
    nsys_sqlite,
    nsys_text,
    rules,
    server_info,
    sglang,
    tensorrt_llm,
    vllm,
)
from workbench.diagnose.combination import contradictions, disagreements, only_value, weigh
from workbench.diagnose.lines import decode_text, describe_content, looks_binary, read_bytes, split_lines
from workbench.diagnose.reading import UNRECOGNISED, Cause, Finding, Reading, Replay

SCHEMA_VERSION = 1
LIKELIHOODS = ("stated", "likely", "possible", "excluded")
SEVERITIES = ("problem", "warning", "info")


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


def diagnose(
    paths: str | Path | Sequence[str | Path], progress: large_text.Progress | None = None
) -> Diagnosis:
    """Diagnose files, or the files directly inside folders. Raises FileNotFoundError for a missing path.

    `progress(file, bytes done, bytes in all)` is called while a large log is read.
    """
    files = list(expand([paths] if isinstance(paths, str | Path) else paths))
    if not files:
        raise ValueError("nothing to diagnose: give at least one log, trace or profiler summary")
    readings = [reading for path in files for reading in read_file(path, progress)]
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


def read_file(path: Path, progress: large_text.Progress | None = None) -> list[Reading]:
    """What the file is, decided by its content; more than one reading when two engines wrote into it."""
    if large_text.is_large_text(path):
        found = large_text.read_engine_lines(path, progress)
        engines = _read_engines(found[0]) if found else []
        if found and engines:
            return [_place(reading, path, found[1]) for reading in engines]
    raw, warnings = read_bytes(path)
    if raw.startswith(nsys_sqlite.MAGIC):
        readings = [nsys_sqlite.read(path)]
    elif raw.lstrip()[:1] in (b"{", b"["):
        readings = _read_json(raw) or _read_text(decode_text(raw))
    elif looks_binary(raw):
        readings = [Reading(UNRECOGNISED)]
    else:
        readings = _read_text(decode_text(raw))
    for reading in readings:
        if reading.kind == UNRECOGNISED and not reading.warnings:
            reading.warnings.append(f"nothing recognised: {describe_content(raw)}")
        _place(reading, path, warnings)
    return readings


def _place(reading: Reading, path: Path, warnings: list[str]) -> Reading:
    reading.path, reading.warnings = str(path), warnings + reading.warnings
    return reading


def _read_json(raw: bytes) -> list[Reading]:
    """A Chrome trace, or nothing; text that only starts like JSON goes to the text readers."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        if b'"traceEvents"' not in raw[:1_000_000]:
            return []
        return [
            Reading(
                UNRECOGNISED, warnings=["nothing recognised: the trace is cut or damaged: export it again"]
            )
        ]
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if isinstance(document, dict) and "disable_cuda_graph" in document:
        return [server_info.read(document)]
    if not isinstance(events, list) or not any(isinstance(event, dict) and "ph" in event for event in events):
        return []
    return [kineto.read(document)]


def _read_text(text: str) -> list[Reading]:
    """The engines whose lines are in the text, else a profiler or monitor table, else unrecognised."""
    lines = split_lines(text)
    found = _read_engines(lines, text)
    found = found or [one for one in (nsys_text.read(lines), gpu_monitor.read(lines)) if one]
    return found or [Reading(UNRECOGNISED)]


def _read_engines(lines: list[str], text: str = "") -> list[Reading]:
    """The engines whose lines these are; TensorRT-LLM's records go over lines and need the text."""
    engines = [found for found in (sglang.read(lines), vllm.read(lines), tensorrt_llm.read(text)) if found]
    engines = [one for one in engines if _has_evidence(one)] or engines[:1]
    if len(engines) > 1:
        finding = Finding(
            "two_engines_in_one_file", "warning", "two engines wrote into this file: read separately"
        )
        engines[0].findings.append(finding)
    return engines


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
    """Every source's own verdict, then what may be said of all of them together."""
    diagnosis = Diagnosis()
    diagnosis.sources = [_source(reading) for reading in readings]
    diagnosis.replay = weigh(readings)
    diagnosis.mean_accept_len = only_value(r.mean_accept_len for r in readings)
    diagnosis.mean_tok_s = only_value(r.mean_tok_s for r in readings)
    diagnosis.excluded_lines = sum(r.excluded_lines for r in readings)
    diagnosis.findings = _sort_findings(readings)
    diagnosis.causes = _sort_causes(readings)
    for reading in readings:
        diagnosis.warnings += [
            line for text in reading.warnings if (line := f"{reading.path}: {text}") not in diagnosis.warnings
        ]
    return diagnosis


def _source(reading: Reading) -> dict[str, Any]:
    return {
        "path": reading.path, "kind": reading.kind, "summary": reading.summary,
        "replay": asdict(reading.replay), "acceptance": {"mean_len": reading.mean_accept_len},
        "throughput": {"mean_tok_s": reading.mean_tok_s, "excluded_lines": reading.excluded_lines},
    }  # fmt: skip


def _name_source(one: Any, reading: Reading, readings: Sequence[Reading]) -> Any:
    """The finding or cause with its file, where there are several."""
    return replace(one, source=reading.path) if len(readings) > 1 else one


def _sort_findings(readings: Sequence[Reading]) -> list[Finding]:
    """Each finding once per source, the worst first; what differs between sources leads."""
    found = [*disagreements(readings)]
    found += [_name_source(one, r, readings) for r in readings for one in r.findings]
    kept = {(one.id, one.source): one for one in reversed(found)}
    return sorted(kept.values(), key=lambda one: (SEVERITIES.index(one.severity), bool(one.source), one.id))


def _sort_causes(readings: Sequence[Reading]) -> list[Cause]:
    """Each cause once per source, with its strongest likelihood, strongest first."""
    found = [*contradictions(readings)]
    found += [_name_source(one, r, readings) for r in readings for one in r.causes]
    kept: dict[tuple[str, str], Cause] = {}
    for one in found:
        known = kept.get((one.id, one.source))
        if known is None or LIKELIHOODS.index(one.likelihood) < LIKELIHOODS.index(known.likelihood):
            kept[one.id, one.source] = one
    return sorted(kept.values(), key=lambda one: (LIKELIHOODS.index(one.likelihood), one.id))
