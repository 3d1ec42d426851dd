"""Is this machine fit to measure? Its rates against the target, clocks, neighbours, versions."""

import importlib.util
import os
import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from workbench import targets
from workbench.measure import gpu_state, timing
from workbench.rows import GpuState, Origin, Row, RowStatus, Scalar
from workbench.targets import HardwareTarget

EXPERIMENT = "target_check"
PACKAGES = ("torch", "triton", "cupy-cuda12x", "cupy-cuda13x", "transformers", "plotly", "papermill")
LAUNCHES = 50  # tiny operations per timed call
BUSY_LOAD_PER_CORE = 0.5  # above it another program takes part of what is timed


class Params(BaseModel):
    """How much to move and multiply."""

    model_config = ConfigDict(extra="forbid")
    target: str = Field("cpu", description="hardware target that this machine should be")
    seed: int = Field(0, description="seed of the operands")
    copy_mb: int = Field(0, ge=0, description="megabytes read by the copy; 0 = 64 on cpu, 512 on a GPU")
    matmul_size: int = Field(0, ge=0, description="edge of the square matmul; 0 = 768 on cpu, 8192 on a GPU")
    samples: int = Field(15, ge=3, description="samples of each rate")


def run(params: Params, step: Callable[[str], None] = print) -> list[Row]:
    """Rows `rate/*` with a timing and a floor, rows `state/*` with what the machine says about itself."""
    target = targets.load(params.target)
    step("read versions and neighbours")
    rows = [_versions(target), _machine(target), _neighbours(target)]
    step("compile the CUDA sources for this target")
    rows.append(_kernels(target))
    with gpu_state.GpuSampler() as sampler:
        for name, call in (("copy", _copy), ("matmul", _matmul), ("launch", _launch)):
            step(f"time {name}")
            rows.append(call(target, params))
    step("read clocks under load")
    return [*rows, _clocks(target, sampler.state())]


def findings(rows: list[Row]) -> list[str]:
    """Whether the machine reaches its target's rates and is alone; numbers from the rows."""
    by_case = {row.case_id: row for row in rows}
    found = [_rate_finding(by_case[f"rate/{name}"]) for name in ("copy", "matmul")]
    launch = by_case["rate/launch"].metrics["us_per_launch"]
    found.append(f"One tiny operation costs {launch:.2f} µs when launched eagerly.")
    problems = [
        row.reason for row in rows if row.status is not RowStatus.PASSED and row.metrics.get("blocks")
    ]
    found.append(f"Not fit to measure: {'; '.join(problems)}." if problems else _fit(by_case))
    return found


def _rate_finding(row: Row) -> str:
    unit = str(row.metrics["unit"])
    measured, expected = float(row.metrics["rate"] or 0), float(row.metrics["target_rate"] or 0)
    peak = row.metrics.get("peak_rate")
    limit = f" (a copy above its peak of {peak:.4g} {unit} would stop the run)" if peak else ""
    return (
        f"{row.variant.capitalize()} reaches {measured:.4g} {unit}, {100 * measured / expected:.0f} % of the"
        f" {expected:.4g} {unit} that target {row.target} counts with{limit}."
    )


def _fit(by_case: dict[str, Row]) -> str:
    clocks = by_case["state/clocks"]
    if clocks.status is not RowStatus.PASSED:
        return f"Nothing speaks against measuring here; clocks are unknown ({clocks.reason})."
    throttling = clocks.gpu.throttle_reasons if clocks.gpu else "unknown"
    return f"Nothing speaks against measuring here; throttle reasons under load: {throttling}."


def _copy(target: HardwareTarget, params: Params) -> Row:
    import torch

    megabytes = params.copy_mb or (64 if target.backend == "cpu" else 512)
    device = "cuda" if target.backend == "cuda" else "cpu"
    pairs = [torch.empty(2, megabytes * 2**18, device=device).normal_() for _ in range(2)]  # fp32, [2, n]
    moved = 2 * megabytes * 2**20  # read once, written once
    calls = [lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs]
    took = timing.measure(calls, target=target, l2="cold", n=params.samples, bytes_per_call=moved, budget_s=4)
    timing.check_bandwidth(moved, took.median_us, target, "cold")
    metrics = {"rate": moved / took.median_us / 1e3, "unit": "GB/s", "target_rate": target.dram_gbps}
    metrics |= {"peak_rate": target.dram_peak_gbps}
    axes: dict[str, Scalar] = {"megabytes": megabytes, "dtype": "fp32"}
    floor = moved / (target.dram_gbps * 1e3)
    return _rate("copy", target, axes, metrics, timing=took, bytes=moved, floor_us=floor)


