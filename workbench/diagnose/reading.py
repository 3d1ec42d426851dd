"""What readers return and a diagnosis consists of. Nothing here holds a raw line of the input."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["all_replayed", "all_eager", "mixed", "unknown", "not_applicable"]
Severity = Literal["info", "warning", "problem"]
Likelihood = Literal["stated", "likely", "possible", "excluded"]


@dataclass(frozen=True)
class Replay:
    """How often graphs were replayed, in the unit that the source counts."""

    state: State
    unit: str = ""
    replayed: int = 0
    eager: int = 0
    unknown: int = 0


@dataclass(frozen=True)
class Finding:
    """Something the input shows. `evidence` holds counts and line numbers, never text of the input."""

    id: str
    severity: Severity
    text: str
    evidence: str = ""
    source: str = ""  # path of its file, where several were given


@dataclass(frozen=True)
class Cause:
    """A possible reason for eager decode and the experiment that decides it."""

    id: str
    likelihood: Likelihood
    why: str
    next_experiment: str
    source: str = ""  # path of its file, where several were given


@dataclass
class Reading:
    """One file as its reader understood it. `facts` belong to the rules and are not printed."""

    kind: str
    summary: dict[str, Any] = field(default_factory=dict)
    replay: Replay = field(default_factory=lambda: Replay("not_applicable"))
    facts: Any = None
    findings: list[Finding] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    mean_accept_len: float | None = None
    mean_tok_s: float | None = None
    excluded_lines: int = 0
    path: str = ""


UNRECOGNISED = "unrecognised"


def mean(values: Sequence[float], digits: int = 4) -> float | None:
    """Rounded mean; None for no values."""
    return round(sum(values) / len(values), digits) if values else None


def state_of(replayed: int, eager: int, unknown: int = 0) -> State:
    """The state that follows from counts with a known flag; unknown ones are only counted."""
    if replayed and eager:
        return "mixed"
    if replayed or eager:
        return "all_replayed" if replayed else "all_eager"
    return "unknown"
