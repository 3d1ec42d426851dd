"""The kit itself, and the CPU variant against the fp64 oracle over all axes and the corner list."""

import itertools

import pytest
import torch

from workbench.attention.case_inputs import UNUSED_SLOT, build
from workbench.attention.cases import (
    GPU_AXES,
    INTERPRETER_AXES,
    SHARED_AXES,
    SMALL_WIDTHS,
    AttentionCase,
    corner_cases,
    interpreter_cases,
    pairwise_cases,
)
from workbench.attention.conformance import (
    check_batch_invariance,
    check_bucket,
    check_case,
    expected,
    verdict_of,
)

CPU_CASES, CPU_CORNERS = interpreter_cases(limit_programs=100_000), corner_cases()
LAYOUTS = list(itertools.product(("causal", "tree", "full", "packed"), ("listed", "slots")))


@pytest.mark.parametrize("case", CPU_CASES + CPU_CORNERS, ids=str)
def test_torch_split(case: AttentionCase) -> None:
    verdict = check_case("torch_split", case)
    assert verdict.reason is None, verdict


@pytest.mark.parametrize(("mask", "form"), LAYOUTS)
def test_one_torch_plan_serves_every_step_of_its_bucket(mask: str, form: str) -> None:
    assert [v.reason for v in check_bucket("torch_split", mask=mask, form=form, nsplit=3)] == [None] * 6


@pytest.mark.parametrize("nsplit", [1, 4, 64])
def test_a_request_does_not_depend_on_its_batch(nsplit: int) -> None:
    assert check_batch_invariance("torch_split", nsplit=nsplit) == []


@pytest.mark.parametrize("axes", [INTERPRETER_AXES, GPU_AXES], ids=("interpreter", "gpu"))
def test_the_sample_covers_every_pair_of_axis_values(axes: dict) -> None:
    """Seen from outside: read the axis values back from the cases."""
    values = axes | SHARED_AXES | {"dtype": ("bf16", "fp32"), "widths": SMALL_WIDTHS}
    cases = pairwise_cases(values, 0, lambda case: True)
    read = {
        "heads": lambda c: c.heads, "nsplit": lambda c: c.nsplit, "mask": lambda c: c.mask,
        "tree": lambda c: c.tree, "indices": lambda c: c.indices, "index_dtype": lambda c: c.index_dtype,
        "form": lambda c: c.form, "view": lambda c: c.view, "dtype": lambda c: c.dtype,
        "bs": lambda c: len(c.q_lens), "widths": lambda c: (c.latent, c.rope),
    }  # fmt: skip
    for a, b in itertools.combinations(read, 2):
        seen = {(read[a](case), read[b](case)) for case in cases}
        assert seen == set(itertools.product(values[a], values[b])), (a, b)
    assert len(cases) < 120


def test_a_wrong_mask_offset_would_be_caught() -> None:
    """The kit itself: an oracle of a shifted mask must disagree with the right answer."""
    case = AttentionCase(q_lens=(5, 6), kv_lens=(9, 12), tree="dag")
    inputs = build(case)
    right = expected(inputs)
    assert inputs.tree_mask is not None
    inputs.tree_mask.copy_(inputs.tree_mask.roll(1))
    wrong = expected(inputs)
    assert verdict_of(wrong[0].float(), wrong[1].float(), *right, "fp32").reason is not None


def test_poison_is_everywhere_a_kernel_must_not_look() -> None:
    inputs = build(AttentionCase(q_lens=(2, 3), kv_lens=(9, 12), padding_rows=2, form="slots"))
    used = torch.cat([inputs.kv_indices[:16], inputs.draft_slots[:5]]).long()  # type: ignore[index]
    unused = torch.ones(len(inputs.kv), dtype=torch.bool)
    unused[used] = False
    assert unused.any() and inputs.kv[unused].isnan().all() and inputs.kv[used].isfinite().all()
    assert inputs.q[5:].isnan().all() and (inputs.kv_indices[16:] == UNUSED_SLOT).all()
