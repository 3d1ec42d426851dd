"""Notebook 40: what does a decode step cost eagerly, as two graphs around a host tree, as one graph?"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from workbench import targets
from workbench.experiments.parameters import read_counts
from workbench.experiments.step_findings import MODEL_TITLES, MODES, findings, groups, part_us
from workbench.rows import Row
from workbench.targets import HardwareTarget

if TYPE_CHECKING:
    from workbench.experiments.step_bench import StepBench

__all__ = ["MODEL_TITLES", "MODES", "Params", "findings", "groups", "part_us", "run"]
NAME = "eager_vs_graph"
COLUMNS = (
    "case_id", "status", "reason", "mode", "n", "median_us", "p10_us", "p90_us", "span_us", "axis_kv",
    "axis_acceptance", "axis_layout", "error_logits", "error_kv", "metric_launches_per_step",
    "metric_graph_launches_per_step", "metric_kernels_per_step", "metric_idle_share",
    "metric_node_gap_share", "metric_trace_reason", "metric_host_us", "metric_host_p90_us",
    "metric_host_schedule_us",
    "metric_host_launch_us", "metric_host_tree_us", "metric_host_collect_us", "metric_host_read_us",
    "metric_wait_us", "metric_one_off_us", "metric_replay_share", "metric_accept_length",
    "metric_layers", "metric_verify_attention_us", "metric_typical_step_us", "metric_typical_unattributed_us",
    "metric_typical_between_us", "metric_unattributed_share",
    "metric_capture_s", "metric_warmup_s", "metric_reserved_bytes", "bytes", "metric_own_memory_us",
    "metric_real_bytes", "metric_real_memory_us",
)  # fmt: skip
LAYOUTS = ("random", "contiguous")


class Params(BaseModel):
    """Parameters of notebook 40."""

    model_config = ConfigDict(extra="forbid")
    target: str = Field("cpu", description="hardware target, one of data/targets")
    seed: int = Field(0, description="seed of weights, prompts and slot layout")
    models: str = Field("auto", description="models with commas between; auto = tiny,narrow61 or k2-rank")
    contexts: str = Field("auto", description="prefix lengths with commas between; auto = the target's own")
    budget: int = Field(16, ge=1, le=1023, description="tree nodes besides the root")
    bs: int = Field(1, ge=1, description="requests in the batch")
    layout: str = Field("random", description="slots of the prefix: random or contiguous")
    steps: int = Field(8, ge=4, description="timed steps per round")
    rounds: int = Field(2, ge=1, description="rounds, the three modes alternating")
    launches: int = Field(61, ge=1, description="launches of the launch-path comparison")
    capture_bs: int = Field(0, ge=0, description="buckets 1..this are captured; 0 = 2 on cpu, 8 on a GPU")

    @field_validator("layout")
    @classmethod
    def _known_layout(cls, text: str) -> str:
        if text not in LAYOUTS:
            raise ValueError(f"choose one of {', '.join(LAYOUTS)}")
        return text

    @field_validator("models")
    @classmethod
    def _known_models(cls, text: str) -> str:
        require_models(text)
        return text

    @field_validator("contexts")
    @classmethod
    def _positive_contexts(cls, text: str) -> str:
        parse_contexts(text)
        return text


def run(params: Params, step: Callable[[str], None] = print) -> list[Row]:
    """Rows per model, context and mode; then capture cost per bucket; then the launch paths.

    On cpu one thread is used, so that launches are timed and not the scheduling of threads.
    """
    import torch

    threads = torch.get_num_threads()
    if params.target == "cpu":
        torch.set_num_threads(1)
    try:
        return run_all(params, step)
    finally:
        torch.set_num_threads(threads)


def run_all(params: Params, step: Callable[[str], None]) -> list[Row]:
    from workbench.experiments.capture_bench import bench_capture
    from workbench.experiments.launch_paths import bench_launch_paths

    target = targets.load(params.target)
    targets.require_hardware(target)
    step(f"{params.launches} launches of one small kernel")
    launch_rows = bench_launch_paths(target, params.launches)
    names = pick_models(params.models, target)
    largest = params.capture_bs or (2 if target.backend == "cpu" else 8)
    benches: dict[str, list[StepBench]] = {}
    captures: dict[str, list[Row]] = {}
    loaded = LoadedModels(target, params.seed, step)
    for name in names:
        models = loaded.get(name)
        benches[name] = make_benches(name, params, target)
        for bench in benches[name]:
            bench.time(models, step)
        step(f"{name}: capture buckets 1..{largest}")
        captures[name] = bench_capture(bench.case, models, target, range(1, largest + 1), step)
        del models
    found: dict[str, list[Row]] = {}
    for name in reversed(names):  # a profiler last of all; the model loaded last is still there
        found[name] = [row for bench in benches[name] for row in trace_bench(bench, loaded.get(name), step)]
    loaded.release()
    return [row for name in names for row in found[name] + captures[name]] + launch_rows


def make_benches(name: str, params: Params, target: HardwareTarget) -> "list[StepBench]":
    """One bench per context of this model."""
    from workbench.experiments.step_bench import StepBench

    cases = [make_case(name, context, params) for context in pick_contexts(params.contexts, target)]
    return [
        StepBench(case, target, prompts, steps=params.steps, rounds=params.rounds, seed=params.seed)
        for case, prompts in cases
    ]


def trace_bench(bench: "StepBench", models: Any, step: Callable[[str], None]) -> list[Row]:
    """The rows of a timed case."""
    from workbench.experiments.step_bytes import derive_reads

    return [*bench.trace(models, step), *derive_reads(bench.case, models, bench.target)]


class LoadedModels:
    """The pair in use, one at a time: a large one fills the device."""

    def __init__(self, target: HardwareTarget, seed: int, step: Callable[[str], None]) -> None:
        self.target, self.seed, self.step = target, seed, step
        self.name, self.models = "", (None, None)

    def get(self, name: str) -> tuple[Any, Any]:
        """The pair called `name`, loaded unless it is the one in use; nobody may hold the one before."""
        if name != self.name:
            self.release()
            self.step(f"load {name}")
            self.name, self.models = name, load_models(name, self.target, self.seed)
        return self.models

    def release(self) -> None:
        """Give the memory of the pair back."""
        from workbench.experiments.step_case import release_memory

        self.name, self.models = "", (None, None)
        release_memory()


def pick_models(text: str, target: HardwareTarget) -> list[str]:
    """Model names of a parameter, each once."""
    if text != "auto":
        return list(dict.fromkeys(name.strip() for name in text.split(",")))
    return ["tiny", "narrow61"] if target.backend == "cpu" else ["k2-rank"]


def pick_contexts(text: str, target: HardwareTarget) -> list[int]:
    """Prefix lengths of a parameter. Raises ValueError for anything but positive numbers."""
    return parse_contexts(text) or ([256] if target.backend == "cpu" else [4096, 46080, 65536])


def parse_contexts(text: str) -> list[int]:
    """Lengths with commas between, each once; none for auto. Raises ValueError unless all are positive."""
    if text == "auto":
        return []
    return read_counts(text, f"contexts={text!r}: give lengths with commas between, as in 4096,46080")


def require_models(text: str) -> None:
    """Raise ValueError for a name that is neither a preset nor a checkpoint folder."""
    names = [name.strip() for name in text.split(",")]
    if text == "auto" or all(name in MODEL_TITLES for name in names):
        return  # known without loading the presets
    from workbench.model.presets import PRESETS

    known = ("narrow61", "tiny", *(name for name in PRESETS if name != "tiny"))
    for name in names:
        if name not in known and not Path(name).is_dir():
            raise ValueError(f"unknown model {name!r}: auto alone, or some of {', '.join(known)}")


def load_models(name: str, target: HardwareTarget, seed: int) -> tuple[Any, Any]:
    """The pair called `name` on the target's device."""
    device = "cuda" if target.backend == "cuda" else "cpu"
    if name == "narrow61":
        return narrow_pair(seed, device)
    if name == "tiny":
        from workbench.model.weights import load_pair

        return load_pair("tiny", device=device, dtype="fp32" if device == "cpu" else None)
    from workbench.model.presets import build

    return build(name, device=device, seed=seed)


