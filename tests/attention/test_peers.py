"""Adapters: FlexAttention against the oracle, what the others are handed, and that absence is said."""

import pytest
import torch

from workbench import targets
from workbench.attention.case_inputs import build
from workbench.attention.cases import AttentionCase, corner_cases, interpreter_cases
from workbench.attention.checks import make_call
from workbench.attention.conformance import check_case
from workbench.attention.peers import _page_table, listed_slots, sglang_extend
from workbench.attention.plan import VerifyCall
from workbench.attention.variants import find, variants
from workbench.shapes import VerifyShape

FLEX_CASES = [*interpreter_cases(limit_programs=60)[::4], *corner_cases()[3:9]]


def call_of(case: AttentionCase) -> VerifyCall:
    i = build(case)
    return make_call(
        i.q, i.kv, i.qo_indptr, i.kv_indptr, i.kv_indices, i.tree_mask, i.draft_slots, i.mask_layout,
        i.sm_scale, i.latent, None, None,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("case", FLEX_CASES, ids=str)
def test_flex_attention(case: AttentionCase) -> None:
    verdict = check_case("torch_flex", case)
    assert verdict.reason is None, verdict


def test_peers_that_are_not_installed_say_so() -> None:
    shape = VerifyShape(1, 8, 4, 64, mask_layout="causal")
    for variant in variants():
        if variant.backend != "peer" or variant.name == "torch_flex":
            continue
        reason = variant.supports(shape, targets.load("h200"))
        package = variant.load().package.split(".")[0]
        assert reason is None or reason == f"needs {package}, which is not installed"


def test_peers_without_a_tree_mask_refuse_one() -> None:
    shape = VerifyShape(1, 8, 4, 64)
    for name in ("flashinfer_fa2", "flashinfer_fa3", "flashmla"):
        assert find(name).supports(shape, targets.load("h200")) == f"{name} takes masks causal, not tree"


def test_drafts_are_listed_last() -> None:
    case = AttentionCase(q_lens=(2, 3), kv_lens=(5, 9), form="slots")
    call = call_of(case)
    slots, q_lens = listed_slots(call)
    assert q_lens == [2, 3] and [len(s) for s in slots] == [5, 9]
    assert call.draft_slots is not None
    assert torch.equal(torch.cat([s[-q:] for s, q in zip(slots, q_lens)]).int(), call.draft_slots[:5])


def test_pages_of_64_are_recognised_and_nothing_else() -> None:
    pages = torch.tensor([[3], [0], [7]]) * 64 + torch.arange(64)
    assert _page_table([pages.flatten()[:150], pages[1]]).tolist() == [[3, 0, 7], [0, 0, 0]]
    for broken in (pages.flatten() + 1, pages.flatten().flip(0)):
        with pytest.raises(ValueError, match="flashmla takes no page_size 1"):
            _page_table([broken])


@pytest.mark.parametrize("form", ["listed", "slots"])
@pytest.mark.parametrize("mask", ["tree", "full", "packed", "causal"])
def test_sglang_gets_prefix_indices_and_a_full_mask(mask: str, form: str) -> None:
    case = AttentionCase(q_lens=(2, 3), kv_lens=(5, 9), mask=mask, form=form, tree="dag")
    call = call_of(case)
    state = sglang_extend.prepare(None, call)  # type: ignore[arg-type]
    assert state["kv_indptr"].tolist() == [0, 3, 9] and state["mask_indptr"].tolist() == [0, 10, 37]
    slots, _ = listed_slots(call)
    assert torch.equal(state["kv_indices"], torch.cat([slots[0][:3], slots[1][:6]]))
    assert (state["custom_mask"] is None) == (mask == "causal")
    if mask != "causal":
        assert len(state["custom_mask"]) == 37


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [v.name for v in variants() if v.backend == "peer"])
def test_installed_peers_match_the_oracle(variant: str) -> None:
    case = AttentionCase(
        (4, 4), (1000, 300), dtype="bf16", latent=512, rope=64, mask="causal", indices="contiguous"
    )
    reason = find(variant).supports(case.shape)
    if reason or variant == "flashmla":  # whose pages these indices are not
        pytest.skip(reason or "flashmla takes 64-token pages")
    assert check_case(variant, case, "cuda").reason is None
