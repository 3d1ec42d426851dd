"""Compile, cache and resource report: without a GPU, as `workbench doctor --compile` does."""

import dataclasses
import json
import threading
from pathlib import Path

import pytest

from workbench.attention import build
from workbench.attention.cuda_flash import Config
from workbench.cli import doctor_compile

BLOCK_BYTES = {"sm_80": 166_912, "sm_90a": 232_448, "sm_100": 232_448, "sm_120": 101_376}
GOOD = 'extern "C" __global__ void scale_rows(float* x, float by) { x[threadIdx.x] *= by; }\n'
CUDA_13_LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'b' for 'sm_120'
ptxas info    : Function properties for b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 47 registers, used 1 barriers, 4096 bytes smem
ptxas info    : Compile time = 45.124 ms
ptxas info    : Compiling entry function 'a' for 'sm_120'
ptxas info    : Function properties for a
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, 128 bytes smem
"""

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
        if committed["compiler"] != build.compiler_version():  # another NVRTC may use other registers
            for kernel in [*known, *mine]:
                kernel["registers"] = None
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


def test_log_of_cuda_13_is_read() -> None:
    b, a = build.read_resources(CUDA_13_LOG, "a.cu", "default", ("-DSHARED_BYTES=1000",))
    assert (b.kernel, b.registers, b.smem_bytes, b.spills) == ("b", 47, 4096, False)
    assert (a.kernel, a.registers, a.smem_bytes, a.spills) == ("a", 255, 1128, True)
    assert (a.stack_bytes, a.spill_store_bytes, a.spill_load_bytes) == (16, 12, 20)
    with pytest.raises(ValueError, match=r"log of a\.cu has no resource lines"):
        build.read_resources("nothing here", "a.cu", "default", ())


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
    (clean, spilling) = build.read_resources(CUDA_13_LOG, "a.cu", "default", ())
    monkeypatch.setattr(build, "report", lambda source, arch: [clean])
    assert doctor_compile.compile_all(["sm_120"]) == [clean] * len(build.sources())
    assert "47/4.0K/0" in capsys.readouterr().out
    monkeypatch.setattr(build, "report", lambda source, arch: [clean, spilling])
    with pytest.raises(ValueError, match=r"kernels spill registers: a \(default, sm_120\)"):
        doctor_compile.compile_all(["sm_120"])
