"""Notebook 50's experiment: rows that hold together, checks that can fail, verdicts with both factors."""

import math
from dataclasses import dataclass

import pytest
import torch

from workbench.experiments import speculative_decode as experiment
from workbench.experiments.speculative_check import check_greedy, check_sampled
from workbench.experiments.speculative_verdict import compare, differs, rate_interval
from workbench.report.figures import speculative_decode as figures
from workbench.report.figures import theme
from workbench.rows import Origin, Row, RowStatus, Timing

VOCAB = 6


@dataclass
class Output:
    tokens: list[list[int]]


class MarkovModel:
    """A target whose next token depends on the last one only."""

    device = "cpu"

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def score(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return self.logits[token_ids], None, None

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def sample(model: MarkovModel, start: int, n: int, temperature: float, favour: float = 0.0) -> list[int]:
    tokens = [start]
    for _ in range(n):
        row = model.logits[tokens[-1]] / temperature
        p = torch.softmax(row, -1)
        p = p + favour * (p == p.max())  # a sampler that prefers what a drafter would propose
        tokens.append(int(torch.multinomial(p, 1)))
    return tokens[1:]


def test_sampled_check_passes_the_target_and_fails_a_biased_sampler() -> None:
    torch.manual_seed(0)
    model = MarkovModel(torch.randn(VOCAB, VOCAB) * 1.5)
    fair = [Output([sample(model, 0, 2000, 0.8)])]
    assert check_sampled(fair, model, [[0]], 0.8).passed
    biased = check_sampled([Output([sample(model, 0, 2000, 0.8, favour=0.5)])], model, [[0]], 0.8)
    assert not biased.passed and biased.metrics["surprise_z"] < -4
    assert not check_sampled(fair, model, [[0]], 0.5).passed  # another temperature is another law


def test_greedy_check_allows_near_ties_only_outside_fp32() -> None:
    logits = torch.zeros(VOCAB, VOCAB)
    logits[1, 2], logits[1, 3] = 4.0, 3.99  # behind token 1 the best two are close
    logits[2, 5] = 3.0
    model = MarkovModel(logits)
    plain, close, far = (Output([t]) for t in ([1, 2, 5], [1, 3, 0], [1, 2, 0]))
    same = check_greedy([plain], [plain], model, [[0]], "fp32", 0.1)
    assert same.passed and "identical" in same.words
    assert not check_greedy([close], [plain], model, [[0]], "fp32", 0.1).passed
    near = check_greedy([close], [plain], model, [[0]], "bf16", 0.1)
    assert near.passed and near.metrics["largest_gap"] == pytest.approx(0.01, abs=1e-4)
    assert not check_greedy([far], [plain], model, [[0]], "bf16", 0.1).passed
    cut = Output([[1, 2]])  # an output that ends early is no identical one, whatever the gap
    assert not check_greedy([cut], [plain], model, [[0]], "bf16", 100.0).passed


def arm(shape: str, accept_length: float, step_us: float, rates: list[float], **factors: float) -> Row:
    samples = [step_us * (1 + d / 1000) for d in (-20, -15, -10, -5, 0, 5, 10, 15, 20)]
    timing = Timing(mode="graph", l2="n/a", n=len(samples), median_us=step_us,
                    p10_us=min(samples), p90_us=max(samples), samples=tuple(samples))  # fmt: skip
    metrics = {"batch_fill": 1.0, "mean_over_full_step": 1.0, "decode_over_steps": 1.0} | factors
    return Row(
        case_id=shape, experiment="x", variant=shape, target="cpu", origin=Origin.MEASURED,
        status=RowStatus.PASSED, timing=timing,
        axes={"execution": "step_graph", "budget": 16, "temperature": 0.0},
        metrics=metrics | {"accept_length": accept_length, "tokens_per_s": sum(rates) / len(rates)}
        | {f"tokens_per_s_pass{i}": rate for i, rate in enumerate(rates, 1)},
    )  # fmt: skip


@pytest.mark.parametrize("gain,pays", [(1.2, "yes"), (1.0, "undecided"), (0.8, "no")])
def test_the_measured_rate_decides_whatever_the_two_factors_say(gain: float, pays: str) -> None:
    chain = arm("chain", 4.0, 100.0, [400.0, 410.0, 405.0])
    rates = [400.0 * gain, 412.0 * gain, 404.0 * gain]
    row = compare(arm("tree", 8.0, 100.0, rates), chain)  # twice as fast by the factors
    assert row.metrics["two_factors"] == pytest.approx(2.0) and row.timing is None
    assert row.metrics["tokens_per_s_ratio"] == pytest.approx(gain, rel=0.01)
    assert (
        row.metrics["tokens_per_s_low"] < row.metrics["tokens_per_s_ratio"] < row.metrics["tokens_per_s_high"]
    )
    assert row.metrics["pays"] == pays and differs(row)
    told = next(text for text in experiment.findings([row]) if text.startswith("step_graph"))
    assert f"{gain:.2f}x the tokens per second" in told and "differs by more than the noise" in told


def test_one_pass_decides_nothing_and_equal_factors_do_not_differ() -> None:
    tree, chain = arm("tree", 4.8, 100.0, [1.2]), arm("chain", 4.0, 100.0, [1.0])
    row = compare(tree, chain)
    assert row.metrics["pays"] == "undecided" and row.metrics["tokens_per_s_low"] is None
    row = compare(arm("tree", 4.8, 100.0, [1.2, 1.21]), arm("chain", 4.0, 100.0, [1.0, 1.0]))
    assert not differs(row) and row.metrics["rest_ratio"] == pytest.approx(1.0, rel=0.01)


def test_interval_covers_the_true_ratio_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(3)
    noise = torch.exp(0.05 * torch.randn(400, 2, 3, generator=generator, dtype=torch.float64))
    covered = 0
    for ours, theirs in noise.tolist():
        low, high = rate_interval(arm("tree", 1, 1, [1.3 * x for x in ours]), arm("chain", 1, 1, theirs))
        covered += low <= 1.3 <= high
    assert 0.92 <= covered / 400 <= 0.98


def test_small_run_is_lossless_and_tells_both_factors() -> None:
    params = experiment.Params(prompts=2, new_tokens=10, prompt_tokens=40, repeats=1, budgets=[10])
    steps: list[str] = []
    rows = experiment.run(params, steps.append)
    arms = [row for row in rows if row.origin is Origin.MEASURED]
    assert len(arms) == 2 * 2 * 4 and len({row.case_id for row in rows}) == len(rows)
    assert [row.status for row in arms] == [RowStatus.PASSED] * len(arms)
    by_case = {row.case_id: row for row in arms}
    for execution in ("eager", "step_graph"):
        chain, machinery = by_case[f"chain/{execution}/B7/T0"], by_case[f"chain_tree/{execution}/B7/T0"]
        assert chain.metrics["accept_length"] == machinery.metrics["accept_length"]  # the entry check
        tree = by_case[f"tree/{execution}/B10/T0"]
        assert tree.metrics["accept_length"] >= chain.metrics["accept_length"] > 1
        assert by_case[f"none/{execution}/B0/T0"].metrics["accept_length"] == 1
        assert tree.metrics["replayed_share"] == (execution == "step_graph")
    assert {row.variant for row in rows if row.origin is Origin.DERIVED} == {
        "chain over none", "tree over none", "tree over chain", "chain_tree over chain",
        "tree over chain_tree",
    }  # fmt: skip
    for row in rows:
        if row.origin is Origin.DERIVED:  # the factors' product is the measured ratio, none is a guess
            parts = ("accept_ratio", "fill_ratio", "uneven_ratio", "outside_ratio")
            product = math.prod(float(row.metrics[name]) for name in parts) / row.metrics["step_ratio"]
            assert product == pytest.approx(row.metrics["tokens_per_s_ratio"], rel=1e-6)
    said = experiment.findings(rows)
    assert said[0].startswith("Measured end to end, step_graph") and "tokens per second" in said[0]
    assert any("token-identical" in text for text in said) and any("full step" in text for text in said)
    for make in (figures.main_figure, figures.acceptance_figure, figures.ledger_figure):
        theme.require_words(make(rows))


def test_too_many_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="data/prompts holds"):
        experiment.run(experiment.Params(prompts=10_000), lambda _: None)
