"""cuda_flash on a GPU: the attention kit over its tunables, captured buckets, repeats, the score dump."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from workbench import targets
from workbench.attention import conformance, cuda_flash
from workbench.attention.case_inputs import build
from workbench.attention.cases import AttentionCase, corner_cases, gpu_cases
from workbench.attention.checks import make_call
from workbench.attention.conformance import check_batch_invariance, check_bucket, check_case

pytestmark = pytest.mark.gpu

MLA = AttentionCase(dtype="bf16", latent=512, rope=64)
WIDTHS: dict[str, Any] = {"dtype": "bf16", "latent": 512, "rope": 64}
TUNABLES: list[dict[str, Any]] = [
    {"block_m": 16}, {"block_m": 32}, {"block_m": 64}, {"block_m": 64, "partial_dtype": "fp32"},
    {"block_m": 64, "block_n": 32, "num_stages": 2},
    {"block_m": 16, "block_n": 32, "num_stages": 2, "min_blocks": 2},
    {"block_m": 64, "block_n": 32, "num_stages": 3}, {"block_m": 64, "block_n": 64, "num_stages": 2},
    {"block_m": 32, "block_n": 64, "num_stages": 2}, {"block_m": 16, "block_n": 64, "num_stages": 2},
    {"merge": "warps"}, {"merge": "warps", "partial_dtype": "fp32"},
]  # fmt: skip


@pytest.mark.parametrize("case", [c for c in corner_cases("bf16", 512, 64) if c.rope], ids=str)
def test_corner_cases(case: AttentionCase) -> None:
    assert (verdict := check_case("cuda_flash", case, "cuda")).reason is None, verdict


@pytest.mark.slow
@pytest.mark.parametrize("case", gpu_cases(seed=3), ids=str)
def test_pairwise_cases(case: AttentionCase) -> None:
    assert (verdict := check_case("cuda_flash", case, "cuda")).reason is None, verdict


@pytest.mark.parametrize("nsplit", [1, 2, 7, 64])
@pytest.mark.parametrize("tunables", TUNABLES, ids=str)
def test_tunables(tunables: dict[str, Any], nsplit: int) -> None:
    case = replace(MLA, q_lens=(9, 0, 33), kv_lens=(2000, 0, 777), nsplit=nsplit, padding_rows=3)
    auto = cuda_flash.default_tunables(case.shape, targets.detect(), False)
    config = cuda_flash.Config(**(auto | tunables))
    if config.shared_bytes + cuda_flash.STATIC_SMEM_BYTES > targets.detect().smem_per_block_bytes:
        pytest.skip(f"{config.shared_bytes} B of shared memory are more than this GPU has")
    assert (verdict := check_case("cuda_flash", case, "cuda", **tunables)).reason is None, verdict


@pytest.mark.parametrize("block_m", [16, 64])
def test_fused_merge(block_m: int) -> None:
    case = replace(MLA, q_lens=(9, 0, 2), kv_lens=(2000, 0, 777), nsplit=4, padding_rows=3)
    verdict = check_case("cuda_flash", case, "cuda", merge="fused", block_m=block_m)
    assert verdict.reason is None, verdict


@pytest.mark.parametrize("merge", ["kernel", "warps", "fused"])
@pytest.mark.parametrize("form", ["listed", "slots"])
@pytest.mark.parametrize("mask", ["causal", "tree", "full", "packed"])
def test_a_captured_bucket_serves_every_step(mask: str, form: str, merge: str) -> None:
    options = WIDTHS | {"nsplit": 4, "merge": merge}
    reasons = [v.reason for v in check_bucket("cuda_flash", "cuda", mask=mask, form=form, **options)]
    assert reasons == [None] * len(reasons)


def test_batch_invariance() -> None:
    assert check_batch_invariance("cuda_flash", "cuda", **WIDTHS) == []


def test_repeats_bitwise() -> None:
    case = replace(MLA, q_lens=(16,) * 4, kv_lens=(4112, 3000, 65, 16), nsplit=8)
    inputs = build(case, "cuda")
    plan = conformance.plan_of("cuda_flash", case, "cuda")
    results = []
    for _ in range(50):
        out, lse = conformance.poisoned_outputs(inputs.q, 512)
        conformance.verify_attention(**inputs.arguments(), plan=plan, out=out, lse=lse)
        results.append((out, lse))
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


def test_score_dump_matches_the_products() -> None:
    case = replace(MLA, q_lens=(5,), kv_lens=(100,), mask="causal", nsplit=2)
    i = build(case, "cuda")
    call = make_call(
        i.q, i.kv, i.qo_indptr, i.kv_indptr, i.kv_indices, None, None, "causal", i.sm_scale, 512, None, None
    )
    scores = cuda_flash.dump_scores(conformance.plan_of("cuda_flash", case, "cuda"), call)[0]
    keys = i.kv[i.kv_indices[:100].long()].double()
    products = (i.q[:5].double() @ keys.T * i.sm_scale * cuda_flash.LOG2E).flatten(0, 1)  # [rows, 100]
    visible = (
        torch.arange(100, device="cuda") <= 95 + torch.arange(5, device="cuda").repeat_interleave(8)[:, None]
    )
    assert torch.equal(scores == -torch.inf, ~visible)
    torch.testing.assert_close(scores[visible].double(), products[visible], atol=1e-4, rtol=1e-5)
