"""SGLang logs: decode and prefill lines found by their event, never by an anchored prefix."""

import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

from workbench.diagnose.reading import Reading, Replay, mean, state_of
from workbench.diagnose.sglang_events import (
    PID,
    RANK,
    TIME,
    Event,
    complete_fields,
    find_events,
    find_flag,
    has_broken_end,
)

KIND = "sglang_log"
CAPTURE = re.compile(
    r"(?i)Capture (?P<who>[\w ]*?)CUDA graph begin\. backend=(?P<backend>\w+), "
    r"num_tokens_per_(?:req|bs)=(?P<width>\d+), bs=\[(?P<bs>[\d, ]*)\]"
)
OLD_CAPTURE = re.compile(r"(?i)Capture (?P<who>[\w ]*?)cuda graph begin\.")
BAR = re.compile(r"Capturing batches \(bs=(\d+)")
CAPTURE_END = re.compile(r"(?i)Capture [\w ]*?cuda graph end\.")
CAPTURE_FAILED = re.compile(
    r"(?i)(?:capture cuda graph failed|cuda graph capture (?:has )?failed|failed to capture cuda graph)"
)
DISABLED = re.compile(
    r"(?i)disable_cuda_graph=True|cuda graph is disabled|disabl\w+ cuda graph (?:because|since|for|when)"
)
SETTINGS = re.compile(
    r"\b(max_running_requests|speculative_num_draft_tokens|speculative_num_steps|cuda_graph_max_bs|dp_size)=(\d+)"
)
DP_ATTENTION = re.compile(r"enable_dp_attention=True")
COUNTER = re.compile(r'sglang:cuda_graph_passes_total\{[^}]*mode="(\w+)"[^}]*\} ([\d.e+]+)')
SLOW_SHARE = 0.25  # of the median per request: a first line below this spans waiting
PAUSE_S = 20.0  # between two lines of a rank: an idle time


WORDS = (  # in lower case: at least one is in every line that a pattern here or an event can match
    "decode batch", "prefill batch", "cuda graph", "cuda_graph", "capturing batches", "max_running_requests=",
    "speculative_num_", "dp_size=", "enable_dp_attention=",
)  # fmt: skip


def may_matter(low: str) -> bool:
    """Whether a line, in lower case, can hold anything that is read here; cheap, and never wrongly False."""
    return any(word in low for word in WORDS)


@dataclass(slots=True)
class DecodeLine:
    """The fields of one decode line that are complete, None otherwise."""

    number: int
    running: int | None
    flag: bool | None
    accept_len: float | None
    accept_rate: float | None
    tok_s: float | None
    ranks: dict[str, int]
    time: datetime | None
    after_idle: bool = False


@dataclass
class SglangFacts:
    """Everything the rules ask about one log."""

    decode: list[DecodeLine] = field(default_factory=list)
    prefill_lines: int = 0
    prefill_flags: int = 0
    truncated: int = 0
    duplicates: int = 0
    backwards: int = 0
    captured_bs: list[int] = field(default_factory=list)
    captured_width: int | None = None
    drafter_captured: bool = False
    captures_named: bool = False
    capture_lines: int = 0
    late_captures: int = 0
    capture_failed: bool = False
    disabled: bool = False
    dp_attention: bool = False
    settings: dict[str, int] = field(default_factory=dict)
    engines: int = 1
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def span(self) -> tuple[datetime, datetime] | None:
        """Time stamps of the first and last decode line, without a zone as the log has none."""
        times = [line.time for line in self.decode if line.time]
        return (min(times), max(times)) if times else None

    @property
    def known(self) -> list[DecodeLine]:
        return [line for line in self.decode if line.flag is not None]


