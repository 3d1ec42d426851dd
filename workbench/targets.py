"""Hardware targets: what a machine can do at best, read from data/targets/*.toml."""

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
TARGETS_DIR = ROOT / "data" / "targets"


@dataclass(frozen=True)
class HardwareTarget:
    """Peaks and limits of one machine; `source` says where each number comes from."""

    name: str
    title: str
    backend: Literal["cpu", "cuda"]
    arch: str  # "sm_90a"; "" on cpu
    sm_count: int
    smem_per_block_bytes: int
    smem_per_sm_bytes: int
    l2_bytes: int
    memory_bytes: int
    dram_gbps: float  # the rate a floor is computed from, GB/s
    tensor_tflops: float  # dense bf16 with fp32 accumulation, TFLOP/s
    dram_peak_gbps: float  # datasheet; more than this was never measured, it is a mistake
    interconnect_gbps: float
    graph_backend: Literal["tape", "cuda"]
    device_names: tuple[str, ...]  # as the driver spells them, lower case substrings
    source: str

    @property
    def compute_capability(self) -> tuple[int, int]:
        """(major, minor) of `arch`; (0, 0) without a GPU."""
        digits = "".join(c for c in self.arch if c.isdigit())
        return (int(digits[:-1]), int(digits[-1])) if digits else (0, 0)


def names() -> list[str]:
    """Every known target name."""
    return sorted(p.stem for p in TARGETS_DIR.glob("*.toml"))


@cache
def load(name: str) -> HardwareTarget:
    """The target called `name`. Raises ValueError that lists the known ones."""
    if name not in names():
        raise ValueError(
            f"unknown target {name!r}: choose one of {', '.join(names())}, or add data/targets/{name}.toml"
        )
    data = tomllib.loads((TARGETS_DIR / f"{name}.toml").read_text())
    expected = {f.name for f in fields(HardwareTarget)} - {"name"}
    if data.keys() != expected:
        missing, unknown = sorted(expected - data.keys()), sorted(data.keys() - expected)
        raise ValueError(f"data/targets/{name}.toml: missing {missing}, unknown {unknown}")
    data["device_names"] = tuple(data["device_names"])
    return HardwareTarget(name=name, **data)


def detect() -> HardwareTarget:
    """The target of this machine: by GPU name, else `cpu`. A GPU without a target file is a ValueError."""
    import torch

    if not torch.cuda.is_available():
        return load("cpu")
    device_name = torch.cuda.get_device_name().lower()
    for name in names():
        if any(part in device_name for part in load(name).device_names):
            return load(name)
    raise ValueError(f"no target file names the GPU {device_name!r}: add it to device_names in data/targets/")


def require_hardware(target: HardwareTarget) -> None:
    """Raise ValueError unless this machine can run `target`; `cpu` runs anywhere."""
    if target.backend == "cpu":
        return
    here = detect()
    if here.name != target.name:
        needs = f"target {target.name!r} needs a {target.title}"
        raise ValueError(f"{needs}; this machine is {here.name!r}: use --target {here.name}")
