"""The launch path alone: one small kernel as many times as the model has layers, launched in different ways.

What is timed is the host: from the first launch to the last, and from an idle device to an idle device.
The kernel adds one to a few numbers, so its own time does not matter.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

from workbench.decode.replay import make_backend
from workbench.measure.statistics import is_stable, quantile
from workbench.rows import Origin, Row, RowStatus, Timing, first_line
from workbench.targets import HardwareTarget

NAME = "eager_vs_graph"
SIZE = 1024
SOURCE = """
extern "C" __global__ void add_one(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += 1.0f;
}
"""
Path = Callable[[torch.Tensor], Callable[[], None]]  # buffer -> one launch


def torch_op(x: torch.Tensor) -> Callable[[], None]:
    """An ordinary aten operation."""
    return lambda: x.add_(1.0)  # type: ignore[return-value]


def custom_op(x: torch.Tensor) -> Callable[[], None]:
    """A Python function registered with torch.library.custom_op."""
    if not hasattr(torch.ops.workbench, "launch_probe"):

        @torch.library.custom_op("workbench::launch_probe", mutates_args=("x",))
        def launch_probe(x: torch.Tensor) -> None:
            x.add_(1.0)

    return lambda: torch.ops.workbench.launch_probe(x)


def triton_kernel(x: torch.Tensor) -> Callable[[], None]:
    """triton.jit's launcher."""
    from workbench.experiments.launch_kernels import add_one

    return lambda: add_one[(SIZE // 256,)](x, SIZE, BLOCK=256)


def cupy_kernel(x: torch.Tensor) -> Callable[[], None]:
    """CuPy's RawKernel."""
    import cupy

    kernel, view = cupy.RawKernel(SOURCE, "add_one"), cupy.from_dlpack(x)
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)

    def launch() -> None:
        with stream:
            kernel((SIZE // 256,), (256,), (view, SIZE))

    return launch


def ctypes_driver(x: torch.Tensor) -> Callable[[], None]:
    """cuLaunchKernel through ctypes, arguments packed for every launch."""
    import cupy

    function = ctypes.c_void_p(cupy.RawKernel(SOURCE, "add_one").kernel.ptr)
    driver = ctypes.CDLL("libcuda.so.1")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def launch() -> None:
        pointer, count = ctypes.c_void_p(x.data_ptr()), ctypes.c_int(SIZE)
        addresses = (ctypes.c_void_p * 2)(ctypes.addressof(pointer), ctypes.addressof(count))
        code = driver.cuLaunchKernel(function, SIZE // 256, 1, 1, 256, 1, 1, 0, stream, addresses, None)
        if code:
            raise RuntimeError(f"cuLaunchKernel returned {code}")

    return launch


PATHS: dict[str, Path] = {
    "torch_op": torch_op,
    "torch_custom_op": custom_op,
    "triton": triton_kernel,
    "cupy": cupy_kernel,
    "ctypes": ctypes_driver,
}
GPU_ONLY = ("triton", "cupy", "ctypes")


def bench_launch_paths(target: HardwareTarget, layers: int = 61, samples: int = 40) -> list[Row]:
    """One row per path and one for the replayed graph; what needs a GPU is UNSUPPORTED on cpu."""
    device = "cuda" if target.backend == "cuda" else "cpu"
    rows = []
    for name, make in PATHS.items():
        if target.backend == "cpu" and name in GPU_ONLY:
            rows.append(
                _row(name, target, layers, status=RowStatus.UNSUPPORTED, reason="launches GPU kernels")
            )
            continue
        x = torch.zeros(SIZE, device=device)
        try:
            rows.append(_time(name, make(x), x, target, layers, samples))
        except (ImportError, OSError, RuntimeError) as error:
            failed = {"status": RowStatus.RUNTIME_ERROR, "reason": first_line(error)}
            rows.append(_row(name, target, layers, **failed))
    x = torch.zeros(SIZE, device=device)
    launch = PATHS["torch_op"](x)
    graph = make_backend(device).capture(lambda: [launch() for _ in range(layers)])
    x.zero_()
    return [*rows, _time("replayed_graph", graph.replay, x, target, layers, samples, per_call=layers)]


def _time(
    name: str,
    launch: Callable[[], None],
    x: torch.Tensor,
    target: HardwareTarget,
    layers: int,
    samples: int,
    per_call: int = 1,
) -> Row:
    """Check that every launch arrived, then time: the host to enqueue all, the span until idle."""
    calls = layers // per_call
    x.zero_()
    for _ in range(calls):
        launch()
    if float(x[0]) != layers:
        reason = f"{layers} launches added {float(x[0]):g}"
        return _row(name, target, layers, status=RowStatus.INCORRECT, reason=reason)
    host_us, span_us = [], []
    for _ in range(samples):
        _wait(target)
        start = time.perf_counter_ns()
        for _ in range(calls):
            launch()
        host_us.append((time.perf_counter_ns() - start) / 1e3)
        _wait(target)
        span_us.append((time.perf_counter_ns() - start) / 1e3)
    timing = Timing(
        mode="host", l2="n/a", n=samples, median_us=quantile(host_us, 0.5), p10_us=quantile(host_us, 0.1),
        p90_us=quantile(host_us, 0.9), samples=tuple(host_us), stable=is_stable(host_us),
        span_us=quantile(span_us, 0.5),
    )  # fmt: skip
    return _row(
        name, target, layers, timing=timing, metrics={"host_us_per_launch": timing.median_us / layers}
    )


def _row(name: str, target: HardwareTarget, layers: int, **fields: Any) -> Row:
    return Row(
        case_id=f"launch-{name}-x{layers}",
        experiment=NAME,
        variant=name,
        target=target.name,
        origin=Origin.MEASURED,
        status=fields.pop("status", RowStatus.PASSED),
        axes={"launches": layers, "part": "launch_path"},
        **fields,
    )


def _wait(target: HardwareTarget) -> None:
    if target.backend == "cuda":
        torch.cuda.synchronize()
