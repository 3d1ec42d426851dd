"""TensorRT-LLM iteration logs: records may be wrapped over lines and printed twice; no graph flag exists."""

import re
from dataclasses import dataclass, field

from workbench.diagnose.reading import Reading, Replay, mean

KIND = "trtllm_log"
START = re.compile(r"\biter = (\d+), ")
VALUE = re.compile(
    r"'?\b(num_scheduled_requests|num_ctx_requests|num_ctx_tokens|num_generation_tokens|rank)'?\s*[:=]\s*(\d+)"
)
HOST_MS = re.compile(r"host_step_time\s*=\s*([\d.]+)\s*ms")
ELAPSED_S = re.compile(r"elapsed_time\s*=\s*([\d.eE+-]+)\s*s\b")
DEVICE = re.compile(r"prev_device_step_time\s*=\s*(N/A|[\d.]+\s*ms)")
DRAFT = re.compile(r"(?i)speculative|draft_len|num_nextn|'num_draft")
JSON_ITERATION = re.compile(r'"Iteration Counter"\s*:\s*(\d+)')
RECORD_LIMIT = 4000  # characters a wrapped record may span


@dataclass
class Iteration:
    """One iteration of one rank, its printings merged."""

    number: int
    rank: int
    scheduled: int | None = None
    context: int | None = None
    generation: int | None = None
    host_ms: float | None = None
    warmup: bool = False

    @property
    def padded(self) -> bool:
        """More generation tokens than requests, without context requests: padded to a captured size."""
        known = self.scheduled is not None and self.generation is not None
        return bool(known and self.context == 0 and (self.generation or 0) > (self.scheduled or 0))


@dataclass
class TrtFacts:
    """Everything the rules ask about one log."""

    iterations: list[Iteration] = field(default_factory=list)
    printed: int = 0
    drafts: bool = False
    truncated: int = 0

    @property
    def warmups(self) -> int:
        return sum(one.warmup for one in self.iterations)

    @property
    def padded(self) -> int:
        return 0 if self.drafts else sum(one.padded for one in self.iterations)


def read(text: str) -> Reading | None:
    """The log's reading, or None when it holds no iteration record."""
    if "Iteration Counter" in text:
        return _read_json_form(text)
    if "iter = " not in text or not re.search(
        r"TRT-LLM|_torch|num_scheduled_requests|currank_total_requests", text
    ):
        return None
    facts = TrtFacts(drafts=bool(DRAFT.search(text)))
    merged: dict[tuple[int, int], Iteration] = {}
    starts = [found.start() for found in START.finditer(text)]
    for place, start in enumerate(starts):
        stop = starts[place + 1] if place + 1 < len(starts) else len(text)
        record = text[start : min(stop, start + RECORD_LIMIT)]
        one = _parse(record)
        if one is None:
            continue
        facts.printed += 1
        facts.truncated += place + 1 == len(starts) and "states = {" in text and "}" not in record
        _merge(merged.setdefault((one.number, one.rank), one), one)
    if not merged:
        return None
    facts.iterations = list(merged.values())
    return _summarise(facts)


def _read_json_form(text: str) -> Reading | None:
    """The older backend's JSON records behind a log prefix, possibly wrapped inside keys: only counted."""
    numbers = {found[:15] for found in JSON_ITERATION.findall(text)}
    facts = TrtFacts(
        iterations=[Iteration(int(number), 0) for number in sorted(numbers)], printed=len(numbers)
    )
    return _summarise(facts) if numbers else None


def _parse(record: str) -> Iteration | None:
    found = START.match(record)
    if not found or len(found[1]) > 15:
        return None
    values = {name: int(value[:15]) for name, value in VALUE.findall(record)}
    host, elapsed, device = HOST_MS.search(record), ELAPSED_S.search(record), DEVICE.search(record)
    milliseconds = _number(host[1]) if host else None
    if milliseconds is None and elapsed:
        seconds = _number(elapsed[1])
        milliseconds = None if seconds is None else 1e3 * seconds
    return Iteration(
        number=int(found[1]),
        rank=values.get("rank", 0),
        scheduled=values.get("num_scheduled_requests"),
        context=values.get("num_ctx_requests"),
        generation=values.get("num_generation_tokens"),
        host_ms=milliseconds,
        warmup=bool(device and device[1] == "N/A"),
    )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < 1e12 else None


def _merge(kept: Iteration, other: Iteration) -> None:
    """Fill what the first printing left out."""
    for name in ("scheduled", "context", "generation", "host_ms"):
        if getattr(kept, name) is None:
            setattr(kept, name, getattr(other, name))
    kept.warmup = kept.warmup or other.warmup


def _summarise(facts: TrtFacts) -> Reading:
    steps = [one.host_ms for one in facts.iterations if one.host_ms is not None and not one.warmup]
    summary = {
        "iterations": len(facts.iterations),
        "records_printed": facts.printed,
        "graph_padded_iterations": facts.padded,
        "host_step_ms_mean": mean(steps),
        "warmup_iterations": facts.warmups,
    }
    return Reading(KIND, summary, Replay("unknown", "iterations", unknown=len(facts.iterations)), facts)
