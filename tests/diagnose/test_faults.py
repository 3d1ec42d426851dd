"""Each fault is named without being told, its control replays every step, a slow healthy run has none."""

import dataclasses

import pytest

from workbench.decode.decision import Reason
from workbench.decode.faults import FAULTS, HEALTHY, find
from workbench.decode.investigation import NO_GRAPH_PROBLEM, investigate
from workbench.decode.laboratory import Laboratory
from workbench.diagnose import diagnose
from workbench.model.prompts import load_prompts
from workbench.model.weights import load_pair


@pytest.fixture(scope="module")
def lab():
    target, drafter = load_pair("tiny")[:2]
    prompts = [list(prompt.text.encode())[-32:] for prompt in load_prompts()]
    return Laboratory(target, drafter, prompts, budget=12, max_new_tokens=14, max_context=96, trace_steps=1)


@pytest.fixture(scope="module")
def right_tokens(lab):
    """What every run that is not wrong has to decode: four prompts, eagerly."""
    healthy = find("healthy")
    return (
        lab.make(healthy, mode="eager", shadow_steps=(), max_batch=4)
        .generate(lab.prompts[:4], lab.max_new_tokens)
        .tokens
    )


def test_there_are_at_least_twelve_faults_with_everything_said():
    assert len(FAULTS) >= 12
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert all((fault.symptom, fault.log, fault.fix, fault.cause)), fault.name


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_injected_fault_is_named(lab, fault, right_tokens):
    evidence = lab.gather(fault)
    conclusion = investigate(evidence)
    assert (conclusion.cause, conclusion.found_by) == (fault.cause, fault.found_by), conclusion.text
    if fault.found_by in ("decision", "audit"):
        assert evidence.result.tokens == right_tokens[: fault.prompts]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_same_run_without_the_fault_replays_every_step_and_decodes_the_same(lab, fault, right_tokens):
    result = lab.decode(fault, repaired=True)
    assert result.replay.share == 1.0, result.replay.sentence()
    assert all(report.is_ok for report in result.shadow)
    assert result.tokens == right_tokens[: fault.prompts]


@pytest.mark.parametrize("fault", HEALTHY, ids=lambda fault: fault.name)
def test_a_healthy_run_is_not_a_graph_problem_however_slow(lab, fault):
    conclusion = investigate(lab.gather(fault))
    assert (conclusion.cause, conclusion.found_by) == (NO_GRAPH_PROBLEM, "nothing")


def log_of(result, tmp_path):
    path = tmp_path / "decode.log"
    path.write_text("\n".join(result.log_lines))
    return path


def test_the_story_nearly_all_log_lines_are_eager_and_the_counts_come_from_the_decisions(lab, tmp_path):
    counts = []
    for prompt in lab.prompts[:2]:
        decoder = lab.make(find("tree_cut"), max_context=320, shadow_steps=())
        result = decoder.generate([prompt], 240, max_steps=37)
        replay = diagnose(log_of(result, tmp_path)).replay
        claims = result.replay.claims
        assert (replay.replayed, replay.eager) == (result.replay.replayed, result.replay.eager)
        assert replay.replayed + replay.eager == 37 and replay.eager >= 30
        assert all((c.reason is Reason.WIDTH_MISMATCH) == (c.width != decoder.width) for c in claims)
        counts.append(tuple(c.width for c in claims))
    assert counts[0] != counts[1]


def test_the_log_alone_never_contradicts_the_truth(lab, tmp_path):
    for name, state in (("hidden_mode", "all_eager"), ("healthy", "all_replayed"), ("one_family", "mixed")):
        assert diagnose(log_of(lab.decode(find(name)), tmp_path)).replay.state == state


def test_log_and_trace_together_name_the_flag_that_nobody_handed_on(lab, tmp_path):
    decoder = lab.make(find("not_reported"), shadow_steps=())
    log = log_of(lab.generate(decoder, find("not_reported")), tmp_path)
    trace = tmp_path / "trace.json"
    lab.trace(trace, decoder, find("not_reported"))
    diagnosis = diagnose([log, trace])
    assert [source["replay"]["state"] for source in diagnosis.sources] == ["all_eager", "all_replayed"]
    assert (diagnosis.replay.state, diagnosis.replay.unit) == ("unknown", "sources")
    flag = {c.id: c for c in diagnosis.causes if not c.source}["flag_not_propagated"]
    assert flag.likelihood == "likely" and "their clocks overlap" in flag.why


def test_a_collapse_of_acceptance_is_not_pinned_on_one_cause(lab):
    text = investigate(lab.gather(find("stale_choice"))).text
    assert "eagerly" in text and "most likely" in text and "does not tell that from" in text


def test_an_unknown_fault_lists_the_known_ones():
    with pytest.raises(ValueError, match="fault 'gremlin': choose one of tree_cut, "):
        find("gremlin")


@pytest.fixture(scope="module")
def gpu_lab(lab):
    target, drafter = load_pair("tiny", device="cuda")[:2]
    return dataclasses.replace(lab, target=target, drafter=drafter, trace_steps=3)


@pytest.mark.gpu
@pytest.mark.parametrize("fault", [*FAULTS, *HEALTHY], ids=lambda fault: fault.name)
def test_the_same_verdict_from_cuda_graphs(gpu_lab, fault):
    conclusion = investigate(gpu_lab.gather(fault))
    assert (conclusion.cause, conclusion.found_by) == (fault.cause, fault.found_by), conclusion.text


@pytest.mark.gpu
def test_a_cuda_trace_of_replayed_steps_has_one_graph_launch_each(gpu_lab):
    found = gpu_lab.gather(find("healthy")).audit
    assert found.steps and all(step.record.graph_launches == 1 for step in found.steps)
    assert all(step.record.kernels_in_graphs > 100 for step in found.steps)
