"""torch.profiler traces: launches joined with the kernels they own, steps where the trace names them."""

import re
from dataclasses import dataclass
from typing import Any

from workbench.diagnose.nsys_sqlite import kernel_replay
from workbench.diagnose.reading import Reading, Replay
from workbench.measure import trace as traces

KIND = "kineto_trace"
PREFILL_STEP = re.compile(r"(?i)step\[(?:EXTEND|PREFILL|MIXED)|generation_0\b")


@dataclass
class KinetoFacts:
    """Everything the rules ask about one trace."""

    kernels: int = 0
    in_graphs: int = 0
    eager: int = 0
    unmatched: int = 0
    graph_launches: int = 0
    eager_launches: int = 0
    captures: int = 0
    busy_us: float = 0.0
    span_us: float = 0.0
    eager_busy_us: float = 0.0
    prefill_only: bool = False
    tape: bool = False
    stages: dict[str, int] | None = None
    began_s: float | None = None  # seconds since 1970, where the trace states its base

    @property
    def is_recording(self) -> bool:
        """A capture: its launches are recorded and own no kernel."""
        many_without_kernels = self.eager_launches > 20 and self.eager < self.eager_launches // 10
        return not self.in_graphs and not self.tape and (self.captures > 0 or many_without_kernels)


def read(document: Any) -> Reading:
    """The reading of a parsed trace."""
    trace = traces.parse(document)
    facts = _device_facts(trace) if trace.on_device or not trace.steps else _tape_facts(trace)
    facts.began_s = _began_s(document)
    summary = {
        "kernels": facts.kernels,
        "kernels_in_graphs": facts.in_graphs,
        "kernels_eager": facts.eager,
        "kernels_unmatched": facts.unmatched,
        "graph_launches": facts.graph_launches,
        "eager_launches": facts.eager_launches,
        "capture_begins": facts.captures,
        "steps": len(trace.steps) or len(trace.other_steps),
        "gpu_busy_us": round(facts.busy_us, 3),
        "graph_time_share": round(1 - facts.eager_busy_us / facts.busy_us, 4) if facts.busy_us else None,
    }
    return Reading(KIND, summary, _replay(facts), facts)


def _began_s(document: Any) -> float | None:
    """When the first event began by the wall clock; None where the trace does not tell."""
    base = document.get("baseTimeNanoseconds") if isinstance(document, dict) else None
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(base, int) or not isinstance(events, list):
        return None
    times = [event.get("ts") for event in events if isinstance(event, dict) and event.get("ph") == "X"]
    known = [ts for ts in times if isinstance(ts, int | float) and 0 < ts < 1e17]
    return base / 1e9 + min(known) / 1e6 if known else None


def _device_facts(trace: traces.Trace) -> KinetoFacts:
    kinds = traces.kernel_kinds(trace)
    busy = traces.union(trace.kernels)
    own_eager = [kernel for kernel, kind in zip(trace.kernels, kinds) if kind != "graph"]
    names = [span.name for span in trace.other_steps]
    return KinetoFacts(
        kernels=len(trace.kernels),
        in_graphs=kinds.count("graph"),
        eager=kinds.count("eager"),
        unmatched=kinds.count("unmatched"),
        graph_launches=len(trace.graph_launches),
        eager_launches=len(trace.eager_launches),
        captures=trace.captures,
        busy_us=sum(kernel.duration_us for kernel in trace.kernels),
        eager_busy_us=sum(kernel.duration_us for kernel in own_eager),
        span_us=busy[-1][1] - busy[0][0] if busy else 0.0,
        prefill_only=bool(names) and all(PREFILL_STEP.search(name) for name in names),
        stages=traces.by_stage(trace, trace.eager_launches) if trace.stages else None,
    )


def _tape_facts(trace: traces.Trace) -> KinetoFacts:
    records = traces.steps(trace)
    facts = KinetoFacts(tape=True)
    facts.in_graphs = sum(one.kernels_in_graphs for one in records)
    facts.eager = facts.eager_launches = sum(one.eager_launches for one in records)
    facts.graph_launches = sum(one.graph_launches for one in records)
    facts.busy_us = sum(one.busy_us for one in records)
    facts.eager_busy_us = facts.busy_us - sum(one.graph_busy_us for one in records)
    facts.span_us = sum(one.span_us for one in records)
    facts.stages = traces.by_stage(trace, [])
    return facts


def _replay(facts: KinetoFacts) -> Replay:
    if facts.is_recording or facts.prefill_only:
        return Replay("unknown", "kernels")
    if not facts.in_graphs + facts.eager:
        return Replay("unknown", "kernels", unknown=facts.unmatched)
    graph_us = facts.busy_us - facts.eager_busy_us
    found = kernel_replay(facts.in_graphs, facts.eager, facts.unmatched, graph_us, facts.busy_us)
    return Replay(
        found.state, "operations" if facts.tape else "kernels", found.replayed, found.eager, found.unknown
    )
