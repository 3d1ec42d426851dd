"""What a cubin says its kernels use, read from its ELF sections: the same for every compiler and log."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

# attributes of .nv.info, each with a symbol's index and a number
REGISTERS, FRAME_BYTES, MIN_STACK_BYTES = 0x2F, 0x11, 0x12
SIZED, WORD_BYTES = 4, 4  # an entry of format 4 states its length, every other is one word
IS_ENTRY = 0x10  # in st_other of a __global__ function
RESERVED_SMEM_BYTES = 1024  # the system's share of a block; from sm_90 on the section's size includes it


@dataclass(frozen=True)
class KernelUse:
    """What one kernel uses per thread (registers, stack) or per block (shared memory of the source)."""

    registers: int
    stack_bytes: int
    static_smem_bytes: int


@dataclass(frozen=True)
class _Section:
    name: str
    offset: int
    size: int


def read_kernels(binary: bytes, arch: str) -> dict[str, KernelUse]:
    """Every kernel of a cubin for `arch`, by name. Raises ValueError for what is no cubin with kernels."""
    try:
        sections = _sections(binary)
        names = _entries(binary, sections)
        values = {(attribute, symbol): n for attribute, symbol, n in _numbers(binary, sections[".nv.info"])}
        found = {name: _use(name, symbol, values, sections, arch) for symbol, name in names.items()}
    except (KeyError, IndexError, struct.error) as error:
        raise ValueError(f"not a cubin with resource sections ({error!r}): compile it again") from error
    if not found:
        raise ValueError("the cubin has no kernels: the source needs a __global__ function")
    return found


def _use(
    name: str, symbol: int, values: dict[tuple[int, int], int], sections: dict[str, _Section], arch: str
) -> KernelUse:
    shared = sections.get(f".nv.shared.{name}")
    capability = int("".join(char for char in arch if char.isdigit()))
    reserved = RESERVED_SMEM_BYTES if shared and capability >= 90 else 0
    static = (shared.size if shared else 0) - reserved
    if static < 0:
        raise ValueError(f"{name} for {arch}: {static + reserved} B of shared memory, less than the system's")
    stack = max(values[FRAME_BYTES, symbol], values.get((MIN_STACK_BYTES, symbol), 0))
    return KernelUse(values[REGISTERS, symbol], stack, static)


def _sections(binary: bytes) -> dict[str, _Section]:
    """By name, of a 64-bit little-endian ELF file."""
    if binary[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit ELF file: compile it again")
    (start,) = struct.unpack_from("<Q", binary, 40)
    width, count, names_at = struct.unpack_from("<HHH", binary, 58)
    headers = [struct.unpack_from("<IIQQQQ", binary, start + i * width) for i in range(count)]
    names = headers[names_at][4]
    found = [_Section(_string(binary, names + at), offset, size) for at, _, _, _, offset, size in headers]
    return {section.name: section for section in found}


def _string(binary: bytes, start: int) -> str:
    return binary[start : binary.index(b"\0", start)].decode()


def _entries(binary: bytes, sections: dict[str, _Section]) -> dict[int, str]:
    """Symbol index -> name of the `__global__` functions."""
    table, names = sections[".symtab"], sections[".strtab"]
    found = {}
    for index, at in enumerate(range(table.offset, table.offset + table.size, 24)):
        name, _, other = struct.unpack_from("<IBB", binary, at)
        if other & IS_ENTRY:
            found[index] = _string(binary, names.offset + name)
    return found


def _numbers(binary: bytes, info: _Section) -> Iterator[tuple[int, int, int]]:
    """(attribute, symbol, number) of the entries that hold just these."""
    at = info.offset
    while at < info.offset + info.size:
        form, attribute, length = struct.unpack_from("<BBH", binary, at)
        at += WORD_BYTES
        if form == SIZED:
            if length == 8:
                yield attribute, *struct.unpack_from("<II", binary, at)
            at += length
