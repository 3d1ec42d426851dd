"""From readings to findings and causes. A rule may only say what its file supports."""

from collections.abc import Callable, Iterable

from workbench.diagnose import (
    gpu_monitor,
    kineto,
    nsys_sqlite,
    nsys_text,
    server_info,
    sglang,
    sglang_rules,
    tensorrt_llm,
    vllm,
)
from workbench.diagnose.catalogue import cause
from workbench.diagnose.reading import Cause, Finding, Reading

GPU_BOUND_SHARE = 0.9
LOW_SHARE = 0.3  # accepted drafts over offered ones


def apply(reading: Reading) -> None:
    """Add the findings and causes of one file to its reading."""
    for rule in RULES.get(reading.kind, ()):
        for result in rule(reading):
            (reading.findings if isinstance(result, Finding) else reading.causes).append(result)  # type: ignore[arg-type]
    truncated = reading.summary.get("truncated_lines") or 0
    if truncated:
        text = "the input breaks off; the cut part was not guessed"
        reading.findings.append(Finding("truncated_input", "warning", text, f"{truncated} cut lines"))


def is_low(mean_len: float, width: int | None) -> bool:
    """Whether an acceptance length (bonus included) is low for a draft of `width` rows, bonus included."""
    if width is None:
        return mean_len < 1.2
    return width > 1 and mean_len < 2.0 and mean_len - 1 < LOW_SHARE * (width - 1)


def low_acceptance(mean_len: float, width: int | None) -> Finding:
    """The finding with both values."""
    of = f" of at most {width}" if width else ""
    text = f"a verify pass accepts {mean_len:.2f} tokens{of}, bonus included: drafting is mostly wasted work"
    return Finding("low_acceptance", "problem", text, f"mean acceptance length {mean_len:.4g}")


NO_DISPATCH = Finding(
    "no_dispatch_evidence",
    "warning",
    "nothing in this file counts what was dispatched: configured is not replayed",
)
STARTUP_ONLY = Finding(
    "startup_only", "info", "only the start of the server is in this file: a capture is not a replay"
)


def vllm_rules(reading: Reading) -> Iterable[Finding | Cause]:
    """Findings and causes of a vLLM log."""
    facts: vllm.VllmFacts = reading.facts
    if not facts.rows:
        yield NO_DISPATCH
    if not (
        facts.stats
        or facts.rows
        or facts.table_heads
        or facts.windows
        or facts.cumulative
        or facts.iterations
    ):
        yield STARTUP_ONLY
    width = facts.draft_tokens + 1 if facts.draft_tokens else None
    if reading.mean_accept_len is not None and is_low(reading.mean_accept_len, width):
        yield low_acceptance(reading.mean_accept_len, width)
    if facts.downgrade:
        backend, support = facts.downgrade
        why = f"{backend} supports {support} only; {facts.configured} was set back to {facts.resolved}"
        yield cause("backend_downgrade", "stated", why)
    if facts.eager_set and reading.replay.state in ("all_eager", "unknown"):
        yield cause("graph_disabled", "stated", "the log states an option that disables graphs")
    if facts.capture_failed:
        yield cause("capture_failed", "stated", "the log states that a capture failed")
    yield from _vllm_sizes(facts, width)


def _vllm_sizes(facts: vllm.VllmFacts, width: int | None) -> Iterable[Cause]:
    """What the rows say about sizes: eager decode rows above, between or beside the captured ones."""
    eager = [row for row in facts.rows if row.mode == "NONE" and not facts.is_prefill(row)]
    largest = facts.largest_size
    between = [
        row for row in eager if largest and row.unpadded <= largest and row.unpadded not in facts.sizes
    ]
    if between:
        why = f"{len(between)} eager rows lie between captured sizes, first {between[0].unpadded} tokens"
        yield cause("padding_gap", "possible", why)
    if eager and width and facts.sizes and any(size % width for size in facts.sizes if size >= width):
        why = f"capture sizes are no multiples of {width} tokens per request"
        yield cause("capture_sizes_not_multiple", "possible", why)
    padded = [row for row in facts.rows if row.mode == "FULL" and row.padded > 1.25 * max(row.unpadded, 1)]
    if padded:
        why = f"{padded[0].unpadded} tokens are replayed as {padded[0].padded}"
        yield cause("padding_gap", "stated", why)


def trt_rules(reading: Reading) -> Iterable[Finding | Cause]:
    """Findings and causes of a TensorRT-LLM log."""
    facts: tensorrt_llm.TrtFacts = reading.facts
    yield NO_DISPATCH
    if facts.printed > len(facts.iterations):
        text = "iterations are printed more than once; each counts once"
        yield Finding(
            "duplicate_lines", "info", text, f"{facts.printed} records, {len(facts.iterations)} iterations"
        )
    if facts.warmups:
        text = "an iteration without a device time is warm-up and left out of the mean"
        yield Finding("warmup_iteration_excluded", "info", text, f"{facts.warmups} iterations")
    if facts.padded:
        first = next(one for one in facts.iterations if one.padded)
        why = f"{first.scheduled} requests run as {first.generation} tokens: padded to a captured size"
        yield cause(
            "padding_gap", "likely", f"{why}, in {facts.padded} of {len(facts.iterations)} iterations"
        )
    mixed = [one for one in facts.iterations if one.context and one.generation]
    if mixed:
        yield cause(
            "mixed_prefill_batch", "possible", f"{len(mixed)} iterations hold context and generation requests"
        )