class Awake:
    """Which ranks have written a decode line since the server was last idle."""

    def __init__(self) -> None:
        self.last: dict[tuple[tuple[str, int], ...], datetime | None] = {}

    def note_prefill(self, body: str) -> None:
        """A prefill beside no running request ends an idle time."""
        if "#running-req: 0," in body:
            self.last.clear()

    def is_first(self, rank: tuple[tuple[str, int], ...], moment: datetime | None) -> bool:
        """Whether this is the rank's first line after a start or an idle time."""
        before = self.last.get(rank)
        paused = before is not None and moment is not None and (moment - before).total_seconds() > PAUSE_S
        is_first = rank not in self.last or paused
        self.last[rank] = moment
        return is_first


def read(lines: list[str]) -> Reading | None:
    """The log's reading, or None when nothing in it is SGLang's."""
    facts, awake = SglangFacts(), Awake()
    events = {event.number: event for event in find_events(lines)}
    for number, line in enumerate(lines, 1):
        event = events.get(number)
        if event is None:
            if may_matter(line.lower()):
                _read_setup(line, facts)
        elif event.kind == "Prefill":
            facts.prefill_lines += 1
            facts.prefill_flags += bool(find_flag(event.body))
            awake.note_prefill(event.body)
        else:
            facts.decode.append(_decode_line(event, awake))
    _compare_events(list(events.values()), lines, facts)
    found = facts.decode or facts.prefill_lines or facts.capture_lines or facts.settings
    return _summarise(facts) if found or facts.counters or facts.disabled else None


def _compare_events(events: list[Event], lines: list[str], facts: SglangFacts) -> None:
    """What only shows between lines: cuts, repeats, clocks that jump, several servers."""
    facts.truncated = sum(not event.complete for event in events) + has_broken_end(lines, events)
    seen = Counter(hash((event.prefix, event.body)) for event in events if TIME.search(event.prefix))
    facts.duplicates = sum(count - 1 for count in seen.values())
    facts.backwards = _count_backwards(facts.decode)
    engines: dict[tuple[tuple[str, str], ...], set[str]] = {}
    for event in events:
        pid = PID.search(event.prefix)
        if pid:
            engines.setdefault(tuple(RANK.findall(event.prefix)), set()).add(pid[1] or pid[2])
    marks = {event.mark for event in events} & {".", ","}
    facts.engines = max([len(pids) for pids in engines.values()] + [len(marks), 1])


def _decode_line(event: Event, awake: Awake) -> DecodeLine:
    values = complete_fields(event)
    graph = find_flag(event.body)
    ranks = {name: int(value[:6]) for name, value in RANK.findall(event.prefix)}
    moment = _parse_time(TIME.search(event.prefix))
    return DecodeLine(
        number=event.number,
        running=_whole(values.get("#running-req") or values.get("#running-req per DP")),
        flag=graph["flag"] == "True" if graph else None,
        accept_len=_number(values.get("accept len")),
        accept_rate=_number(values.get("accept rate")),
        tok_s=_number(values.get("gen throughput (token/s)")),
        ranks=ranks,
        time=moment,
        after_idle=awake.is_first(tuple(sorted(ranks.items())), moment),
    )


def _number(text: str | None) -> float | None:
    try:
        value = float(text.rstrip("%")) if text else None
    except ValueError:
        return None
    return value if value is not None and value == value and abs(value) < 1e12 else None


def _whole(text: str | None) -> int | None:
    """An integer; a list over ranks counts as its sum."""
    if text is None:
        return None
    numbers = re.findall(r"\d+", text) if text.startswith("[") else [text.split(".")[0]]
    return sum(int(n) for n in numbers if n.isdigit() and len(n) < 16)


def _parse_time(stamp: re.Match[str] | None) -> datetime | None:
    if not stamp:
        return None
    try:
        return datetime.fromisoformat(f"{stamp[1]} {stamp[2]}")
    except ValueError:
        return None


