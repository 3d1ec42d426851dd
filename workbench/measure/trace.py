"""A torch.profiler Chrome trace as per-step records: what ran in graphs, what was launched singly.

CUDA and HIP traces have kernels, each owned by the runtime call with its correlation id. A CPU trace has
none: there a span named `tape_launch` is the launch of a recorded graph, each operation outside it an eager
launch.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAUNCH = re.compile(
    r"^(?:cuda|cu|hip)(?P<kind>GraphLaunch|LaunchKernel(?:ExC|Ex)?|(?:Ext)?ModuleLaunchKernel|LaunchCooperativeKernel\w*)(?:_v\d+|_ptsz|_ptds)*$"
)
CAPTURE = re.compile(r"^(?:cuda|cu|hip)StreamBeginCapture\w*$")
STEP = re.compile(r"^decode_step#(\d+)$")
OTHER_STEP = re.compile(r"^(?:step\[|execute_(?:context_)?\d|ProfilerStep#)")
STAGE = re.compile(r"^stage:(.+)$")
TAPE_LAUNCH = "tape_launch"
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
GAP_US = 2.0  # idle shorter than this is the distance between two kernels, not a gap


@dataclass(frozen=True)
class Span:
    """One complete event, in microseconds."""

    name: str
    start_us: float
    end_us: float
    correlation: int | None = None
    graph_id: int = 0
    thread: str = ""

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us

    def holds(self, other: "Span") -> bool:
        return self.start_us <= other.start_us and other.start_us <= self.end_us


@dataclass
class Trace:
    """The events that matter, by kind."""

    kernels: list[Span] = field(default_factory=list)
    copies: list[Span] = field(default_factory=list)
    launches: list[Span] = field(default_factory=list)
    captures: int = 0
    ops: list[Span] = field(default_factory=list)  # outermost CPU operations
    tape_launches: list[Span] = field(default_factory=list)
    steps: list[Span] = field(default_factory=list)
    other_steps: list[Span] = field(default_factory=list)
    stages: list[Span] = field(default_factory=list)

    @property
    def on_device(self) -> bool:
        return bool(self.kernels)

    @property
    def graph_launches(self) -> list[Span]:
        return [call for call in self.launches if is_graph_launch(call.name)]

    @property
    def eager_launches(self) -> list[Span]:
        return [call for call in self.launches if not is_graph_launch(call.name)]

    def owner(self) -> dict[int, str]:
        """correlation id -> "graph" or "eager"."""
        owners = {}
        for call in self.launches:
            if call.correlation is not None:
                owners[call.correlation] = "graph" if is_graph_launch(call.name) else "eager"
        return owners


@dataclass(frozen=True)
class StepRecord:
    """What one decode step did, read from the trace alone."""

    index: int
    graph_launches: int
    eager_launches: int
    kernels_in_graphs: int
    kernels_eager: int
    kernels_unmatched: int
    busy_us: float
    graph_busy_us: float
    span_us: float
    gap_us: float  # idle stretches of at least 2 us inside the step
    eager_by_stage: dict[str, int] = field(default_factory=dict)

    @property
    def busy_share(self) -> float:
        return min(1.0, self.busy_us / self.span_us) if self.span_us > 0 else 0.0

    @property
    def graph_share(self) -> float | None:
        """Share of the busy time that graphs own; None for a step in which nothing ran."""
        return self.graph_busy_us / self.busy_us if self.busy_us > 0 else None


def is_graph_launch(name: str) -> bool:
    found = LAUNCH.match(name)
    return bool(found and found["kind"] == "GraphLaunch")


def load(path: Path | str) -> Trace:
    """Read a .json or .json.gz trace. Raises ValueError for a file that is no Chrome trace."""
    path = Path(path)
    raw = path.read_bytes()
    try:
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        document = json.loads(text)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no readable Chrome trace ({type(error).__name__}): export it again"
        ) from error
    return parse(document)


def parse(document: Any) -> Trace:
    """The trace of a parsed document (an object with traceEvents, or the bare list)."""
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise ValueError("the document has no list traceEvents: it is no Chrome trace")
    trace = Trace()
    cpu_ops: list[Span] = []
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X":
            _sort_in(event, trace, cpu_ops)
    trace.ops = outermost(cpu_ops)
    for spans in (
        trace.kernels,
        trace.copies,
        trace.launches,
        trace.steps,
        trace.stages,
        trace.tape_launches,
    ):
        spans.sort(key=lambda span: span.start_us)
    return trace


def _sort_in(event: dict[str, Any], trace: Trace, cpu_ops: list[Span]) -> None:
    span = _span(event)
    category = event.get("cat")
    if span is None:
        return
    if category == "kernel":
        trace.kernels.append(span)
    elif category in DEVICE_CATEGORIES:
        trace.copies.append(span)
    elif category in ("cuda_runtime", "cuda_driver", "hip_runtime"):
        trace.captures += bool(CAPTURE.match(span.name))
        if LAUNCH.match(span.name):
            trace.launches.append(span)
    elif category == "cpu_op":
        cpu_ops.append(span)
    elif category == "user_annotation":
        _note_annotation(span, trace)


def _note_annotation(span: Span, trace: Trace) -> None:
    if STEP.match(span.name):
        trace.steps.append(span)
    elif span.name == TAPE_LAUNCH:
        trace.tape_launches.append(span)
    elif STAGE.match(span.name):
        trace.stages.append(span)
    elif OTHER_STEP.match(span.name):
        trace.other_steps.append(span)


def _span(event: dict[str, Any]) -> Span | None:
    """None for an event whose times are no numbers."""
    name, start, duration = event.get("name"), event.get("ts"), event.get("dur", 0)
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    if isinstance(start, str):
        start = _number(start)
    if (
        not isinstance(name, str)
        or not isinstance(start, int | float)
        or not isinstance(duration, int | float)
    ):
        return None
    if start != start or duration != duration or abs(start) > 1e18 or not 0 <= duration < 1e15:
        return None
    graph = args.get("graph id") or args.get("graph node id") or 0
    correlation = args.get("correlation")
    return Span(
        name=name,
        start_us=float(start),
        end_us=float(start) + float(duration),
        correlation=correlation if isinstance(correlation, int) else None,
        graph_id=graph if isinstance(graph, int) else 0,
        thread=f"{event.get('pid')}/{event.get('tid')}",
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def outermost(spans: Iterable[Span]) -> list[Span]:
    """Spans not inside another one of the same thread, in order of time."""
    kept: list[Span] = []
    reach: dict[str, float] = {}
    for span in sorted(spans, key=lambda s: (s.start_us, -s.end_us)):
        if span.start_us >= reach.get(span.thread, float("-inf")):
            kept.append(span)
            reach[span.thread] = span.end_us
    return kept


def kernel_kinds(trace: Trace) -> list[str]:
    """For each kernel: graph, eager or unmatched (launched before the trace began)."""
    owners = trace.owner()
    kinds = []
    for kernel in trace.kernels:
        own = owners.get(kernel.correlation) if kernel.correlation is not None else None
        kinds.append("graph" if kernel.graph_id > 0 or own == "graph" else own or "unmatched")
    return kinds


def steps(trace: Trace) -> list[StepRecord]:
    """One record per `decode_step#k` span, from the trace alone."""
    return [_device_step(trace, span) if trace.on_device else _tape_step(trace, span) for span in trace.steps]


def _index(span: Span) -> int:
    found = STEP.match(span.name)
    return int(found[1][:12]) if found else -1


def _device_step(trace: Trace, step: Span) -> StepRecord:
    """Launch calls inside the step, and the kernels they own wherever on the time line those ran."""
    calls = [call for call in trace.launches if step.holds(call)]
    own = {call.correlation for call in calls if call.correlation is not None}
    kinds = kernel_kinds(trace)
    mine = [
        (k, kind) for k, kind in zip(trace.kernels, kinds) if (k.correlation in own if own else step.holds(k))
    ]
    busy = union(kernel for kernel, _ in mine)
    begin = min([step.start_us] + [k.start_us for k, _ in mine])
    end = max([step.end_us] + [k.end_us for k, _ in mine])
    eager = [call for call in calls if not is_graph_launch(call.name)]
    return StepRecord(
        index=_index(step),
        graph_launches=len(calls) - len(eager),
        eager_launches=len(eager),
        kernels_in_graphs=sum(kind == "graph" for _, kind in mine),
        kernels_eager=sum(kind == "eager" for _, kind in mine),
        kernels_unmatched=sum(kind == "unmatched" for _, kind in mine),
        busy_us=length(busy),
        graph_busy_us=length(union(kernel for kernel, kind in mine if kind == "graph")),
        span_us=end - begin,
        gap_us=gaps(busy, begin, end),
        eager_by_stage=by_stage(trace, eager),
    )


def _tape_step(trace: Trace, step: Span) -> StepRecord:
    """The CPU counterpart: operations inside a tape launch are in the graph."""
    replays = [span for span in trace.tape_launches if step.holds(span)]
    ops = [op for op in trace.ops if step.holds(op)]
    inside = [op for op in ops if any(replay.holds(op) for replay in replays)]
    outside = [op for op in ops if not any(replay.holds(op) for replay in replays)]
    busy = union(ops)
    return StepRecord(
        index=_index(step),
        graph_launches=len(replays),
        eager_launches=len(outside),
        kernels_in_graphs=len(inside),
        kernels_eager=len(outside),
        kernels_unmatched=0,
        busy_us=length(busy),
        graph_busy_us=length(union(inside)),
        span_us=step.duration_us,
        gap_us=gaps(busy, step.start_us, step.end_us),
        eager_by_stage=by_stage(trace, outside),
    )


def by_stage(trace: Trace, spans: Iterable[Span]) -> dict[str, int]:
    """How many of `spans` began inside each `stage:<name>`; "none" for the rest."""
    counts: dict[str, int] = {}
    for span in spans:
        holder = next((stage for stage in trace.stages if stage.holds(span)), None)
        found = STAGE.match(holder.name) if holder else None
        name = found[1] if found else "none"
        counts[name] = counts.get(name, 0) + 1
    return counts


def union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Disjoint stretches that the spans cover, in order."""
    merged: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda s: s.start_us):
        if merged and span.start_us <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.end_us))
        else:
            merged.append((span.start_us, span.end_us))
    return merged


def length(stretches: list[tuple[float, float]]) -> float:
    """Total length of disjoint stretches."""
    return sum(end - start for start, end in stretches)


def gaps(busy: list[tuple[float, float]], begin: float, end: float) -> float:
    """Idle time between `begin` and `end` in stretches of at least 2 us."""
    edges = [begin, *(edge for pair in busy for edge in pair), end]
    idle = zip(edges[::2], edges[1::2])
    return sum(stop - start for start, stop in idle if stop - start >= GAP_US)