def narrow_pair(seed: int, device: str) -> tuple[Any, Any]:
    """61 layers so narrow that launching them is most of the work; untrained."""
    from workbench.model.pair import TINY_DRAFTER, TINY_TARGET, random_pair

    target = replace(
        TINY_TARGET, name="narrow61", hidden_size=64, num_layers=61, num_heads=2, latent=32, rope=16, nope=16,
        v_head_dim=16, intermediate_size=128, first_dense=61, moe=None,
    )  # fmt: skip
    drafter = replace(
        TINY_DRAFTER, hidden_size=64, num_layers=1, num_heads=2, kv_heads=1, intermediate_size=128
    )
    return random_pair(seed, device=device, target_config=target, drafter_config=drafter)


def make_case(name: str, context: int, params: Params) -> tuple[Any, list[list[int]]]:
    """The case and its prompts: real text for a trained model, noise in the pool for an untrained one."""
    from workbench.experiments.step_case import StepCase

    is_trained = name == "tiny"
    case = StepCase(
        name, context, params.bs, params.budget, layout=params.layout, random_kv=not is_trained,
        accept_length=None if is_trained else 3.5,
    )  # fmt: skip
    if not is_trained:
        return case, [[1] * context for _ in range(params.bs)]
    from workbench.model.prompts import load_prompts

    text = "\n".join(prompt.text for prompt in load_prompts("code")).encode()
    text *= -(-context * (params.bs + 1) // len(text))
    return case, [list(text[row * 97 : row * 97 + context]) for row in range(params.bs)]
