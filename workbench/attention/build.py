"""CUDA sources to cached cubins through NVRTC, and what the compiler says each kernel uses. Needs no GPU."""

import hashlib
import os
import re
import struct
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from workbench.attention import cubin as elf

KERNELS_DIR = Path(__file__).resolve().parents[2] / "kernels"
ARCHS = ("sm_80", "sm_90a", "sm_100", "sm_120")
OPTIONS = ("--std=c++17", "--ptxas-options=-v")
CACHE_FORMAT = "2"

_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)')
_CONFIG = re.compile(r"^// config (\w+)(?: \(([^)]*)\))?: *(.*)$", re.MULTILINE)
_SHARED = re.compile(r"-DSHARED_BYTES=(\d+)")
_LOG_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_LOG_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


class CompileError(ValueError):
    """A source that NVRTC rejects; the message is its first error line."""


class CompilerMissingError(OSError):
    """NVRTC cannot be loaded on this machine."""


@dataclass(frozen=True)
class Resource:
    """What one compiled kernel uses, per thread (registers, stack, spills) or per block (shared memory).

    Spilled bytes are None where the compiler does not print them (NVRTC 13.0).
    """

    source: str
    config: str
    kernel: str
    arch: str
    registers: int
    static_smem_bytes: int
    dynamic_smem_bytes: int
    stack_bytes: int
    spill_store_bytes: int | None
    spill_load_bytes: int | None

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block, static and dynamic."""
        return self.static_smem_bytes + self.dynamic_smem_bytes

    @property
    def spills(self) -> bool:
        """Whether anything lives in local memory; spilled registers need a stack frame, so 0 bytes is no."""
        return bool(self.stack_bytes or self.spill_store_bytes or self.spill_load_bytes)

    @property
    def spilled(self) -> str:
        """Bytes stored and loaded; with a silent compiler what the stack frame tells."""
        if self.spill_store_bytes is None or self.spill_load_bytes is None:
            return f"unknown, stack frame {self.stack_bytes} bytes" if self.stack_bytes else "no stack frame"
        return str(self.spill_store_bytes + self.spill_load_bytes)


@dataclass(frozen=True)
class Cubin:
    """One compiled source; `log` is what the compiler printed, its resource report where it prints one."""

    path: Path
    log: str


def sources() -> list[Path]:
    """Every CUDA source of the project."""
    return sorted(KERNELS_DIR.glob("*.cu"))


def kernel_names(source: Path) -> list[str]:
    """Names of the `extern "C" __global__` functions of a source, in order."""
    return _ENTRY.findall(source.read_text())


def configs(source: Path, arch: str) -> dict[str, tuple[str, ...]]:
    """The `// config name (archs): flags` lines of a source that hold for `arch`; without (archs) for all.

    One configuration without flags where a source lists none.
    """
    listed = _CONFIG.findall(source.read_text())
    found = {
        name: tuple(flags.split()) for name, archs, flags in listed if not archs or arch in archs.split()
    }
    return found if listed else {"default": ()}


def cache_dir() -> Path:
    """$WORKBENCH_CACHE, else ~/.cache/workbench."""
    return Path(os.environ.get("WORKBENCH_CACHE") or Path.home() / ".cache" / "workbench")


@cache
def _nvrtc() -> Any:
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise CompilerMissingError(
            f"NVRTC cannot be loaded ({error}): pip install cupy-cuda13x (or 12x) and nvidia-cuda-nvrtc"
        ) from error
    return nvrtc


def compiler_version() -> str:
    """Such as "nvrtc 12.9". Raises CompilerMissingError without NVRTC."""
    return "nvrtc {}.{}".format(*_nvrtc().getVersion())


def include_dirs() -> list[Path]:
    """CUDA headers of the nvidia wheels and of a toolkit, those that exist."""
    found = []
    nvidia = find_spec("nvidia")
    for root in nvidia.submodule_search_locations or () if nvidia else ():
        found += [Path(root) / part / "include" for part in ("cuda_runtime", "cu13", "cuda_cccl")]
    toolkit = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
    return [path for path in [*found, toolkit / "include"] if path.is_dir()]


def cache_key(text: str, flags: tuple[str, ...], arch: str, compiler: str) -> str:
    """Hash of all that decides the cubin."""
    parts = (CACHE_FORMAT, compiler, arch, *OPTIONS, *flags, text)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def compile_cubin(source: Path, flags: tuple[str, ...], arch: str) -> Cubin:
    """The cubin of `source` for `arch`, from the cache when it was built before.

    Raises CompileError with the first error line, CompilerMissingError without NVRTC.
    """
    text = source.read_text()
    key = cache_key(text, flags, arch, compiler_version())
    cubin, log = cache_dir() / f"{key}.cubin", cache_dir() / f"{key}.log"
    if not cubin.exists():
        binary, report = _compile(source.name, text, flags, arch)
        write_atomically(log, report.encode())  # first: a cubin in the cache always has its log
        write_atomically(cubin, binary)
    return Cubin(cubin, log.read_text())


def _compile(name: str, text: str, flags: tuple[str, ...], arch: str) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    options = [f"--gpu-architecture={arch}", *OPTIONS, *flags, *(f"-I{path}" for path in include_dirs())]
    program = nvrtc.createProgram(text, name, [], [])
    try:
        nvrtc.compileProgram(program, options)
        return whole_elf(nvrtc.getCUBIN(program)), nvrtc.getProgramLog(program).rstrip("\0")
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).rstrip("\0")
        raise CompileError(f"{name} does not compile for {arch}: {first_error(log) or error}") from error
    finally:
        nvrtc.destroyProgram(program)


def whole_elf(binary: bytes) -> bytes:
    """CuPy's getCUBIN drops the last byte, a zero of the program headers; disassemblers insist on it."""
    start, size, count = (*struct.unpack_from("<Q", binary, 32), *struct.unpack_from("<HH", binary, 54))
    return binary.ljust(start + size * count, b"\0")


