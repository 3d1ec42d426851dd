"""What the rows of the step bench say, in sentences; and the rows it says them of."""

from collections.abc import Iterable, Sequence

from workbench.measure.ledger import HOST_PARTS
from workbench.rows import Row

MODES = ("eager", "split_graph", "step_graph")
MODEL_TITLES = {"tiny": "tiny", "narrow61": "61 narrow layers", "k2-rank": "Kimi K2 rank"}


def step_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows of timed steps."""
    return [row for row in rows if row.variant in MODES]


def groups(rows: Sequence[Row]) -> dict[tuple[str, int], dict[str, Row]]:
    """(model, context) -> mode -> row, timed ones only."""
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in step_rows(rows):
        if row.timing is not None:
            found.setdefault((str(row.axes["model"]), int(row.axes["ctx"] or 0)), {})[row.variant] = row
    return found


def attention_rows(rows: Iterable[Row]) -> dict[tuple[str, int], Row]:
    """(model, context) -> the row of verify attention alone, timed ones only."""
    return {
        (str(row.axes["model"]), int(row.axes["ctx"] or 0)): row
        for row in rows
        if row.variant == "verify_attention" and row.timing is not None
    }


def part_us(row: Row, name: str) -> float:
    """A part of the typical step; the mean step's in rows that were stored without the typical one."""
    prefix = "typical_" if "typical_step_us" in row.metrics else ""
    return _metric(row, f"{prefix}{name}_us")


def findings(rows: list[Row]) -> list[str]:
    """What the rows say, in sentences."""
    sentences = [text for key, modes in groups(rows).items() for text in _case_findings(key, modes)]
    return [
        *sentences, *_attention_findings(rows), *_read_findings(rows), *_failures(rows),
        *_untraced(rows), *_capture_findings(rows), *_launch_findings(rows),
    ]  # fmt: skip


def _case_findings(key: tuple[str, int], modes: dict[str, Row]) -> Iterable[str]:
    model, context = key
    if not set(MODES) <= modes.keys():
        return
    times = {mode: _us(modes[mode]) / 1e3 for mode in MODES}
    eager, graph = modes["eager"], modes["step_graph"]
    yield (
        f"{MODEL_TITLES.get(model, model)}, {context} tokens: a step takes {times['eager']:.2f} ms eagerly, "
        f"{times['split_graph']:.2f} ms with the tree on the host between two graphs and "
        f"{times['step_graph']:.2f} ms as one graph (medians); {_fastest(modes)}."
        + _launches_finding(eager, graph)
    )
    yield _ledger_finding(model, context, graph)
    if all(row.metrics.get("idle_share") is not None for row in (eager, graph)):
        yield (
            f"{context} tokens: the GPU is idle {_metric(eager, 'idle_share'):.1%} of an eager step and "
            f"{_metric(graph, 'idle_share'):.1%} of a replayed one (gaps of at least 2 us; distances between "
            f"nodes add {_metric(graph, 'node_gap_share'):.1%})."
        )
    yield _host_finding(context, modes)


def _launches_finding(eager: Row, graph: Row) -> str:
    """Nothing unless both were traced; `_untraced` says why one was not."""
    if any(row.metrics.get("launches_per_step") is None for row in (eager, graph)):
        return ""
    return (
        f" {_metric(eager, 'launches_per_step'):.0f} single launches a step become "
        f"{_metric(graph, 'graph_launches_per_step'):.0f} graph launch and "
        f"{_metric(graph, 'launches_per_step'):.0f} single ones."
    )


def _untraced(rows: list[Row]) -> Iterable[str]:
    for row in step_rows(rows):
        if row.metrics.get("trace_reason"):
            yield f"{row.case_id} not traced: {row.metrics['trace_reason']}."


def _host_finding(context: int, modes: dict[str, Row]) -> str:
    graph = modes["step_graph"]
    host, p90, most = (_metric(graph, f"host{name}_us") for name in ("", "_p90", "_max"))
    others = ", ".join(f"{_metric(modes[mode], 'host_us'):.0f} us {mode}" for mode in MODES[:2])
    parts = ", ".join(f"{part} {_metric(graph, f'host_{part}_us'):.0f}" for part in HOST_PARTS)
    parts += ", and a launch computes" if graph.target == "cpu" else ""
    return (
        f"{context} tokens: host time {host:.0f} us per steady step as one graph (median; p90 {p90:.0f}, "
        f"most {most:.0f}; {parts}), {others}. It waits {_metric(graph, 'wait_us'):.0f} us beside; "
        f"{_metric(graph, 'one_off_us') / 1e3:.1f} ms go once into prompt, admission and freeing."
    )


