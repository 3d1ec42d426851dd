"""SGLang's decode and prefill events: found inside a line, judged whole or cut."""

import re
from collections import Counter
from dataclasses import dataclass

EVENT = re.compile(r"(?<!\w)(?P<kind>Decode|Prefill) batch(?: \[(?P<it>\d+)\])?(?P<mark>[.,]|$)(?P<body>.*)$")
FIELD = re.compile(
    r"(?:^|, )(?P<key>#?[A-Za-z][\w .()/-]*?): (?P<value>\[[^\]]*\]|True|False|-?\d+(?:\.\d+)?%?|nan%?|inf)"
    r"(?=,|\s|`|\"|'|$)"
)
GRAPH = re.compile(r"\b(?P<device>[a-z]+(?: [a-z-]+)?) graph: (?P<flag>True|False)\b")
FLAG_WORDS = 64  # characters before the flag that may name its device
KNOWN_KEYS = re.compile(r"#(?:running-req|new-seq|token|queue-req)|accept len|graph|throughput|token usage")
ENDED = re.compile(
    r"(?:#queue-req: \d+|throughput \(token/s\): \d+\.\d+|\(per GPU\): -?(?:\d+\.\d+|nan|inf)"
    r"|occupancy: (?:[\d.]+%|nan%?)"
    r"|#inflight-req: \d+|#pending-token: \d+|graph: (?:True|False))\s*,?\s*[`\"'|]*\s*$"
)
RANK = re.compile(r"(?<![A-Za-z])(ATTN_CP|MOE_DP|DP|PP|TP|EP)(\d+)\b")
PID = re.compile(r"\bpid=(\d+)|\bINFO (\d+) \[")
TIME = re.compile(r"(\d{4}-\d{2}-\d{2})[ T](\d{2}:\d{2}:\d{2})")
PARTIAL_EVENT = re.compile(
    r"(?:\] ?|^)(?:D|De|Dec|Deco|Decod|Decode|Decode b\w{0,3}"
    r"|P|Pr|Pre|Pref|Prefi|Prefil|Prefill|Prefill b\w{0,3})$"
)
OPEN_PREFIX = re.compile(r"(?:^|\) |\| )\[\d{4}-[\d: -]*(?:[A-Z_]+\d+ ?)*[A-Z_]*$")


@dataclass(slots=True)
class Event:
    """One `Decode batch` or `Prefill batch` and what follows it."""

    number: int
    kind: str
    mark: str
    prefix: str
    body: str
    complete: bool

    @property
    def last_key(self) -> str:
        """Name of the last field, for comparison with other lines of the same kind."""
        keys = [found["key"] for found in FIELD.finditer(self.body)]
        return keys[-1] if keys else ""


def find_flag(body: str) -> re.Match[str] | None:
    """The first graph flag of a body."""
    place = body.find(" graph: ")
    while place >= 0:
        found = GRAPH.search(body, max(0, place - FLAG_WORDS), place + 16)
        if found:
            return found
        place = body.find(" graph: ", place + 1)
    return None


def find_events(lines: list[str]) -> list[Event]:
    """Every event of the log; prose that only mentions one is left out."""
    events = []
    last = max((n for n, line in enumerate(lines, 1) if line.strip()), default=0)
    for number, line in enumerate(lines, 1):
        found = EVENT.search(line) if " batch" in line else None
        if found and _is_event(found, line, number == last):
            prefix, body = line[: found.start()], found["body"].strip()
            events.append(Event(number, found["kind"], found["mark"], prefix, body, bool(ENDED.search(line))))
    if events and events[-1].number == last:
        _judge_last(events)
    return events


def _is_event(found: re.Match[str], line: str, is_last: bool) -> bool:
    """A body with a known field, or a cut one behind a log prefix; anything else is prose."""
    body = found["body"].strip()
    if body.startswith("#") or (FIELD.search(body) and KNOWN_KEYS.search(body)):
        return True
    before = line[: found.start()]
    return is_last and bool(TIME.search(before) or RANK.search(before)) and len(body) < 12


def _judge_last(events: list[Event]) -> None:
    """The last line is cut, too, when it ends at a field after which all others of its kind go on."""
    *others, last = events
    usual = Counter(event.last_key for event in others if event.kind == last.kind and event.complete)
    if last.complete and usual and last.last_key not in usual:
        last.complete = False


def complete_fields(event: Event) -> dict[str, str]:
    """Fields whose value is followed by a comma; the last one only on a line that did not break off."""
    values: dict[str, str] = {}
    for found in FIELD.finditer(event.body):
        if event.complete or event.body[found.end() : found.end() + 1] == ",":
            values.setdefault(found["key"], found["value"])
    return values


def has_broken_end(lines: list[str], events: list[Event]) -> bool:
    """Whether the last line broke off before its event was complete."""
    number = next((n for n in range(len(lines), 0, -1) if lines[n - 1].strip()), 0)
    if not events or number in (0, events[-1].number):
        return False
    line = lines[number - 1].rstrip()
    return bool(PARTIAL_EVENT.search(line) or OPEN_PREFIX.search(line) or line.count('"') % 2)