def first_error(log: str) -> str:
    """The first line of a compiler log that reports an error; empty when none does."""
    lines = [line.strip() for line in log.splitlines()]
    return next((line for line in lines if "error" in line.lower()), "")


def write_atomically(path: Path, data: bytes) -> None:
    """A reader sees the whole file or none: written beside it, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".building-", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def read_resources(
    binary: bytes, log: str, source: str, config: str, flags: tuple[str, ...], arch: str
) -> list[Resource]:
    """One Resource for each kernel of a cubin, by name; spilled bytes from `ptxas -v` lines of its log."""
    shared = _SHARED.search(" ".join(flags))
    spills = read_spills(log)
    found = []
    for kernel, use in sorted(elf.read_kernels(binary, arch).items()):
        # by convention the kernel named like its file is the one that takes dynamic shared memory
        dynamic = int(shared[1]) if shared and kernel == Path(source).stem else 0
        used = (use.registers, use.static_smem_bytes, dynamic, use.stack_bytes)
        found.append(Resource(source, config, kernel, arch, *used, *spills.get(kernel, (None, None))))
    return found


def read_spills(log: str) -> dict[str, tuple[int, int]]:
    """Kernel -> bytes of spill stores and loads, for those a `ptxas -v` log mentions."""
    parts = _LOG_ENTRY.split(log)[1:]  # kernel, arch, its lines, kernel, ...
    found = {kernel: _LOG_SPILLS.findall(lines) for kernel, lines in zip(parts[::3], parts[2::3])}
    return {kernel: (int(rows[-1][0]), int(rows[-1][1])) for kernel, rows in found.items() if rows}


def report(source: Path, arch: str) -> list[Resource]:
    """Resources of every kernel of a source in every configuration it lists."""
    found: list[Resource] = []
    for config, flags in configs(source, arch).items():
        cubin = compile_cubin(source, flags, arch)
        found += read_resources(cubin.path.read_bytes(), cubin.log, source.name, config, flags, arch)
    return found


def load(cubin: Cubin, kernel: str, *, shared_bytes: int = 0, cooperative: bool = False) -> Any:
    """The kernel, callable as kernel(grid, block, args, shared_mem=) on the current device and stream."""
    import cupy

    function = cupy.RawModule(path=str(cubin.path), enable_cooperative_groups=cooperative).get_function(
        kernel
    )
    if shared_bytes > 48 * 1024:
        function.max_dynamic_shared_size_bytes = shared_bytes
    return function
