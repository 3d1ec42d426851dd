"""One answer from several readings: equal verdicts are joined, differing ones are called so, none wins."""

from collections.abc import Iterable, Sequence
from datetime import UTC

from workbench.diagnose import kineto, nsys_sqlite, nsys_text, sglang, tensorrt_llm, vllm
from workbench.diagnose.catalogue import cause
from workbench.diagnose.reading import Cause, Finding, Reading, Replay, state_of

STRENGTH = (kineto.KIND, nsys_sqlite.KIND, nsys_text.KIND, vllm.KIND, sglang.KIND, tensorrt_llm.KIND)
TRACES = (kineto.KIND, nsys_sqlite.KIND)
CLOCK_MARGIN_S = 60.0  # log lines come seconds apart
DEFINITE = ("all_replayed", "all_eager", "mixed")
STATE_WORDS = {"all_replayed": "replayed", "all_eager": "eager", "mixed": "partly replayed"}


def weigh(readings: Sequence[Reading]) -> Replay:
    """What all sources say together.

    Sources that count the same thing are added up. Where units differ and verdicts do, too: mixed when one of
    them saw both, else unknown, counted in sources. Without a verdict: unknown, else not applicable.
    """
    sums = [_add_up(own) for own in _same_unit(readings)]
    if not sums:
        unknown = [r.replay for r in readings if r.replay.state == "unknown"]
        return unknown[0] if unknown else Replay("not_applicable")
    if len({one.state for one in sums}) == 1:
        return sums[0]
    both = [one for one in sums if one.state == "mixed"]
    if both:
        return both[0]
    states = [r.replay.state for r in readings]
    replayed, eager = states.count("all_replayed"), states.count("all_eager")
    return Replay("unknown", "sources", replayed, eager, states.count("unknown"))


def _same_unit(readings: Sequence[Reading]) -> Iterable[list[Replay]]:
    """Replays of one kind and unit that hold a verdict, strongest kind first."""
    for kind in STRENGTH:
        units = dict.fromkeys(r.replay.unit for r in readings if r.kind == kind)
        for unit in units:
            own = [r.replay for r in readings if (r.kind, r.replay.unit) == (kind, unit)]
            if any(replay.state in DEFINITE for replay in own):
                yield own


def _add_up(own: list[Replay]) -> Replay:
    if len(own) == 1:
        return own[0]
    replayed, eager, unknown = (sum(getattr(r, n) for r in own) for n in ("replayed", "eager", "unknown"))
    states = {replay.state for replay in own} & set(DEFINITE)
    state = next(iter(states)) if len(states) == 1 else "mixed"
    state = state_of(replayed, eager) if state == "mixed" and not (replayed and eager) else state
    return Replay(state, own[0].unit, replayed, eager, unknown)


def disagreements(readings: Sequence[Reading]) -> Iterable[Finding]:
    """The finding that sources differ."""
    told = [r for r in readings if r.replay.state in DEFINITE]
    states = {r.replay.state for r in told}
    if len(states) < 2:
        return
    counts = [
        f"{sum(r.replay.state == state for r in told)} {word}"
        for state, word in STATE_WORDS.items()
        if state in states
    ]
    text = (
        f"the sources disagree ({', '.join(counts)}): read each verdict for itself, and together only files "
        "of one server and time; a trace covers few steps, a log line samples one"
    )
    yield Finding("sources_disagree", "warning", text, f"{len(told)} sources with a verdict")


def contradictions(readings: Sequence[Reading]) -> Iterable[Cause]:
    """A log that says False beside a counter or trace that shows replay: likely if they belong together.

    They do in one file, or where the trace's clock lies within the log's time stamps.
    """
    logs = [r for r in readings if r.kind == sglang.KIND and r.replay.eager and r.summary["decode_lines"]]
    shown = [r for r in readings if _shows_replay(r)]
    if not logs or not shown:
        return
    pairs = [(log, seen) for log in logs for seen in shown]
    together = [(log, seen) for log, seen in pairs if log is seen or _overlap(log, seen)]
    log, seen = (together or pairs)[0]
    said = f"{log.replay.eager} of {log.replay.replayed + log.replay.eager} log lines say False"
    source = "a trace shows" if seen.kind in TRACES else "a counter says"
    if together:
        how = "in the same file" if log is seen else "and their clocks overlap"
        yield cause("flag_not_propagated", "likely", f"{said}, {source} replay ({seen.kind}) {how}")
        return
    why = (
        f"{said}, {source} replay ({seen.kind}): so it is if both are of one run, which the files do not show"
    )
    yield cause("flag_not_propagated", "possible", why)


def _overlap(log: Reading, trace: Reading) -> bool:
    """Whether the trace was taken while the log was written, its stamps read as UTC or as local time."""
    span, began_s = log.facts.span, trace.facts.began_s if trace.kind == kineto.KIND else None
    if span is None or began_s is None or not 1970 < span[0].year <= span[1].year < 9999:
        return False
    first, last = span
    return any(
        first.replace(tzinfo=zone).timestamp() - CLOCK_MARGIN_S
        <= began_s
        <= last.replace(tzinfo=zone).timestamp() + CLOCK_MARGIN_S
        for zone in (UTC, None)
    )


def _shows_replay(reading: Reading) -> bool:
    if reading.kind in TRACES:
        return bool(reading.replay.state == "all_replayed")
    if reading.kind != sglang.KIND:
        return False
    counters = reading.facts.counters
    return bool(counters.get("decode_cuda_graph", 0) and not counters.get("decode_none", 0))


def only_value(values: Iterable[float | None]) -> float | None:
    """The value when exactly one source states one; a mean over servers would belong to none of them."""
    stated = [value for value in values if value is not None]
    return round(stated[0], 4) if len(stated) == 1 else None
