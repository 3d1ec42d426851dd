"""Notebook 50: does a draft tree pay over a chain, and speculation over plain decode, eager and replayed?"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from workbench import targets
from workbench.experiments.speculative_check import check_greedy, check_sampled
from workbench.experiments.speculative_verdict import findings, verdicts
from workbench.measure import gpu_state
from workbench.measure.statistics import is_stable, quantile
from workbench.rows import Origin, Row, RowStatus, Scalar, Timing
from workbench.targets import HardwareTarget

__all__ = ["COLUMNS", "VERDICT_COLUMNS", "Params", "findings", "run"]
NAME = "speculative_decode"
COLUMNS = (
    "variant", "axis_execution", "axis_budget", "axis_temperature", "status", "reason",
    "metric_accept_length", "metric_tokens_per_s", "median_us", "p10_us", "p90_us", "n",
    "metric_replayed_share", "metric_draft_us", "metric_tree_us", "metric_verify_us", "metric_accept_us",
    "metric_lossless",
)  # fmt: skip
VERDICT_COLUMNS = (
    "variant", "axis_execution", "axis_budget", "axis_temperature", "metric_pays",
    "metric_tokens_per_s_ratio", "metric_tokens_per_s_low", "metric_tokens_per_s_high", "metric_two_factors",
    "metric_accept_ratio", "metric_step_ratio", "metric_rest_ratio", "metric_fill_ratio",
    "metric_uneven_ratio", "metric_outside_ratio",
)  # fmt: skip


class Params(BaseModel):
    """Parameters of notebook 50."""

    model_config = ConfigDict(extra="forbid")
    target: str = Field("cpu", description="hardware target, one of data/targets")
    seed: int = Field(0, description="seed of sampling; repetition r uses seed + r")
    model: str = Field("tiny", description="pair of data/models, or a folder with a target and a drafter")
    dtype: str = Field("fp32", description="fp32, where greedy output must be identical, or bf16")
    budgets: list[int] = Field([16], description="tree nodes without the root; a chain has block - 1")
    temperatures: list[float] = Field([0.0, 0.7], description="0 is greedy")
    executions: list[str] = Field(
        ["eager", "step_graph"], description="how a step is launched: eager, step_graph or split_graph"
    )
    prompts: int = Field(4, ge=1, description="prompts decoded together")
    prompt_tokens: int = Field(96, ge=1, description="last tokens of each prompt that are kept")
    new_tokens: int = Field(32, ge=2, description="tokens decoded per prompt")
    repeats: int = Field(3, ge=1, description="passes over all arms, every second one in reverse order")
    variant: str = Field("auto", description="verify-attention variant")
    gap_bound: float = Field(0.1, ge=0, description="logit gap below which a bf16 divergence is a near tie")


@dataclass(frozen=True)
class Arm:
    """One way to decode."""

    shape: str
    execution: str
    budget: int  # drafts of a chain, nodes of a tree, 0 without drafts
    temperature: float

    @property
    def name(self) -> str:
        return f"{self.shape}/{self.execution}/B{self.budget}/T{self.temperature:g}"

    def axes(self) -> dict[str, Scalar]:
        return {"execution": self.execution, "budget": self.budget, "temperature": self.temperature}


@dataclass
class Outcome:
    """What the repetitions of one arm gave."""

    arm: Arm
    decoder: Any
    results: list[Any] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Decoded tokens of all passes; each request's first comes from its prefill."""
        return sum(decoded(result) for result in self.results)

    @property
    def decode_s(self) -> float:
        """Time outside of prefill, all passes."""
        return sum(result.seconds - result.prefill_s for result in self.results)

    @property
    def accept_length(self) -> float:
        lengths = [n for r in self.results for per_prompt in r.accept_lengths for n in per_prompt]
        return sum(lengths) / len(lengths)

    def step_samples_us(self) -> list[float]:
        """Full-batch steps but the first of each repetition, which finds cold caches."""
        records = [r for result in self.results for r in result.ledger.records[1:]]
        full = max(r.bs for r in records)
        return [r.step_us for r in records if r.bs == full]

    def rate_factors(self, bs: int) -> dict[str, Scalar]:
        """tokens/s = bs x accept_length x batch_fill / (median full step x both other factors)."""
        records = [r for result in self.results for r in result.ledger.records]
        steps_s = sum(r.step_us for r in records) / 1e6
        mean_us = steps_s * 1e6 / len(records)
        return {
            "batch_fill": self.tokens / (len(records) * self.accept_length * bs),
            "mean_over_full_step": mean_us / quantile(self.step_samples_us(), 0.5),
            "decode_over_steps": self.decode_s / steps_s,
        }


def decoded(result: Any) -> int:
    """Tokens that came from decode steps."""
    return sum(len(tokens) - 1 for tokens in result.tokens)


def arms(params: Params, drafts: int) -> Iterator[Arm]:
    """Every arm: without drafts, chain, chain through the tree machinery, tree per budget."""
    for temperature in params.temperatures:
        for execution in params.executions:
            for shape, budget in (("none", 0), ("chain", drafts), ("chain_tree", drafts)):
                yield Arm(shape, execution, budget, temperature)
            for budget in params.budgets:
                yield Arm("tree", execution, budget, temperature)


def run(params: Params, step: Callable[[str], None] = print) -> list[Row]:
    """One row per arm, then derived rows that compare arms of the same execution and temperature."""
    target = targets.load(params.target)
    targets.require_hardware(target)
    with one_thread():
        return run_arms(params, target, step)


