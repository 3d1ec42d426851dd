"""What this machine is: processor, memory and, through NVML, its GPUs. Unique ids are hashed."""

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

from workbench.runs.provenance import sha256


@cache
def machine() -> dict[str, Any]:
    """Processor, memory and, through NVML, the GPUs of this machine. Unique ids are hashed."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "gpus": gpus(),
    }


def gpus() -> list[dict[str, Any]]:
    """One dict per GPU that NVML sees; empty without a driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        return [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.machine()


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    memory = ask("nvmlDeviceGetMemoryInfo")
    capability = ask("nvmlDeviceGetCudaComputeCapability")
    power_mw = ask("nvmlDeviceGetPowerManagementLimit")
    return {
        "index": index,
        "name": _text(ask("nvmlDeviceGetName")),
        "uuid_sha256": sha256(_text(ask("nvmlDeviceGetUUID")))[:16],
        "compute_capability": list(capability) if capability else None,
        "memory_bytes": memory.total if memory else None,
        "driver": _text(nvml.nvmlSystemGetDriverVersion()),
        "cuda_driver": nvml.nvmlSystemGetCudaDriverVersion(),
        "power_limit_w": power_mw / 1000 if power_mw else None,
        "max_sm_clock_mhz": ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        "ecc": _first(ask("nvmlDeviceGetEccMode")),
        "mig": _first(ask("nvmlDeviceGetMigMode")),
        "other_processes": len(ask("nvmlDeviceGetComputeRunningProcesses") or []),
    }


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


def _first(pair: Any) -> Any:
    """Current of NVML's (current, pending)."""
    return pair[0] if isinstance(pair, list | tuple) else pair
