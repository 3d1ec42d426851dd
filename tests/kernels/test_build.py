"""Compile, cache and resource report: without a GPU, as `workbench doctor --compile` does."""

import dataclasses
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.attention import build
from workbench.attention.build import Resource
from workbench.attention.cubin import read_kernels
from workbench.attention.cuda_flash import Config
from workbench.cli import doctor_compile

BLOCK_BYTES = {"sm_80": 166_912, "sm_90a": 232_448, "sm_100": 232_448, "sm_120": 101_376}
GOOD = 'extern "C" __global__ void scale_rows(float* x, float by) { x[threadIdx.x] *= by; }\n'
SPILLING = """
extern "C" __global__ void many_values(float* x) {
    __shared__ float shared[100];
    float a[40];
    for (int i = 0; i < 40; i++) a[i] = x[i * 7];
    shared[threadIdx.x] = a[threadIdx.x % 40];
    __syncthreads();
    x[threadIdx.x] = shared[99 - threadIdx.x] + a[threadIdx.x * 3 % 40];
}
"""  # with the 24 registers of FEW
FEW = ("--maxrregcount=24",)

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC comes with CuPy, which is not installed")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "scale_rows.cu"
    path.write_text(GOOD)
    return path


def test_kernels_hold_only_sources_with_a_story() -> None:
    assert build.sources()
    assert not list(build.KERNELS_DIR.glob("**/__init__.py"))
    assert {p.suffix for p in build.KERNELS_DIR.iterdir()} <= {".cu", ".md", ".json"}
    for source in build.sources():
        header = source.read_text().split("\n#", 1)[0]
        assert all(word in header for word in ("// Question", "// Floor", "// Idea", "README.md")), source
        assert f"## {source.stem}" in (build.KERNELS_DIR / "README.md").read_text()
        assert source.stem in build.kernel_names(source), "a kernel carries the name of its file"


@pytest.mark.parametrize("arch", build.ARCHS)
def test_every_source_compiles_without_spills_and_fits_sm_120(arch: str) -> None:
    committed = json.loads(doctor_compile.REPORT.read_text())
    for source in build.sources():
        found = build.report(source, arch)
        assert {one.kernel for one in found} == set(build.kernel_names(source))
        for one in found:
            assert one.arch == arch and not one.spills, one
            assert one.registers <= 255 and one.smem_bytes <= BLOCK_BYTES[arch], one
            assert one.smem_bytes <= BLOCK_BYTES["sm_120"] or one.config.endswith(("_deep", "_wide"))
        known = [k for k in committed["kernels"] if k["source"] == source.name and k["arch"] == arch]
        mine = [dataclasses.asdict(one) for one in found]
        if committed["compiler"] != build.compiler_version():  # other registers, maybe no spills in its log
            for kernel in [*known, *mine]:
                kernel |= dict.fromkeys(("registers", "spill_store_bytes", "spill_load_bytes"))
        assert mine == known, "kernels/resources.json is stale: python -m workbench.cli.doctor_compile"


def test_configurations_of_the_source_are_the_launchers() -> None:
    (flash,) = [s for s in build.sources() if s.name == "verify_attn_flash.cu"]
    launcher = {Config(block_m=m, num_stages=n).flags for m in (16, 32, 64) for n in (2, 4)} | {
        Config(dtype="fp16").flags, Config(merge="fused").flags, Config(block_m=32, aligned=False).flags,
        Config(block_n=64).flags,
    }  # fmt: skip
    for arch in build.ARCHS:
        for flags in build.configs(flash, arch).values():
            assert any(set(flags) <= set(known) for known in launcher), flags


def test_names_and_configurations_are_read_from_the_text(source: Path) -> None:
    assert build.kernel_names(source) == ["scale_rows"]
    assert build.configs(source, "sm_80") == {"default": ()}
    source.write_text("// config wide (sm_90a sm_100): -DN=4 -DSHARED_BYTES=512\n// config bare:\n" + GOOD)
    assert build.configs(source, "sm_100") == {"wide": ("-DN=4", "-DSHARED_BYTES=512"), "bare": ()}
    assert build.configs(source, "sm_120") == {"bare": ()}


def logged(log: str) -> dict[str, tuple[int, ...]]:
    """Kernel -> registers, stack and shared memory as `ptxas -v` prints them; 0 where it does not."""
    parts = re.split(r"Compiling entry function '(\w+)' for '\w+'", log)[1:]
    patterns = (r"Used (\d+) registers", r"(\d+) bytes stack frame", r"(\d+) bytes smem")
    return {
        name: tuple(int((re.findall(pattern, lines) or [0])[-1]) for pattern in patterns)
        for name, lines in zip(parts[::2], parts[1::2])
    }


def needs_a_log(cubin: build.Cubin) -> None:
    if not build.read_spills(cubin.log):
        pytest.skip(f"{build.compiler_version()} prints no `ptxas -v` lines to compare with")


@pytest.mark.parametrize("arch", build.ARCHS)
def test_the_elf_says_what_the_log_says(arch: str, source: Path) -> None:
    builds = [(s, flags) for s in build.sources() for flags in build.configs(s, arch).values()]
    spilling = source.with_name("many_values.cu")
    spilling.write_text(SPILLING + GOOD)
    for path, flags in [*builds, (source, ()), (spilling, FEW)]:
        compiled = build.compile_cubin(path, flags, arch)
        needs_a_log(compiled)
        found = read_kernels(compiled.path.read_bytes(), arch)
        assert {name: dataclasses.astuple(use) for name, use in found.items()} == logged(compiled.log)