def nsys_rules(reading: Reading) -> Iterable[Finding | Cause]:
    """Findings of an nsys summary."""
    facts: nsys_text.NsysFacts = reading.facts
    if facts.capture_pairs:
        text = "launches inside a capture are recorded, not run: take a time range after startup"
        yield Finding("capture_launches_not_executions", "warning", text, f"{facts.capture_pairs} captures")
    hidden = [one for one in facts.ranges if one.graph_traces and not one.graph_nodes]
    if hidden:
        text = "each graph is traced as one item, its kernels are not counted: few kernels do not mean idle"
        items, kernels = sum(one.graph_traces for one in hidden), sum(one.kernels for one in hidden)
        yield Finding(
            "graph_granularity_hides_kernels", "info", text, f"{items} graph items, {kernels} kernels"
        )
    if facts.stale:
        reading.warnings.append("nsys used an existing SQLite export, which may be older than the report")


def sqlite_rules(reading: Reading) -> Iterable[Finding | Cause]:
    """Findings of an nsys export."""
    facts: nsys_sqlite.SqliteFacts = reading.facts
    if facts.begin_captures:
        text = "launches inside a capture are recorded, not run"
        yield Finding("capture_launches_not_executions", "warning", text, f"{facts.begin_captures} captures")
    if facts.graph_launches and not facts.in_graphs:
        text = (
            "graphs were launched but their kernels are not in the export: trace with --cuda-graph-trace=node"
        )
        yield Finding(
            "graph_granularity_hides_kernels", "info", text, f"{facts.graph_launches} graph launches"
        )
    yield from _gpu_bound(facts.kernel_ns, facts.span_ns, facts.eager)


def kineto_rules(reading: Reading) -> Iterable[Finding | Cause]:
    """Findings and causes of a torch.profiler trace."""
    facts: kineto.KinetoFacts = reading.facts
    if facts.captures or facts.is_recording:
        text = "the trace holds a capture: its launches are recorded, not run"
        evidence = f"{facts.captures} captures, {facts.eager_launches} launches own {facts.eager} kernels"
        yield Finding("capture_launches_not_executions", "warning", text, evidence)
    if facts.prefill_only:
        text = "every step of this trace is a prefill: it says nothing about decode"
        yield Finding("prefill_trace_only", "info", text)
    if facts.unmatched:
        text = "kernels launched before the trace began belong to no call in it"
        yield Finding("kernels_without_launch", "info", text, f"{facts.unmatched} kernels")
    if not facts.tape:
        yield from _gpu_bound(facts.busy_us, facts.span_us, facts.eager)
    draft = (facts.stages or {}).get("draft", 0)
    if facts.graph_launches and draft:
        yield cause(
            "drafter_not_captured",
            "likely",
            f"{draft} launches inside the draft stage beside replayed graphs",
        )


def _gpu_bound(busy: float, span: float, eager: int) -> Iterable[Finding]:
    """Eager launches that cannot be the problem: the GPU is busy nearly all the time."""
    if eager and span > 0 and busy / span >= GPU_BOUND_SHARE:
        text = "kernels fill the time they span: replaying them would save little"
        yield Finding("gpu_bound_anyway", "info", text, f"busy {100 * min(busy / span, 1.0):.0f} %")


def monitor_rules(reading: Reading) -> Iterable[Finding | Cause]:
    """Findings of a GPU monitor."""
    facts: gpu_monitor.MonitorFacts = reading.facts
    busy = reading.summary["sm_util_mean"]
    if busy is not None and busy >= 30:
        text = "sm % tells that some kernel ran, not how full the GPU was"
        yield Finding(
            "sm_util_is_not_occupancy", "info", text, f"mean {busy:.0f} % over {facts.samples} samples"
        )
    if facts.used_mib and max(facts.sm, default=0.0) == 0 and max(facts.used_mib) > 1024:
        yield Finding("loaded_not_serving", "info", "memory is held but nothing ran when this was taken")


def server_rules(reading: Reading) -> Iterable[Finding | Cause]:
    """Causes that settings alone state; a prefill instance says nothing about decode."""
    facts: server_info.ServerFacts = reading.facts
    yield STARTUP_ONLY
    if facts.role == "prefill":
        return
    if facts.graphs_disabled:
        yield cause("graph_disabled", "stated", "the server's settings disable graphs")
    largest = max(facts.captured_bs, default=0)
    if largest and facts.max_running > largest:
        why = f"captured up to {largest}, {facts.max_running} requests may run"
        yield cause("batch_above_captured", "possible", why)


RULES: dict[str, tuple[Callable[[Reading], Iterable[Finding | Cause]], ...]] = {
    sglang.KIND: (sglang_rules.findings, sglang_rules.causes),
    vllm.KIND: (vllm_rules,),
    tensorrt_llm.KIND: (trt_rules,),
    nsys_text.KIND: (nsys_rules,),
    nsys_sqlite.KIND: (sqlite_rules,),
    kineto.KIND: (kineto_rules,),
    gpu_monitor.KIND: (monitor_rules,),
    server_info.KIND: (server_rules,),
}
