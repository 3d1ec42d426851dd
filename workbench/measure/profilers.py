"""Profilers: notice one that would falsify a timing, point one at a single launch, record a trace."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

ENVIRONMENT_MARKS = {
    "NSYS_PROFILING_SESSION_ID": "nsys",
    "NV_COMPUTE_PROFILER_PERFWORKS_DIR": "ncu",
    "NV_NSIGHT_INJECTION_PORT_BASE": "ncu",
    "NV_SANITIZER_INJECTION_PORT_BASE": "compute-sanitizer",
    "CUDA_INJECTION64_PATH": "an injected CUDA tool",
    "ROCPROFILER_REGISTER_LIBRARY": "rocprof",
}
PRELOADED_PARTS = {"nsys": "nsys", "nsight": "ncu", "sanitizer-injection": "compute-sanitizer"}


def active_profiler(environment: Mapping[str, str] = os.environ) -> str | None:
    """The profiler this process runs under, or None; torch.profiler counts too."""
    for variable, tool in ENVIRONMENT_MARKS.items():
        if environment.get(variable):
            return tool
    preloaded = environment.get("LD_PRELOAD", "").lower()
    for part, tool in PRELOADED_PARTS.items():
        if part in preloaded:
            return tool
    import torch

    return "torch.profiler" if torch.autograd._profiler_enabled() else None


def refuse_under_profiler() -> None:
    """Raise ValueError under a profiler: what it slows down is not what would be reported."""
    tool = active_profiler()
    if tool:
        raise ValueError(
            f"timing refused under {tool}: it changes what is timed; use --once to profile one launch"
        )


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """A named range for nsys and ncu (`--nvtx --nvtx-include NAME/`); nothing without CUDA."""
    import torch

    if not torch.cuda.is_available():
        yield
        return
    with torch.cuda.nvtx.range(name):
        yield


def launch_once(name: str, call: Callable[[], object]) -> None:
    """Warm up, then run `call` once between cudaProfilerStart and Stop, inside the NVTX range `name`."""
    import torch

    if not torch.cuda.is_available():
        call()
        return
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    with nvtx_range(name):
        call()
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def record_trace(path: Path, work: Callable[[], T]) -> T:
    """Run `work` under torch.profiler, write its Chrome trace to `path`, return what it returns.

    A GPU tracer that stays attached makes every later graph launch of the process pay for each node (measured
    with 2,500 nodes on an H200: 8 us before a trace, 530 us after), so it is asked to leave.
    """
    import torch

    os.environ.setdefault("TEARDOWN_CUPTI", "1")
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        result = work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    return result
