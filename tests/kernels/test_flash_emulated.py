"""The CUDA source and its launcher on the CPU block emulator, against the fp64 oracle. No GPU, no NVRTC."""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_emulation import EmulatedKernel, build_library

from workbench import targets
from workbench.attention import cuda_flash
from workbench.attention.case_inputs import build
from workbench.attention.cases import AttentionCase, corner_cases
from workbench.attention.checks import make_call
from workbench.attention.conformance import expected, poison, poisoned_outputs, verdict_of
from workbench.attention.cuda_flash import Config
from workbench.attention.plan import VerifyPlan

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the emulator with")

MLA = AttentionCase(dtype="bf16", latent=512, rope=64)
LAYOUTS = ("causal", "tree", "full", "packed")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Config], Any]:
    built: dict[tuple[str, ...], Any] = {}

    def get(config: Config) -> Any:
        if config.flags not in built:
            folder = tmp_path_factory.mktemp("emulated")
            names = [cuda_flash.KERNEL, *cuda_flash.MERGE_KERNELS.values()]
            built[config.flags] = build_library(cuda_flash.SOURCE, names, config.flags, folder)
        return built[config.flags]

    return get


@pytest.fixture
def check(library: Callable[[Config], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a case through the launcher with emulated kernels and poisoned buffers, and compares."""
    monkeypatch.setattr(cuda_flash, "_current_stream", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    target = targets.load("rtx-pro-6000")

    def run(case: AttentionCase, *, seed: int = 0, **tunables: Any) -> None:
        shape = case.shape
        values = cuda_flash.default_tunables(shape, target, False) | tunables
        nsplit = case.nsplit if isinstance(case.nsplit, int) else 2
        inputs = build(case)
        call_out, call_lse = poisoned_outputs(inputs.q, case.latent)
        call = make_call(
            inputs.q, inputs.kv, inputs.qo_indptr, inputs.kv_indptr, inputs.kv_indices, inputs.tree_mask,
            inputs.draft_slots, inputs.mask_layout, inputs.sm_scale, inputs.latent, call_out, call_lse,
        )  # fmt: skip
        sizes = cuda_flash.workspaces(shape, nsplit, values)
        buffers = {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in sizes.items()}
        poison(*buffers.values())
        plan = VerifyPlan(
            "cuda_flash",
            nsplit,
            shape,
            torch.device("cpu"),
            target,
            False,
            values,
            buffers,
            cuda_flash.launch,
        )
        aligned = cuda_flash._is_aligned(call)
        config = cuda_flash._config(plan, aligned)
        compiled = library(config)
        together = config.merge == "fused"
        attention = EmulatedKernel(compiled, cuda_flash.KERNEL, seed=seed, together=together)
        plan.state["aligned" if aligned else "unaligned"] = (attention, config)
        if not together:
            plan.state["merge"] = EmulatedKernel(compiled, cuda_flash.MERGE_KERNELS[config.merge])
        reference = expected(inputs)
        for _ in range(2):  # the second run meets what the first left in the workspaces
            cuda_flash.launch(plan, call)
            verdict = verdict_of(call.out, call.lse, *reference, case.dtype)
            assert verdict.reason is None, f"{case}: {verdict}"
            poison(call.out, call.lse)
        assert not buffers["arrivals"].any(), "the merge counters are not back at zero"

    return run


@pytest.mark.parametrize("mask", LAYOUTS)
@pytest.mark.parametrize("form", ["listed", "slots"])
def test_mask_layouts_and_forms(check: Callable[..., None], mask: str, form: str) -> None:
    index_dtype = "int64" if form == "slots" else "int32"
    case = replace(
        MLA, q_lens=(9, 3), kv_lens=(75, 33), mask=mask, form=form, index_dtype=index_dtype, nsplit=2, seed=11
    )
    check(case, seed=5, block_m=64)


@pytest.mark.parametrize("case", corner_cases("bf16", 512, 64), ids=str)
def test_corner_cases(check: Callable[..., None], case: AttentionCase) -> None:
    if case.rope == 0:
        pytest.skip("cuda_flash takes 512 + 64 columns")
    check(replace(case, heads=min(case.heads, 2)) if len(case.q_lens) > 3 else case, block_m=64)


@pytest.mark.parametrize(("block_m", "heads"), [(16, 8), (32, 5), (16, 1), (32, 12)])
def test_row_tiles(check: Callable[..., None], block_m: int, heads: int) -> None:
    check(replace(MLA, q_lens=(3,), kv_lens=(70,), heads=heads, nsplit=2, seed=heads), block_m=block_m)


@pytest.mark.parametrize("block_n", [32, 64])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_warps_gives_the_result(check: Callable[..., None], seed: int, block_n: int) -> None:
    case = replace(MLA, q_lens=(11,), kv_lens=(140,), nsplit=1, seed=seed)
    check(case, seed=seed, block_m=64, block_n=block_n)


@pytest.mark.parametrize("seed", range(3))
def test_fused_merge(check: Callable[..., None], seed: int) -> None:
    case = replace(
        MLA, q_lens=(9, 0, 2), kv_lens=(90, 0, 20), nsplit=3, seed=seed, padding_requests=1, padding_rows=3
    )
    check(case, seed=seed, merge="fused", block_m=64)


@pytest.mark.parametrize("nsplit", [2, 9, 17, 40])  # 1, 2, 4 and 8 warps share half a row
def test_merge_by_warps(check: Callable[..., None], nsplit: int) -> None:
    case = replace(
        MLA, q_lens=(3, 0, 2), kv_lens=(700, 0, 20), heads=3, nsplit=nsplit, seed=nsplit, padding_requests=1,
        padding_rows=3,
    )  # fmt: skip
    check(case, merge="warps", block_m=16)


WIDE: list[dict[str, Any]] = [
    {"num_stages": 4}, {"block_n": 64}, {"block_n": 64, "num_stages": 3}, {"partial_dtype": "fp32"},
    {"partial_dtype": "fp32", "merge": "warps"},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tunables", WIDE, ids=str)
def test_tunables(check: Callable[..., None], tunables: dict[str, Any]) -> None:
    check(replace(MLA, q_lens=(8, 2), kv_lens=(150, 64), nsplit=2, mask="full"), block_m=64, **tunables)


def test_fp16(check: Callable[..., None]) -> None:
    check(replace(MLA, q_lens=(8,), kv_lens=(100,), dtype="fp16", nsplit=2), block_m=64)


@pytest.mark.parametrize("view", ["wide", "odd", "transposed"])
def test_views(check: Callable[..., None], view: str) -> None:
    check(replace(MLA, q_lens=(5,), kv_lens=(60,), view=view, nsplit=2), block_m=64)
