"""Nsight Systems text: `nsys stats` tables (any columns, CSV too) and per-range summaries."""

import csv
import re
from dataclasses import dataclass, field

from workbench.diagnose.reading import Reading, Replay

KIND = "nsys_stats"
LAUNCH = re.compile(
    r"^(?:cuda|cu|hip)(?P<kind>GraphLaunch|LaunchKernel(?:ExC|Ex)?|(?:Ext)?ModuleLaunchKernel|LaunchCooperativeKernel\w*)(?:_v\d+|_ptsz|_ptds)*$"
)
BEGIN_CAPTURE = re.compile(r"^(?:cuda|cu|hip)StreamBeginCapture\w*$")
END_CAPTURE = re.compile(r"^(?:cuda|cu|hip)StreamEndCapture\w*$")
PROFILER_CALL = re.compile(r"^(?:cuda|cu)Profiler(?:Start|Stop|Initialize)\b")
TITLE = re.compile(
    r"\*\* (?P<title>[\w /().-]+?) ?\((?P<report>\w+)\)|^(?P<csv>\w+_sum|cudaapisum|gpukernsum)\s*$"
)
HEAD = re.compile(r"Time ?\(%\)|\"Time \(%\)\"")
TABLE_ROW = re.compile(r"^\s*(?P<pct>\d+(?:\.\d+)?)\s+(?P<total>[\d,]+)\s+(?P<n>[\d,]+)\s+(?P<rest>.+)$")
RANGE_HEAD = re.compile(r"^#+ (?P<name>\S.*)$")
RANGE_VALUE = re.compile(r"^\s*- (?P<key>[\w ()-]+?)(?: count)?: (?P<value>\d+)(?:,|\s|$)(?P<rest>.*)$")
RUNTIME_VALUE = re.compile(r"^\s*- (?P<name>\w+): count=(?P<n>\d+)")
STALE = re.compile(r"(?i)existing sqlite export found")
DECODE_RANGE = re.compile(r"(?i)decode|verify|generation")


@dataclass
class Range:
    """Counts inside one NVTX range."""

    name: str
    instances: int = 0
    kernels: int = 0
    graph_traces: int = 0
    graph_nodes: int = 0
    graph_launches: int = 0
    eager_launches: int = 0

    @property
    def is_decode(self) -> bool:
        return bool(DECODE_RANGE.search(self.name)) and not re.search(
            r"(?i)prefill|context|extend", self.name
        )


@dataclass
class NsysFacts:
    """Everything the rules ask about one summary."""

    graph_launches: int = 0
    eager_launches: int = 0
    begin_captures: int = 0
    end_captures: int = 0
    api_ns: int = 0
    kernel_ns: int = 0
    kernels: int = 0
    tables: int = 0
    ranges: list[Range] = field(default_factory=list)
    truncated: int = 0
    stale: bool = False
    api_truncated: bool = False

    @property
    def capture_pairs(self) -> int:
        return min(self.begin_captures, self.end_captures) or max(self.begin_captures, self.end_captures)


def read(lines: list[str]) -> Reading | None:
    """The summary's reading, or None when the text holds no nsys table and no range summary."""
    facts = NsysFacts()
    _read_ranges(lines, facts)
    if not facts.ranges:
        _read_tables(lines, facts)
    facts.stale = any(STALE.search(line) for line in lines)
    if not facts.tables and not facts.ranges:
        return None
    return _summarise(facts)


def _read_tables(lines: list[str], facts: NsysFacts) -> None:
    """Walk the tables; a heading decides whether rows are calls or kernels."""
    section = ""
    last_row_number = 0
    for number, line in enumerate(lines, 1):
        title = TITLE.search(line)
        if title:
            section = (title["report"] or title["csv"] or "").lower()
        if HEAD.search(line):
            facts.tables += 1
            if not section:
                section = "kern" if "Instances" in line else "api"
            continue
        row = _parse_row(line) if facts.tables else None
        if row:
            _count_row(section, *row, facts)
            last_row_number = number
    _read_table_end(lines, last_row_number, section, facts)


def _parse_row(line: str) -> tuple[str, int, int] | None:
    """(name, total ns, calls) of a table row, aligned or CSV; None for anything else."""
    if line.count(",") >= 6 and re.match(r'^\s*"?\d+(\.\d+)?"?,', line):
        cells = [cell.strip() for cell in next(csv.reader([line.replace("\0", "")], skipinitialspace=True))]
        if len(cells) < 7:
            return None
        total, calls = cells[1].replace(",", ""), cells[2].replace(",", "")
        return (cells[-1], int(total[:18]), int(calls[:15])) if total.isdigit() and calls.isdigit() else None
    found = TABLE_ROW.match(line.replace("|", "  "))  # pasted as Markdown
    if not found:
        return None
    chunks = re.split(r"\s{2,}", found["rest"].strip())
    name = chunks[-1]
    if len(chunks) < 2 or re.fullmatch(r"[\d,. ]+", name):
        return None  # cut before the name
    return name, int(found["total"].replace(",", "")[:18] or 0), int(found["n"].replace(",", "")[:15] or 0)