def _fastest(modes: dict[str, Row]) -> str:
    """Which mode has the lowest median, and whether its spread reaches into the next one's."""
    first, second = sorted((modes[mode] for mode in MODES), key=_us)[:2]
    assert first.timing is not None and second.timing is not None
    if first.timing.p90_us < second.timing.p10_us:
        return f"{first.variant} is the fastest"
    return f"{first.variant} has the lowest median, but its p10 to p90 overlaps that of {second.variant}"


def _attention_findings(rows: list[Row]) -> Iterable[str]:
    steps = groups(rows)
    for key, row in attention_rows(rows).items():
        sum_us, title = _metric(row, "verify_attention_us"), MODEL_TITLES.get(key[0], key[0])
        shares = [f"{sum_us / _us(one):.0%} of a step {mode}" for mode, one in steps.get(key, {}).items()]
        beside = f", derived: as much as {', '.join(shares)}" if shares else ""
        yield (
            f"{title}, {key[1]} tokens: one layer's verify attention timed alone takes {_us(row):.1f} us; "
            f"times {_metric(row, 'layers'):.0f} layers that is {sum_us:.0f} us{beside}."
        )


def _ledger_finding(model: str, context: int, row: Row) -> str:
    between = part_us(row, "between") if "typical_step_us" in row.metrics else None
    return (
        f"{MODEL_TITLES.get(model, model)}, {context} tokens, one graph, by the step's own clock: verify "
        f"takes {_share(row, 'verify'):.0%} of the step, draft {_share(row, 'draft'):.0%}, tree "
        f"{_share(row, 'tree'):.0%}, accept and commit {_share(row, 'accept') + _share(row, 'commit'):.0%}; "
        f"{_share(row, 'unattributed'):.1%} is unattributed."
        + (f" Between two steps lie {between:.0f} us." if between is not None else "")
    )


def _read_findings(rows: list[Row]) -> Iterable[str]:
    """The bytes a step must read, beside the real model's; derived, where there is a real model."""
    for row in rows:
        if row.variant != "step_reads" or "real_bytes" not in row.metrics:
            continue
        yield (
            f"{row.axes['ctx']} tokens, derived: {row.metrics['comparison']} "
            f"At the target's memory rate that is {_metric(row, 'own_memory_us') / 1e3:.1f} ms here and "
            f"{_metric(row, 'real_memory_us') / 1e3:.1f} ms for the real rank, the drafter's "
            f"{_metric(row, 'own_drafter_bytes') / 1e9:.1f} GB not counted."
        )


def _failures(rows: list[Row]) -> Iterable[str]:
    for row in rows:
        if row.status not in ("PASSED", "UNSUPPORTED"):
            yield f"{row.case_id} is {row.status.value}: {row.reason}."


def _capture_findings(rows: list[Row]) -> Iterable[str]:
    buckets: dict[str, list[Row]] = {}
    for row in rows:
        if row.variant == "capture" and row.metrics:
            buckets.setdefault(str(row.axes["model"]), []).append(row)
    for model, found in buckets.items():
        reserved = sum(_metric(row, "reserved_bytes") for row in found)
        yield (
            f"{MODEL_TITLES.get(model, model)}: capturing {len(found)} buckets takes "
            f"{_metric(found[0], 'total_capture_s'):.2f} s and reserves {reserved / 1e6:.0f} MB; warm-up and "
            f"compiling before it take {_metric(found[0], 'total_warmup_s'):.2f} s."
        )


def _launch_findings(rows: list[Row]) -> Iterable[str]:
    launch_rows = [row for row in rows if row.axes.get("part") == "launch_path" and row.timing]
    paths = {row.variant: row for row in launch_rows}
    if "replayed_graph" in paths:
        graph = paths.pop("replayed_graph")
        single = sorted(paths.values(), key=_us)
        ends = [f"{_us(row):.0f} us through {row.variant}" for row in (single[:1] + single[1:][-1:])]
        ratio = f", {_us(graph) / _us(single[0]):.2f} times the cheapest" if single else ""
        yield (
            f"{graph.axes['launches']} launches of one small kernel cost the host {' to '.join(ends)} one by "
            f"one and {_us(graph):.0f} us as a replayed graph{ratio}."
        )


def _us(row: Row) -> float:
    assert row.timing is not None
    return row.timing.median_us


def _metric(row: Row, name: str) -> float:
    return float(row.metrics.get(name) or 0.0)


def _share(row: Row, stage: str) -> float:
    return part_us(row, stage) / part_us(row, "step") if part_us(row, "step") else 0.0
