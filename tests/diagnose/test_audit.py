"""The trace reader and the audit against generated traces whose truth is known."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.decode.audit import audit, describe, find_lies
from workbench.decode.decision import Reason, StepClaim
from workbench.measure import trace as traces

STEP_US, STAGES = 1000.0, ("draft", "tree", "verify", "accept")


def event(cat, name, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1, "args": args}


class Writer:
    """Writes steps of a known kind, with kernels late on the device as on a real one."""

    def __init__(self, prefix="cuda"):
        self.events, self.correlation, self.prefix = [], 0, prefix

    def launch(self, name, ts, kernels, **args):
        self.correlation += 1
        self.events.append(event("cuda_runtime", self.prefix + name, ts, 1.0, correlation=self.correlation))
        for k in range(kernels):
            self.events.append(
                event("kernel", f"k{k}", ts + 300 + 2 * k, 1.0, correlation=self.correlation, **args)
            )

    def step(self, index, kind, eager_draft=False, nodes=20):
        start = index * STEP_US
        self.events.append(event("user_annotation", f"decode_step#{index}", start, 200.0))
        if kind == "replayed" and not eager_draft:
            self.launch("GraphLaunch", start + 5, nodes)
            return
        for place, stage in enumerate(STAGES):
            begin = start + 10 + 40 * place
            if kind == "eager" or (eager_draft and stage == "draft"):
                self.events.append(event("user_annotation", f"stage:{stage}", begin, 35.0))
                for k in range(4):
                    self.launch("LaunchKernel", begin + 1 + 5 * k, 1)
        if kind == "replayed":
            self.launch("GraphLaunch", start + 150, nodes)


def claim(step, replayed, draft=None):
    return StepClaim(step, replayed, Reason.REPLAYED, draft_replayed=draft)


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["replayed", "eager", "draft"]), min_size=1, max_size=12),
    prefix=st.sampled_from(["cuda", "hip", "cu"]),
    claims=st.data(),
)
def test_generated_steps_are_told_apart_and_every_lie_is_found(kinds, prefix, claims):
    writer = Writer(prefix)
    writer.events.append(event("user_annotation", "stage:prefill", -500.0, 1.0))
    for index, kind in enumerate(kinds):
        writer.step(index, "replayed" if kind == "draft" else kind, eager_draft=kind == "draft")
    found = audit(traces.parse({"traceEvents": writer.events}))
    assert [step.verify for step in found.steps] == ["eager" if k == "eager" else "replayed" for k in kinds]
    assert found.eager_drafts == kinds.count("draft")
    said = [claims.draw(st.sampled_from([True, False, None])) for _ in kinds]
    lies = find_lies(found, [claim(i, flag) for i, flag in enumerate(said)])
    want = {
        i: "says_replayed_but_did_not" if kind == "eager" else "says_eager_but_did"
        for i, (kind, flag) in enumerate(zip(kinds, said))
        if flag is not None and flag != (kind != "eager")
    }
    assert {lie.step: lie.kind for lie in lies} == want
    assert (describe(lies) == "no claim contradicts the trace") == (not want)


def test_a_step_record_counts_what_was_written():
    writer = Writer()
    writer.step(0, "replayed", nodes=50)
    writer.step(1, "eager")
    records = traces.steps(traces.parse(writer.events))
    assert (records[0].graph_launches, records[0].kernels_in_graphs, records[0].eager_launches) == (1, 50, 0)
    assert (records[1].graph_launches, records[1].eager_launches, records[1].kernels_eager) == (0, 16, 16)
    assert records[1].eager_by_stage == dict.fromkeys(STAGES, 4)
    assert records[0].busy_us == pytest.approx(50.0) and records[0].graph_share == 1.0
    assert records[0].span_us == pytest.approx(305 + 2 * 49 + 1)
    assert records[1].graph_share == 0.0


def test_idle_is_counted_from_two_microseconds_up():
    busy = traces.union(
        [traces.Span("a", 0, 10), traces.Span("b", 5, 12), traces.Span("c", 13, 20), traces.Span("d", 30, 31)]
    )
    assert busy == [(0, 12), (13, 20), (30, 31)]
    assert traces.length(busy) == 20
    assert traces.gaps(busy, 0, 40) == pytest.approx(10 + 9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=12))
def test_union_agrees_with_counting_microseconds(pairs):
    spans = [traces.Span("s", float(a), float(a + d)) for a, d in pairs]
    covered = {tick for a, d in pairs for tick in range(a, a + d)}
    assert traces.length(traces.union(spans)) == len(covered)


def test_a_tape_step_counts_outermost_operations_inside_and_outside(tmp_path):
    events = [
        event("user_annotation", "decode_step#3", 0, 100),
        event("user_annotation", "stage:other", 0.5, 5),
        event("cpu_op", "aten::copy_", 1, 2),
        event("user_annotation", "tape_launch", 10, 60),
        *(event("cpu_op", "aten::mm", 11 + 5 * k, 4) for k in range(8)),
        event("cpu_op", "aten::empty", 12, 1),
        event("cpu_op", "aten::add", 500, 4),
    ]
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found = audit(path)
    record = found.steps[0].record
    assert (record.index, record.graph_launches, record.kernels_in_graphs, record.eager_launches) == (
        3,
        1,
        8,
        1,
    )
    assert found.steps[0].verify == "replayed"


def test_a_claim_that_states_nothing_is_no_lie_and_unknown_steps_are_skipped():
    writer = Writer()
    writer.step(0, "replayed")
    found = audit(traces.parse(writer.events))
    assert find_lies(found, [claim(0, None), claim(9, False)]) == []
    assert "1 steps replayed, 0 eager" in found.sentence()


def test_the_drafters_claim_is_checked_too():
    writer = Writer()
    writer.step(0, "replayed", eager_draft=True)
    [lie] = find_lies(audit(traces.parse(writer.events)), [claim(0, True, draft=True)])
    assert (lie.part, lie.kind) == ("draft", "says_replayed_but_did_not")


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"traceEvents": 3}')
    with pytest.raises(ValueError, match="no list traceEvents"):
        audit(path)
    path.write_text("{broken")
    with pytest.raises(ValueError, match="no readable Chrome trace"):
        audit(path)