@pytest.mark.parametrize("arch", build.ARCHS)
def test_without_log_lines_the_stack_frame_tells(arch: str, source: Path) -> None:
    source.write_text(SPILLING + GOOD)
    cubin = build.compile_cubin(source, FEW, arch)
    args = (source.name, "few", ("-DSHARED_BYTES=1000",), arch)
    many, few = build.read_resources(cubin.path.read_bytes(), "1 warning\n", *args)
    assert (many.kernel, many.registers, many.smem_bytes, many.arch) == ("many_values", 24, 400, arch)
    assert many.spills and many.spilled == f"unknown, stack frame {many.stack_bytes} bytes"
    assert (few.kernel, few.smem_bytes, few.spills, few.spilled) == (
        "scale_rows", 1000, False, "no stack frame",
    )  # fmt: skip
    assert few.spill_store_bytes is few.spill_load_bytes is None
    needs_a_log(cubin)
    stores, loads = build.read_spills(cubin.log)["many_values"]
    (spilling, _) = build.read_resources(cubin.path.read_bytes(), cubin.log, *args)
    assert stores and loads and spilling.spilled == str(stores + loads)
    assert spilling.stack_bytes == many.stack_bytes


def test_the_elf_of_nvcc_is_read(source: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    source.write_text(SPILLING + GOOD)
    cubin = source.with_suffix(".cubin")
    command = [nvcc, "-cubin", "-arch=sm_120", "-Xptxas=-v", "--maxrregcount=24", "-o", cubin, source]
    log = subprocess.run(command, check=True, capture_output=True, text=True)
    found = read_kernels(cubin.read_bytes(), "sm_120")
    assert {name: dataclasses.astuple(use) for name, use in found.items()} == logged(log.stdout + log.stderr)


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b"x" * 4096, lambda b: b[: len(b) // 3]])
def test_what_is_no_cubin_is_refused(source: Path, damage: Callable[[bytes], bytes]) -> None:
    binary = build.compile_cubin(source, (), "sm_120").path.read_bytes()
    with pytest.raises(ValueError, match="compile it again"):
        read_kernels(damage(binary), "sm_120")


def test_a_second_compile_comes_from_the_cache(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.compile_cubin(source, (), "sm_90a")
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.compile_cubin(source, (), "sm_90a") == first


def test_a_cubin_is_a_whole_elf_file(source: Path) -> None:
    binary = build.compile_cubin(source, (), "sm_90a").path.read_bytes()
    assert binary[:4] == b"\x7fELF"
    for start, size, count in ((32, 54, 56), (40, 58, 60)):  # program headers, section headers
        offset, width, number = (
            int.from_bytes(binary[at : at + n], "little") for at, n in ((start, 8), (size, 2), (count, 2))
        )
        assert number and len(binary) >= offset + width * number


def test_the_key_covers_all_that_decides_the_cubin() -> None:
    base = ("text", ("-DA=1",), "sm_90a", "nvrtc 12.9")
    variations = [("text2", *base[1:]), (base[0], ("-DA=2",), *base[2:]), (*base[:2], "sm_80", base[3])]
    variations += [(*base[:3], "nvrtc 13.0"), (base[0], ("-DA=1", ""), *base[2:])]
    assert len({build.cache_key(*v) for v in [base, *variations]}) == 6  # type: ignore[arg-type]


def test_a_compile_error_is_one_line_with_the_place(source: Path) -> None:
    source.write_text(GOOD.replace("threadIdx.x", "thread_id"))
    with pytest.raises(
        build.CompileError, match=r'scale_rows\.cu.*sm_80: .*"thread_id" is undefined'
    ) as caught:
        build.compile_cubin(source, (), "sm_80")
    assert "\n" not in str(caught.value)
    assert not list(build.cache_dir().glob("*")), "a failed compile leaves nothing in the cache"


def test_a_writer_that_dies_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build.os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        build.write_atomically(tmp_path / "x.cubin", b"half")
    assert list(tmp_path.iterdir()) == []


def test_readers_see_whole_files_while_others_write(tmp_path: Path) -> None:
    path, sizes = tmp_path / "x.cubin", set()
    payloads = [bytes([i]) * 200_000 for i in range(4)]
    writers = [threading.Thread(target=build.write_atomically, args=(path, data)) for data in payloads * 5]
    for thread in writers:
        thread.start()
    while any(thread.is_alive() for thread in writers):
        if path.exists():
            data = path.read_bytes()
            sizes.add((len(data), len(set(data))))
    assert sizes <= {(200_000, 1)} and [p.name for p in tmp_path.iterdir()] == ["x.cubin"]


def test_a_machine_without_nvrtc_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy_backends.cuda.libs", None)
    build._nvrtc.cache_clear()
    try:
        with pytest.raises(build.CompilerMissingError, match="pip install cupy-cuda13x"):
            build.compiler_version()
    finally:
        build._nvrtc.cache_clear()


def test_compile_all_prints_a_table_and_refuses_spills(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = Resource("a.cu", "default", "b", "sm_120", 47, 4096, 0, 0, 0, 0)
    silent = dataclasses.replace(clean, spill_store_bytes=None, spill_load_bytes=None)
    spilling = dataclasses.replace(silent, kernel="a", stack_bytes=16)
    monkeypatch.setattr(build, "report", lambda source, arch: [clean])
    assert doctor_compile.compile_all(["sm_120"]) == [clean] * len(build.sources())
    assert "47/4.0K/0" in capsys.readouterr().out
    monkeypatch.setattr(build, "report", lambda source, arch: [silent])
    doctor_compile.compile_all(["sm_120"])
    assert "47/4.0K/no stack frame" in capsys.readouterr().out
    monkeypatch.setattr(build, "report", lambda source, arch: [clean, spilling])
    expected = r"kernels spill registers: a \(default, sm_120: unknown, stack frame 16 bytes\)"
    with pytest.raises(ValueError, match=expected):
        doctor_compile.compile_all(["sm_120"])
