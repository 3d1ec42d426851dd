"""Notebook 40: what does a decode step cost eagerly, as two graphs around a host tree, as one graph?"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from workbench import targets
from workbench.measure.ledger import HOST_PARTS
from workbench.rows import Row
from workbench.targets import HardwareTarget

NAME = "eager_vs_graph"
MODES = ("eager", "split_graph", "step_graph")
COLUMNS = (
    "case_id", "status", "reason", "mode", "n", "median_us", "p10_us", "p90_us", "span_us", "axis_kv",
    "axis_acceptance", "axis_layout", "error_logits", "error_kv", "metric_launches_per_step",
    "metric_graph_launches_per_step", "metric_kernels_per_step", "metric_idle_share",
    "metric_node_gap_share", "metric_host_us", "metric_host_p90_us", "metric_host_schedule_us",
    "metric_host_launch_us", "metric_host_tree_us", "metric_host_collect_us", "metric_host_read_us",
    "metric_wait_us", "metric_one_off_us", "metric_replay_share", "metric_accept_length",
    "metric_verify_attention_us", "metric_verify_attention_share", "metric_unattributed_share",
    "metric_capture_s", "metric_warmup_s", "metric_reserved_bytes", "bytes", "metric_own_memory_us",
    "metric_real_bytes", "metric_real_memory_us",
)  # fmt: skip
MODEL_TITLES = {"tiny": "tiny", "narrow61": "61 narrow layers", "k2-rank": "Kimi K2 rank"}


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
    from workbench.experiments.step_bench import StepBench, release_memory
    from workbench.experiments.step_bytes import derive_reads

    target = targets.load(params.target)
    targets.require_hardware(target)
    rows: list[Row] = []
    for name in pick_models(params.models, target):
        step(f"load {name}")
        models = load_models(name, target, params.seed)
        for context in pick_contexts(params.contexts, target):
            case, prompts = make_case(name, context, params)
            bench = StepBench(
                case, target, models, prompts, steps=params.steps, rounds=params.rounds, seed=params.seed
            )
            rows += [*bench.run(step), *derive_reads(case, models, target)]
        largest = params.capture_bs or (2 if target.backend == "cpu" else 8)
        step(f"{name}: capture buckets 1..{largest}")
        rows += bench_capture(case, models, target, range(1, largest + 1), step)
        del models, bench
        release_memory()
    step(f"{params.launches} launches of one small kernel")
    return rows + bench_launch_paths(target, params.launches)


def pick_models(text: str, target: HardwareTarget) -> list[str]:
    """Model names of a parameter."""
    if text != "auto":
        return [name.strip() for name in text.split(",")]
    return ["tiny", "narrow61"] if target.backend == "cpu" else ["k2-rank"]


def pick_contexts(text: str, target: HardwareTarget) -> list[int]:
    """Prefix lengths of a parameter. Raises ValueError for anything but positive numbers."""
    if text == "auto":
        return [256] if target.backend == "cpu" else [4096, 46080, 65536]
    if not all(part.strip().isdigit() and int(part) > 0 for part in text.split(",")):
        raise ValueError(f"contexts={text!r}: give lengths with commas between, as in 4096,46080")
    return [int(part) for part in text.split(",")]


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
    from workbench.experiments.step_bench import StepCase

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


def findings(rows: list[Row]) -> list[str]:
    """What the rows say, in sentences."""
    sentences = [text for key, modes in groups(rows).items() for text in _case_findings(key, modes)]
    return [
        *sentences, *_read_findings(rows), *_failures(rows), *_capture_findings(rows),
        *_launch_findings(rows),
    ]  # fmt: skip


def _case_findings(key: tuple[str, int], modes: dict[str, Row]) -> Iterable[str]:
    model, context = key
    if not set(MODES) <= modes.keys():
        return
    times = {mode: _us(modes[mode]) / 1e3 for mode in MODES}
    eager, graph = modes["eager"], modes["step_graph"]
    best = min(times, key=lambda mode: times[mode])
    yield (
        f"{MODEL_TITLES.get(model, model)}, {context} tokens: a step takes {times['eager']:.2f} ms eagerly, "
        f"{times['split_graph']:.2f} ms with the tree on the host between two graphs and "
        f"{times['step_graph']:.2f} ms as one graph; {best} is the fastest. "
        f"{_metric(eager, 'launches_per_step'):.0f} single launches a step become "
        f"{_metric(graph, 'graph_launches_per_step'):.0f} graph launch and "
        f"{_metric(graph, 'launches_per_step'):.0f} single ones."
    )
    yield _ledger_finding(model, context, graph)
    if graph.metrics.get("idle_share") is not None:
        yield (
            f"{context} tokens: the GPU is idle {_metric(eager, 'idle_share'):.1%} of an eager step and "
            f"{_metric(graph, 'idle_share'):.1%} of a replayed one (gaps of at least 2 us; distances between "
            f"nodes add {_metric(graph, 'node_gap_share'):.1%})."
        )
    yield _host_finding(context, modes)


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


def _ledger_finding(model: str, context: int, row: Row) -> str:
    share = row.metrics.get("verify_attention_share")
    attention = f" Verify attention alone is {float(share):.0%} of the step." if share is not None else ""
    return (
        f"{MODEL_TITLES.get(model, model)}, {context} tokens, one graph: verify takes "
        f"{_share(row, 'verify'):.0%} of the step, draft {_share(row, 'draft'):.0%}, tree "
        f"{_share(row, 'tree'):.0%}, accept and commit {_share(row, 'accept') + _share(row, 'commit'):.0%}; "
        f"{_metric(row, 'unattributed_share'):.1%} is unattributed.{attention}"
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
        slowest = max(launch_rows, key=_us)
        graph = paths["replayed_graph"]
        yield (
            f"{graph.axes['launches']} launches of one small kernel cost the host {_us(slowest):.0f} us "
            f"through {slowest.variant} and {_us(graph):.0f} us as a replayed graph."
        )


def _us(row: Row) -> float:
    assert row.timing is not None
    return row.timing.median_us


def _metric(row: Row, name: str) -> float:
    return float(row.metrics.get(name) or 0.0)


def _share(row: Row, stage: str) -> float:
    return _metric(row, f"{stage}_us") / _metric(row, "step_us") if _metric(row, "step_us") else 0.0