@contextmanager
def one_thread() -> Iterator[None]:
    """Host operations on one core: at this size threads wait for each other longer than they work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_arms(params: Params, target: HardwareTarget, step: Callable[[str], None]) -> list[Row]:
    """Decode with every arm, check, compare."""
    step(f"load {params.model}")
    pair, prompts = load(params, target)
    outcomes = [
        Outcome(arm, make_decoder(arm, pair, params)) for arm in arms(params, pair[1].config.block_size - 1)
    ]
    with gpu_state.GpuSampler() as sampler:
        for repeat in range(params.repeats):
            for outcome in outcomes[:: -1 if repeat % 2 else 1]:
                step(f"pass {repeat + 1}: {outcome.arm.name}")
                decode(outcome, prompts, params, repeat)
    step("check against plain decode")
    rows = [to_row(o, outcomes, pair[0], prompts, target, params, sampler.state()) for o in outcomes]
    return rows + verdicts(rows)


def load(params: Params, target: HardwareTarget) -> tuple[tuple[Any, Any], list[list[int]]]:
    """((target, drafter), prompts as token ids)."""
    from pathlib import Path

    from workbench.model.prompts import load_prompts
    from workbench.model.tokenizer import load_tokenizer
    from workbench.model.weights import MODELS_DIR, load_pair

    pair = load_pair(params.model, device=target.backend, dtype=params.dtype)
    folder = Path(params.model) if Path(params.model).is_dir() else MODELS_DIR / params.model
    tokenizer = load_tokenizer(folder, pair[0].config)
    texts = [prompt.text for prompt in load_prompts()]
    if params.prompts > len(texts):
        raise ValueError(f"prompts={params.prompts}: data/prompts holds {len(texts)}")
    return pair, [tokenizer.encode(text)[-params.prompt_tokens :] for text in texts[: params.prompts]]


def make_decoder(arm: Arm, pair: tuple[Any, Any], params: Params) -> Any:
    """A decoder with one bucket, all prompts at once."""
    from workbench.decode import SpeculativeDecoder

    rows = params.prompt_tokens + params.new_tokens + 4 * (max([*params.budgets, arm.budget]) + 1)
    return SpeculativeDecoder(
        *pair,
        mode=arm.execution,  # type: ignore[arg-type]
        shape=arm.shape,  # type: ignore[arg-type]
        budget=arm.budget,
        variant=params.variant,
        max_batch=params.prompts,
        max_context=rows,
        batch_sizes=[params.prompts],
    )


def decode(outcome: Outcome, prompts: list[list[int]], params: Params, repeat: int) -> None:
    """One repetition; the first call captures, outside of the decode's own time."""
    decoder, temperature = outcome.decoder, outcome.arm.temperature
    decoder.seed = params.seed + repeat
    decoder.use_sampling(temperature)
    if outcome.arm.execution != "eager" and not outcome.results:
        decoder.capture()
    outcome.results.append(decoder.generate(prompts, params.new_tokens, temperature))


def to_row(
    outcome: Outcome,
    outcomes: list[Outcome],
    model: Any,
    prompts: list[list[int]],
    target: HardwareTarget,
    params: Params,
    gpu: Any,
) -> Row:
    """Checked first: an arm whose output is not the target's gets no timing."""
    arm = outcome.arm
    if arm.temperature == 0:
        plain = next(o for o in outcomes if o.arm.shape == "none" and o.arm.temperature == 0)
        check = check_greedy(outcome.results, plain.results, model, prompts, params.dtype, params.gap_bound)
    else:
        check = check_sampled(outcome.results, model, prompts, arm.temperature)
    samples = outcome.step_samples_us()
    timing = Timing(
        mode="eager" if arm.execution == "eager" else "graph",
        l2="n/a",
        n=len(samples),
        median_us=quantile(samples, 0.5),
        p10_us=quantile(samples, 0.1),
        p90_us=quantile(samples, 0.9),
        samples=tuple(round(s, 3) for s in samples),
        stable=is_stable(samples),
    )
    return Row(
        case_id=arm.name,
        experiment=NAME,
        variant=arm.shape,
        target=target.name,
        origin=Origin.MEASURED,
        status=RowStatus.PASSED if check.passed else RowStatus.INCORRECT,
        reason="" if check.passed else check.words,
        axes=arm.axes() | {"bs": params.prompts, "dtype": params.dtype, "model": params.model},
        timing=timing if check.passed else None,
        metrics=measure_metrics(outcome) | {"lossless": check.words} | check.metrics,
        gpu=gpu,
        repro=f"workbench run 50_speculative_decode --target {target.name}",
    )


def measure_metrics(outcome: Outcome) -> dict[str, Scalar]:
    """Acceptance, rate, and the ledger's means over all repetitions."""
    last = outcome.results[-1]
    metrics: dict[str, Scalar] = {
        "accept_length": outcome.accept_length,
        "tokens_per_s": outcome.tokens / outcome.decode_s,
        "steps": sum(len(r.ledger.records) for r in outcome.results),
        "replayed_share": last.replay.share,
        "replay": last.replay.sentence(),
        "graph_backend": last.replay.backend,
    }
    metrics |= outcome.rate_factors(len(last.tokens))
    for number, result in enumerate(outcome.results, 1):
        metrics[f"tokens_per_s_pass{number}"] = decoded(result) / (result.seconds - result.prefill_s)
    for position, share in enumerate(last.acceptance.per_position(), 1):
        metrics[f"accepted_at_{position}"] = share
    summaries = [r.ledger.summary(skip=1) for r in outcome.results]
    for name in summaries[0]:
        if name.endswith("_us") and name != "step_us":
            metrics[name] = sum(s[name] for s in summaries) / len(summaries)
    return metrics