def _count_row(section: str, name: str, total_ns: int, calls: int, facts: NsysFacts) -> None:
    if "kern" in section:
        facts.kernels += calls
        facts.kernel_ns += total_ns
        return
    if PROFILER_CALL.match(name):
        return  # its duration is the profile's, not the program's
    facts.api_ns += total_ns
    launch = LAUNCH.match(name)
    if launch and launch["kind"] == "GraphLaunch":
        facts.graph_launches += calls
    elif launch:
        facts.eager_launches += calls
    facts.begin_captures += calls if BEGIN_CAPTURE.match(name) else 0
    facts.end_captures += calls if END_CAPTURE.match(name) else 0


def _read_table_end(lines: list[str], last_row: int, section: str, facts: NsysFacts) -> None:
    """A last line that starts like a row and has no name is cut; an ellipsis in a name is nsys's own."""
    last = next((n for n in range(len(lines), 0, -1) if lines[n - 1].strip()), 0)
    if (last and last != last_row and re.match(r"^\s*\d+(?:\.\d*)?(?:\s+[\d,]*.*)?$", lines[last - 1])) or (
        last and (HEAD.search(lines[last - 1]) or re.fullmatch(r"[\s-]+", lines[last - 1])) and facts.tables
    ):
        facts.truncated += 1
        facts.api_truncated = "kern" not in section


def _read_ranges(lines: list[str], facts: NsysFacts) -> None:
    """`## range` blocks of counts."""
    current: Range | None = None
    for line in lines:
        head = RANGE_HEAD.match(line)
        if head:
            current = Range(head["name"][:200])
            continue
        value, runtime = RANGE_VALUE.match(line), RUNTIME_VALUE.match(line)
        if current is None or not (value or runtime):
            continue
        if (
            value
            and _note_range(current, value["key"], int(value["value"][:15]))
            and current not in facts.ranges
        ):
            facts.ranges.append(current)
        if runtime and not value:
            _note_runtime(current, runtime["name"], int(runtime["n"][:15]))


def _note_range(current: Range, key: str, value: int) -> bool:
    names = {
        "range": "instances", "kernel": "kernels", "graph trace": "graph_traces",
        "kernel graphNodeId non-null": "graph_nodes", "cudaGraphLaunch": "graph_launches",
        "cudaLaunchKernel": "eager_launches",
    }  # fmt: skip
    name = names.get(key.strip())
    if name:
        setattr(current, name, value)
    return name in ("instances", "graph_traces", "graph_launches", "eager_launches")


def _note_runtime(current: Range, name: str, calls: int) -> None:
    """Launch calls the summary's own counters leave out (the driver's, ExC, cooperative)."""
    launch = LAUNCH.match(name)
    counted = name.startswith(("cudaLaunchKernel_v", "cudaGraphLaunch")) or name == "cudaLaunchKernel"
    if launch and launch["kind"] != "GraphLaunch" and not counted:
        current.eager_launches += calls


def _summarise(facts: NsysFacts) -> Reading:
    if facts.ranges:
        facts.graph_launches = sum(one.graph_launches for one in facts.ranges)
        facts.eager_launches = sum(one.eager_launches for one in facts.ranges)
    summary = {
        "graph_launches": facts.graph_launches,
        "eager_launches": facts.eager_launches,
        "capture_pairs": facts.capture_pairs,
        "kernels": sum(one.kernels for one in facts.ranges) if facts.ranges else facts.kernels,
        "ranges": len(facts.ranges),
        "truncated_lines": facts.truncated,
    }
    return Reading(KIND, summary, _replay(facts), facts)


def _replay(facts: NsysFacts) -> Replay:
    """Ranges decide; a whole process only when nothing was captured and no row is missing."""
    decode = [one for one in facts.ranges if one.is_decode]
    if decode:
        replayed = sum(min(one.graph_launches, one.instances) for one in decode)
        eager = sum(max(one.instances - one.graph_launches, 0) for one in decode)
        state = (
            "unknown"
            if not replayed + eager
            else "mixed"
            if replayed and eager
            else "all_replayed"
            if replayed
            else "all_eager"
        )
        return Replay(state, "decode ranges", replayed, eager)  # type: ignore[arg-type]
    if (
        facts.ranges
        or facts.capture_pairs
        or facts.api_truncated
        or not facts.graph_launches + facts.eager_launches
    ):
        return Replay("unknown", "launch calls of the whole process")
    if not facts.graph_launches:
        return Replay("all_eager", "launch calls of the whole process", 0, facts.eager_launches)
    return Replay("unknown", "launch calls of the whole process")
