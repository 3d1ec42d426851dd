import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from workbench import targets
from workbench.cli import model as commands
from workbench.cli import one_line
from workbench.experiments import service_capacity as experiment
from workbench.model.capacity import GIB, Assumptions, Service, bracket, make_plan
from workbench.model.hf_config import expert_quantisation
from workbench.model.pair import TINY_TARGET
from workbench.model.presets import KIMI_DRAFTER, KIMI_K2
from workbench.model.roofline import step_floor
from workbench.report.figures import service_capacity as figures
from workbench.report.figures import theme
from workbench.rows import Origin

STORY = Service(KIMI_K2, targets.load("rtx-pro-6000"), ranks=8, mem_fraction=0.94, drafter=KIMI_DRAFTER)
VISION = experiment.VISION_BYTES


def test_the_story_is_bracketed_without_a_fitted_constant():
    plans = bracket(STORY, vision_bytes=VISION)
    assert plans.worst.pool_tokens < 218_000 < plans.best.pool_tokens
    nearest = plans.nearest(218_000)
    assert abs(nearest.pool_tokens / 218_000 - 1) < 0.05
    assert nearest.longest_context >= 200_000
    assert make_plan(STORY).kv_per_token[0].bytes == 70_272
    assert all(plan.reserve_left_bytes > 0 for plan in plans.plans)


def test_weights_sum_to_the_published_checkpoint():
    """moonshotai/Kimi-K2.5 is 554.30 GiB on disk: int4 experts, bf16 scales and rest, a vision tower."""
    whole = replace(STORY, ranks=1, drafter=None, assumptions=Assumptions(vision_bytes=VISION))
    assert make_plan(whole).loaded_bytes / GIB == pytest.approx(554.30, rel=2e-3)


def test_a_rank_by_hand():
    plan = make_plan(replace(STORY, drafter=None))
    experts = 60 * 384 * 3 * 7168 * 256 * 4.5 / 8
    attention = 61 * 2 * (7168 * 1536 + 1536 * 8 * 192 + 7168 * 576 + 512 * 8 * 256 + 8 * 128 * 7168)
    rest = 2 * (3 * 7168 * 2304 + 60 * (3 * 7168 * 256 + 384 * 7168)) + 2 * 2 * 20_480 * 7168
    assert plan.loaded_bytes == experts + attention + rest
    room = 0.94 * (96 * GIB - GIB // 2) - plan.loaded_bytes
    assert plan.pool_tokens == int(room // 70_272)


def test_inverse_questions_agree_with_the_plan():
    plan = make_plan(STORY)
    fraction = plan.fraction_for(256_000)
    again = make_plan(replace(STORY, mem_fraction=fraction))
    assert abs(again.pool_tokens - 256_000) <= 1
    assert plan.requests_at(46_000) == min(8, plan.pool_tokens // 46_008)
    assert plan.requests_at(10_000_000) == 0


def test_sharding_the_drafter_never_shrinks_the_pool():
    for weights, kv in (("replicated", "sharded"), ("sharded", "replicated"), ("replicated", "replicated")):
        worse = make_plan(replace(STORY, assumptions=Assumptions(drafter_weights=weights, drafter_kv=kv)))
        assert worse.pool_tokens < make_plan(STORY).pool_tokens


def test_bad_services_are_refused():
    with pytest.raises(ValueError, match="64 heads do not divide over 7 ranks"):
        replace(STORY, ranks=7)
    with pytest.raises(ValueError, match=r"mem_fraction=1\.2"):
        replace(STORY, mem_fraction=1.2)
    with pytest.raises(ValueError, match="choose one of bf16"):
        replace(STORY, assumptions=Assumptions(quantisation="int3"))


def test_quantisation_is_read_from_the_config(tmp_path):
    group = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}}
    int4 = {"quantization_config": {"quant_method": "compressed-tensors"} | group}
    assert expert_quantisation({}, tmp_path) == "bf16"
    assert expert_quantisation({"text_config": int4}, tmp_path) == "int4-g32"
    with pytest.raises(ValueError, match="'awq' is not known"):
        expert_quantisation({"quantization_config": {"quant_method": "awq"}}, tmp_path)


def test_floors_grow_with_context_and_shrink_with_bandwidth():
    def floor(name, context):
        return step_floor(KIMI_K2, targets.load(name), context=context, expert_bits=4.5).total_us

    assert floor("h200", 4096) < floor("h200", 200_000) < floor("rtx-pro-6000", 200_000)


@pytest.fixture(scope="module")
def rows():
    return experiment.run(experiment.Params(), step=lambda name: None)


def test_rows_say_what_they_are(rows):
    assert all(row.timing is None and row.origin is not Origin.MEASURED for row in rows)
    assert {row.origin for row in rows if row.case_id.startswith("roofline/")} == {Origin.PROJECTED}
    assert len({row.case_id for row in rows}) == len(rows)
    assert sum(bool(row.metrics.get("nearest")) for row in rows) == 1


def test_findings_state_the_conclusion(rows):
    text = " ".join(experiment.findings(rows))
    assert "218,000 tokens lie inside that bracket" in text
    assert "A request of 200,000 tokens fits" in text and "Projected, not measured" in text


def test_figures_are_labelled(rows):
    for figure in (figures.main_figure(rows), figures.ledger_figure(rows), figures.roofline_figure(rows)):
        theme.require_words(figure)
        assert len(figure.data) >= 2


def test_command_agrees_with_the_experiment(rows):
    result = CliRunner().invoke(commands.app, ["capacity", "--observed", "218000"])
    assert result.exit_code == 0, result.output
    for sentence in experiment.findings(rows):
        assert sentence in result.output.replace("\n", " ")


def test_a_checkpoint_folder_can_be_planned(tmp_path):
    from workbench.model.hf_config import to_hf_target

    (tmp_path / "config.json").write_text(json.dumps(to_hf_target(TINY_TARGET)))
    params = experiment.Params(
        model=str(tmp_path), drafter="none", hardware="h200", ranks=1, observed_tokens=0
    )
    rows = experiment.run(params, step=lambda name: None)
    assert any(row.case_id == "plan/bf16, context and collectives 0.5 GiB, no vision" for row in rows)
    assert experiment.findings(rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "ranks=0 is refused: should be greater than or equal to 1"),
        (["--mem-fraction", "3"], "mem_fraction=3.0 is refused: should be less than 1"),
    ],
)
def test_a_refused_value_is_one_line_that_names_it(words, message):
    result = CliRunner().invoke(commands.app, ["capacity", *words])
    assert one_line(result.exception) == message


def test_every_refused_value_is_named():
    with pytest.raises(ValueError) as caught:
        experiment.Params(ranks=0, running="many", nothing=1)
    text = one_line(caught.value)
    assert all(part in text for part in ("ranks=0", "running='many'", "nothing=1")) and "\n" not in text
    assert "pydantic" not in text and "http" not in text
