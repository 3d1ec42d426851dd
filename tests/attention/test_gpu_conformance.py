"""Every CUDA-capable variant on the GPU: full axes, public bugs, captured buckets, invariance, tunables."""

import itertools

import pytest
import torch

from workbench.attention import variants
from workbench.attention.cases import AttentionCase, corner_cases, gpu_cases
from workbench.attention.conformance import check_batch_invariance, check_bucket, check_case
from workbench.attention.variants import find

pytestmark = pytest.mark.gpu

VARIANTS = [v.name for v in variants() if "cuda" in v.devices and v.backend in ("triton", "cuda")]
ANY_WIDTH = [name for name in VARIANTS if find(name).widths is None]
MLA = {"latent": 512, "rope": 64}
LAYOUTS = list(itertools.product(("causal", "tree", "full", "packed"), ("listed", "slots")))


def check(variant: str, case: AttentionCase) -> None:
    reason = find(variant).supports(case.shape)
    if reason:
        pytest.skip(reason)
    verdict = check_case(variant, case, "cuda")
    print(f"{variant} {case}: rel_fro {verdict.errors.rel_fro:.2e} cos_diff {verdict.errors.cos_diff:.1e}"
          f" lse {verdict.lse_error:.1e}")  # fmt: skip
    assert verdict.reason is None, verdict


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", gpu_cases(), ids=str)
def test_full_axes(variant: str, case: AttentionCase) -> None:
    check(variant, case)


@pytest.mark.parametrize("variant", ANY_WIDTH)
@pytest.mark.parametrize(
    "case", gpu_cases(1, ("fp32", "bf16"), ((64, 16), (32, 0), (20, 12), (512, 64)))[::3], ids=str
)
def test_other_widths_and_fp32(variant: str, case: AttentionCase) -> None:
    check(variant, case)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", corner_cases("bf16", **MLA), ids=str)
def test_corners(variant: str, case: AttentionCase) -> None:
    check(variant, case)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if find(name).splits])
def test_b3_a_workspace_past_2_31_elements(variant: str) -> None:
    """8 requests x 128 splits x 8,320 rows x 512 columns: 4.4e9 elements."""
    check(variant, AttentionCase(
        (65,) * 8, (300,) * 8, heads=128, dtype="bf16", nsplit=128, view="contiguous", **MLA
    ))  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("mask", "form"), LAYOUTS)
def test_one_captured_graph_serves_every_step_of_its_bucket(variant: str, mask: str, form: str) -> None:
    verdicts = check_bucket(variant, "cuda", mask=mask, form=form, dtype="bf16", **MLA)
    assert [verdict.reason for verdict in verdicts] == [None] * 6, verdicts


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_request_does_not_depend_on_its_batch(variant: str) -> None:
    assert check_batch_invariance(variant, "cuda", dtype="bf16", **MLA) == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_call_repeats_bitwise(variant: str) -> None:
    from workbench.attention import make_plan, verify_attention
    from workbench.attention.case_inputs import build

    case = AttentionCase((16, 3), (5000, 700), heads=16, dtype="bf16", **MLA)
    inputs = build(case, "cuda")
    plan = make_plan(case.shape, variant=variant, device="cuda")
    runs = [verify_attention(**inputs.arguments(), plan=plan) for _ in range(5)]
    assert all(torch.equal(out, runs[0][0]) and torch.equal(lse, runs[0][1]) for out, lse in runs)


@pytest.mark.parametrize(
    "tunables",
    [
        {"block_m": 64, "block_n": 64, "num_warps": 8, "num_stages": 2, "prefetch": False},
        {"block_m": 64, "block_n": 32, "num_warps": 8, "num_stages": 4, "prefetch": True},
        {"block_m": 16, "block_n": 64, "num_warps": 8, "num_stages": 3},
        {"block_m": 32, "block_n": 16, "num_warps": 8, "num_stages": 3},
        {"partial_dtype": "fp32"},
        {"pdl": True},
        {"reduce_columns": 512, "reduce_warps": 8, "reduce_ahead": 3},
    ],
    ids=str,
)
def test_triton_split_tunables_do_not_change_the_answer(tunables: dict) -> None:
    case = AttentionCase((16, 33), (5000, 700), heads=8, dtype="bf16", form="slots", **MLA)
    assert check_case("triton_split", case, "cuda", **tunables).reason is None


def test_bad_contents_are_named_under_validate() -> None:
    from workbench.attention import verify_attention
    from workbench.attention.case_inputs import build

    arguments = build(AttentionCase(dtype="bf16", **MLA), "cuda").arguments()
    arguments["kv_indices"] = arguments["kv_indices"].clone().fill_(10_000)
    with pytest.raises(ValueError, match="kv_indices holds slot 10000"):
        verify_attention(**arguments, validate=True)