def _matmul(target: HardwareTarget, params: Params) -> Row:
    import torch

    size = params.matmul_size or (768 if target.backend == "cpu" else 8192)
    device, dtype = ("cuda", torch.bfloat16) if target.backend == "cuda" else ("cpu", torch.float32)
    generator = torch.Generator(device).manual_seed(params.seed)
    a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    took = timing.measure(
        lambda: torch.mm(a, b, out=out), target=target, l2="warm", n=params.samples, budget_s=4
    )
    flops = 2 * size**3
    metrics = {"rate": flops / took.median_us / 1e6, "unit": "TFLOP/s", "target_rate": target.tensor_tflops}
    axes: dict[str, Scalar] = {"size": size, "dtype": str(dtype).removeprefix("torch.")}
    floor = flops / (target.tensor_tflops * 1e6)
    return _rate("matmul", target, axes, metrics, timing=took, flops=flops, floor_us=floor)


def _launch(target: HardwareTarget, params: Params) -> Row:
    import torch

    one = torch.zeros(1, device="cuda" if target.backend == "cuda" else "cpu")

    def launch_many() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    took = timing.measure(launch_many, target=target, l2="warm", n=params.samples, budget_s=2)
    per_launch_us = (took.span_us or took.median_us) / LAUNCHES
    metrics: dict[str, Scalar] = {"us_per_launch": per_launch_us, "launches": LAUNCHES}
    return _rate("launch", target, {"launches": LAUNCHES}, metrics, timing=took)


def _machine(target: HardwareTarget) -> Row:
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    metrics: dict[str, Scalar] = {"cores": len(os.sched_getaffinity(0)), "memory_bytes": memory}
    metrics |= {"torch_threads": torch.get_num_threads(), "device": "cpu"}
    if target.backend == "cuda":
        device = torch.cuda.get_device_properties(0)
        metrics |= {
            "device": device.name,
            "sm_count": device.multi_processor_count,
            "l2_bytes": device.L2_cache_size,
        }
        metrics |= {"device_memory_bytes": device.total_memory}
    return _state("machine", target, metrics)


def _versions(target: HardwareTarget) -> Row:
    metrics: dict[str, Scalar] = {"python": platform.python_version()}
    for name in PACKAGES:
        if importlib.util.find_spec(name.split("-")[0]) is None:
            continue
        try:
            metrics[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return _state("versions", target, metrics)


def _kernels(target: HardwareTarget) -> Row:
    from workbench.attention import build

    if target.backend == "cpu":
        return _state("kernels", target, {}, reason="target cpu runs no CUDA kernel")
    try:
        compiler = build.compiler_version()
        report = [one for source in build.sources() for one in build.report(source, target.arch)]
    except OSError as error:
        return _state("kernels", target, {}, reason=str(error))
    metrics: dict[str, Scalar] = {"compiled": len(report), "compiler": compiler}
    metrics["spilling"] = sum(one.spills for one in report)
    return _state("kernels", target, metrics)


def _neighbours(target: HardwareTarget) -> Row:
    if target.backend == "cpu":
        load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
        busy = load_problem(load, cores)
        metrics: dict[str, Scalar] = {"load_average": load, "cores": cores, "load_per_core": load / cores}
        metrics["blocks"] = bool(busy)
        return _state("neighbours", target, metrics, reason=busy)
    others, reason = gpu_state.neighbours()
    if others is None:
        return _state("neighbours", target, {}, reason=reason)
    busy = f"{len(others)} other processes hold memory on the GPU" if others else ""
    return _state("neighbours", target, {"processes": len(others), "blocks": bool(others)}, reason=busy)


def load_problem(load: float, cores: int) -> str:
    """What the load average of the last minute says against timing on the processor; "" for nothing."""
    if load <= BUSY_LOAD_PER_CORE * cores:
        return ""
    return f"the load average is {load:.1f} on {cores} cores: other programs compute, or did a minute ago"


def _clocks(target: HardwareTarget, state: GpuState | None) -> Row:
    if target.backend == "cpu":
        return _state("clocks", target, {}, reason="processor clocks are not read on target cpu")
    if state is None:
        return _state("clocks", target, {}, reason=gpu_state.open_device()[2] or "NVML gave no reading")
    return _state("clocks", target, {}, gpu=state)


def _rate(variant: str, target: HardwareTarget, axes: dict[str, Scalar], metrics: dict, **fields: Any) -> Row:
    return _row(f"rate/{variant}", variant, target, axes=axes, metrics=metrics, **fields)


def _state(variant: str, target: HardwareTarget, metrics: dict[str, Scalar], **fields: Any) -> Row:
    return _row(f"state/{variant}", variant, target, metrics=metrics, **fields)


def _row(case_id: str, variant: str, target: HardwareTarget, reason: str = "", **fields: Any) -> Row:
    fields = {
        "case_id": case_id,
        "experiment": EXPERIMENT,
        "variant": variant,
        "target": target.name,
        "origin": Origin.MEASURED,
        "status": RowStatus.SKIPPED if reason else RowStatus.PASSED,
        "reason": reason,
        "repro": f"workbench run 00_target_check --target {target.name}",
        **fields,
    }
    return Row.model_validate(fields)