def _read_setup(line: str, facts: SglangFacts) -> None:
    """Capture lines, settings, failures and counters."""
    capture = CAPTURE.search(line)
    if capture or OLD_CAPTURE.search(line):
        facts.capture_lines += 1
        facts.late_captures += bool(facts.decode)
        _note_capture(capture, facts)
    bar = BAR.search(line)
    if bar and len(bar[1]) < 8 and int(bar[1]) not in facts.captured_bs and not facts.captures_named:
        facts.captured_bs.append(int(bar[1]))
        facts.capture_lines += 1
    facts.capture_lines += bool(CAPTURE_END.search(line))
    facts.capture_failed = facts.capture_failed or bool(CAPTURE_FAILED.search(line))
    facts.disabled = facts.disabled or bool(DISABLED.search(line))
    facts.dp_attention = facts.dp_attention or bool(DP_ATTENTION.search(line))
    for name, value in SETTINGS.findall(line):
        if len(value) < 12:
            facts.settings[name] = int(value)
    for mode, value in COUNTER.findall(line):
        facts.counters[mode] = int(_number(value) or 0)


def _note_capture(capture: re.Match[str] | None, facts: SglangFacts) -> None:
    """The target's list wins over the drafter's; of the target's, verify wins over plain decode."""
    if capture is None:
        return
    who = capture["who"].lower()
    if "draft" in who:
        facts.drafter_captured = True
        return
    if facts.captures_named and "verify" not in who:
        return
    facts.captures_named = True
    facts.captured_bs = [int(n) for n in re.findall(r"\d+", capture["bs"]) if len(n) < 8]
    facts.captured_width = int(capture["width"]) if len(capture["width"]) < 8 else None


def _count_backwards(decode: list[DecodeLine]) -> int:
    times = [line.time for line in decode if line.time]
    return sum((before - after).total_seconds() > 5 for before, after in pairwise(times))


def _summarise(facts: SglangFacts) -> Reading:
    flags = Counter(line.flag for line in facts.decode)
    accepted = [line.accept_len for line in facts.decode if line.accept_len is not None]
    kept, excluded = split_throughput(facts.decode)
    running = {
        flag: [x.running for x in facts.known if x.flag is flag and x.running is not None]
        for flag in (True, False)
    }
    summary = {
        "decode_lines": len(facts.decode),
        "graph_true": flags[True],
        "graph_false": flags[False],
        "graph_unknown": flags[None],
        "prefill_lines": facts.prefill_lines,
        "truncated_lines": facts.truncated,
        "duplicate_lines": facts.duplicates,
        "accept_len_mean": mean(accepted),
        "running_req_max_replayed": max(running[True], default=None),
        "running_req_min_eager": min(running[False], default=None),
        "captured_bs": sorted(facts.captured_bs),
        "captured_width": facts.captured_width,
    }
    reading = Reading(KIND, summary, _replay(facts, flags), facts, mean_accept_len=mean(accepted))
    reading.mean_tok_s, reading.excluded_lines = mean(kept), excluded
    return reading


def _replay(facts: SglangFacts, flags: Counter[bool | None]) -> Replay:
    if facts.counters and not facts.decode:
        replayed, eager = facts.counters.get("decode_cuda_graph", 0), facts.counters.get("decode_none", 0)
        return Replay(state_of(replayed, eager), "decode passes (counter)", replayed, eager)
    state = state_of(flags[True], flags[False]) if facts.decode else "unknown"
    if not facts.decode and facts.prefill_lines:
        state = "not_applicable"
    return Replay(state, "decode log lines", flags[True], flags[False], flags[None])


def split_throughput(decode: list[DecodeLine]) -> tuple[list[float], int]:
    """(throughputs that mean something, lines left out): a line after idle time spans the waiting."""
    rated = [(line, line.tok_s / max(line.running or 1, 1)) for line in decode if line.tok_s is not None]
    if len(rated) < 2:
        return [line.tok_s for line, _ in rated if line.tok_s is not None], 0
    ordered = sorted(rate for _, rate in rated)
    median = ordered[len(ordered) // 2]
    slow = {line.number for line, rate in rated if line.after_idle and rate < SLOW_SHARE * median}
    return [x.tok_s for x, _ in rated if x.tok_s is not None and x.number not in slow], len(slow)
