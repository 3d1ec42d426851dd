"""A CUDA source of the project on the CPU emulator of block_emulator.h, called as the launcher calls CuPy."""

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

HEADER = Path(__file__).with_name("block_emulator.h")
PTX = re.compile(r"// ---- PTX\n.*?// ---- end of PTX\n", re.DOTALL)


def host_source(text: str, kernels: list[str]) -> str:
    """The source as host C++: emulated PTX functions, shared memory of the running block, C entry points."""
    text, count = PTX.subn("", text)
    assert count == 1
    text = text.replace(
        "extern __shared__ __align__(128) unsigned char shared[];",
        "unsigned char* const shared = emulator::current->block->shared;",
    )
    text = re.sub(
        r"__shared__ (\w+) (\w+)\[([^\]]+)\];",
        r'\1* const \2 = &emulator::shared_static<\1>("\2", \3);',
        text,
    )
    text = re.sub(r"__shared__ (\w+) (\w+);", r'\1& \2 = emulator::shared_static<\1>("\2");', text)
    assert "__shared__" not in text
    for name in kernels:
        text += f"""
extern "C" int run_{name}(int x, int y, int z, int shared, unsigned seed, int together, void** args) {{
  return emulator::launch({name}, Dim{{x, y, z}}, shared, seed, together, args);
}}
extern "C" int sizes_{name}(int* out) {{ return emulator::sizes({name}, out); }}
"""
    return f'#include "{HEADER}"\n{text}'


def build_library(source: Path, kernels: list[str], flags: tuple[str, ...], folder: Path) -> ctypes.CDLL:
    """Compile the emulated source with the host compiler."""
    cpp = folder / f"{source.stem}.cpp"
    library = cpp.with_suffix(".so")
    cpp.write_text(host_source(source.read_text(), kernels))
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *flags, "-o", str(library), str(cpp)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


class EmulatedKernel:
    """Called with (grid, block, args, shared_mem=) like a CuPy kernel; warps run in a random order."""

    def __init__(self, library: ctypes.CDLL, name: str, *, seed: int = 0, together: bool = False) -> None:
        self.name, self.seed, self.together = name, seed, together
        self._run = getattr(library, f"run_{name}")
        sizes = (ctypes.c_int * 64)()
        self.sizes = list(sizes[: getattr(library, f"sizes_{name}")(sizes)])

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int], args: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        assert block == (256,)
        values = [
            np.int64(a) if isinstance(a, int) else a for a in args
        ]  # CuPy passes a Python int as 64 bits
        assert [v.nbytes for v in values] == self.sizes, (
            f"{self.name}: the arguments do not fit the parameters"
        )
        cells = [np.asarray(v) for v in values]
        pointers = (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells))
        x, y, z = (*grid, 1, 1)[:3]
        assert self._run(x, y, z, shared_mem, self.seed, int(self.together), pointers) == 0, "deadlock"
