"""What the GPU is doing: clocks, temperature, throttling, neighbours and utilisation, read through NVML.

None stands for "this machine cannot tell"; the reason is kept beside it. Nothing here changes a setting.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from workbench.rows import GpuState

THROTTLE_BITS = {
    0x2: "applications_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}  # NVML's clocks event reasons; 0x1 is idle, no throttling
GPM_METRICS = {"sm_util": 2, "tensor_util": 5, "dram_util": 10}  # NVML_GPM_METRIC_*, percent over the window
GPM_MIN_WINDOW_S = 0.1


@dataclass(frozen=True)
class Neighbour:
    """Another process that holds memory on the GPU."""

    pid: int
    memory_bytes: int | None


@cache
def open_device(index: int = 0) -> tuple[Any, Any, str]:
    """(pynvml, handle, "") or (None, None, reason); `index` counts CUDA's visible devices."""
    try:
        import pynvml
    except ImportError:
        return None, None, "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        return pynvml, _visible_handle(pynvml, index), ""
    except pynvml.NVMLError as error:
        return None, None, f"NVML: {error}"


def _visible_handle(nvml: Any, index: int) -> Any:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    entry = entries[index] if index < len(entries) else str(index)
    if entry.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(entry))
    return nvml.nvmlDeviceGetHandleByUUID(entry)


def _ask(question: Callable[[], Any]) -> Any:
    """The answer, or None where the driver does not support the question."""
    nvml, _, _ = open_device()
    try:
        return question()
    except nvml.NVMLError:
        return None


def throttle_text(bits: int) -> str:
    """The reasons in NVML's bit mask by name, "none" when the clocks are free."""
    known = [name for bit, name in THROTTLE_BITS.items() if bits & bit]
    unknown = bits & ~sum(THROTTLE_BITS) & ~0x1
    return "+".join(known + ([f"0x{unknown:x}"] if unknown else [])) or "none"


def neighbours() -> tuple[list[Neighbour] | None, str]:
    """Other processes on the GPU, or (None, reason). Only pid and memory are read."""
    nvml, handle, reason = open_device()
    if nvml is None:
        return None, reason
    processes = _ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    if processes is None:
        return None, "the driver does not list processes"
    return [Neighbour(p.pid, p.usedGpuMemory) for p in processes if p.pid != os.getpid()], ""


@dataclass
class Reading:
    """One look at the device."""

    clock_mhz: float | None
    temperature_c: float | None
    throttle_bits: int | None


def read() -> Reading | None:
    """The device's state now; None without NVML."""
    nvml, handle, _ = open_device()
    if nvml is None:
        return None
    return Reading(
        clock_mhz=_ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        temperature_c=_ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        throttle_bits=_ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
    )


@cache
def gpm_reason() -> str:
    """Why GPM utilisation cannot be read here; "" when it can (Hopper and later, with the driver's leave)."""
    nvml, handle, reason = open_device()
    if nvml is None:
        return reason
    support = _ask(lambda: nvml.nvmlGpmQueryDeviceSupport(handle))
    if support is None:
        return "the driver does not know GPM"
    return "" if support.isSupportedDevice else "the GPU has no GPM (Hopper and later have it)"


def read_utilisation(work: Callable[[], object], window_s: float = 0.5) -> tuple[dict[str, float], str]:
    """Keep the GPU busy with `work` (which must wait for its end) and read GPM over that window.

    Returns ({"dram_util", "tensor_util", "sm_util"} in 0..1, "") or ({}, reason).
    """
    reason = gpm_reason()
    if reason:
        return {}, reason
    nvml, handle, _ = open_device()
    samples: list[Any] = []
    try:
        samples += [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        first, last = samples
        work()
        nvml.nvmlGpmSampleGet(handle, first)
        stop = time.monotonic() + max(window_s, GPM_MIN_WINDOW_S)
        while time.monotonic() < stop:
            work()
        nvml.nvmlGpmSampleGet(handle, last)
        return _gpm_values(nvml, first, last), ""
    except nvml.NVMLError as error:
        return {}, f"GPM: {error}"
    finally:
        for sample in samples:
            nvml.nvmlGpmSampleFree(sample)


def _gpm_values(nvml: Any, first: Any, last: Any) -> dict[str, float]:
    request = nvml.c_nvmlGpmMetricsGet_t()
    request.version = nvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(GPM_METRICS)
    request.sample1, request.sample2 = first, last
    for place, metric in enumerate(GPM_METRICS.values()):
        request.metrics[place].metricId = metric
    nvml.nvmlGpmMetricsGet(request)
    metrics = [request.metrics[place] for place in range(len(GPM_METRICS))]
    return {name: m.value / 100 for name, m in zip(GPM_METRICS, metrics) if m.nvmlReturn == 0}


@dataclass
class GpuSampler:
    """Context manager that looks at the device every `interval_s` from a thread.

    Not around a graph capture: another thread's driver calls may break it.
    """

    interval_s: float = 0.02
    readings: list[Reading] = field(default_factory=list)
    reason: str = ""
    _done: threading.Event = field(default_factory=threading.Event, repr=False)
    _thread: threading.Thread | None = field(default=None, repr=False)

    def __enter__(self) -> "GpuSampler":
        self.reason = open_device()[2]
        if not self.reason:
            self._look()
            self._thread = threading.Thread(target=self._watch, name="gpu-sampler", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._look()

    def _look(self) -> None:
        reading = read()
        if reading is not None:
            self.readings.append(reading)

    def _watch(self) -> None:
        while not self._done.wait(self.interval_s):
            self._look()

    def state(self, utilisation: dict[str, float] | None = None) -> GpuState | None:
        """Extremes over the readings, with GPM utilisation when given; None when nothing could be read."""
        if not self.readings:
            return None
        clocks = [r.clock_mhz for r in self.readings if r.clock_mhz is not None]
        degrees = [r.temperature_c for r in self.readings if r.temperature_c is not None]
        bits = [r.throttle_bits for r in self.readings if r.throttle_bits is not None]
        union = 0
        for one in bits:
            union |= one
        return GpuState(
            clock_min_mhz=min(clocks, default=None),
            clock_max_mhz=max(clocks, default=None),
            temperature_c=max(degrees, default=None),
            throttle_reasons=throttle_text(union) if bits else None,
            dram_util=(utilisation or {}).get("dram_util"),
            tensor_util=(utilisation or {}).get("tensor_util"),
        )
