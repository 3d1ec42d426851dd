"""Both Triton variants, interpreted: axes, public bugs, bucket reuse, batch invariance."""

import itertools

import pytest

from workbench import targets
from workbench.attention.cases import AttentionCase, corner_cases, interpreter_cases
from workbench.attention.conformance import check_batch_invariance, check_bucket, check_case
from workbench.attention.variants import find

VARIANTS = ("triton_split", "triton_serial")
REASON = find(VARIANTS[0]).supports(AttentionCase().shape, targets.load("cpu"))
QUICK = interpreter_cases(limit_programs=40)[::2]
CORNERS = [case for case in corner_cases() if sum(case.q_lens) * case.heads < 150]
LAYOUTS = list(itertools.product(("causal", "tree", "full", "packed"), ("listed", "slots")))

pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.parametrize("variant", VARIANTS),
    pytest.mark.filterwarnings("ignore:divide by zero"),  # numpy's, for the log of a row that sees nothing
]


@pytest.mark.parametrize("case", QUICK + CORNERS, ids=str)
def test_matches_the_oracle(variant: str, case: AttentionCase) -> None:
    verdict = check_case(variant, case)
    assert verdict.reason is None, verdict


@pytest.mark.slow
@pytest.mark.parametrize("case", interpreter_cases(seed=1, limit_programs=1500), ids=str)
def test_matches_the_oracle_on_every_pair_of_axes(variant: str, case: AttentionCase) -> None:
    verdict = check_case(variant, case)
    assert verdict.reason is None, verdict


def test_one_plan_serves_every_step_of_its_bucket(variant: str) -> None:
    verdicts = check_bucket(variant, mask="tree", form="slots", heads=1, latent=32)
    assert [verdict.reason for verdict in verdicts] == [None] * 6


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "form"), LAYOUTS)
def test_one_plan_serves_every_step_in_every_layout(variant: str, mask: str, form: str) -> None:
    verdicts = check_bucket(variant, mask=mask, form=form, heads=4)
    assert [verdict.reason for verdict in verdicts] == [None] * 6


def test_a_request_does_not_depend_on_its_batch(variant: str) -> None:
    small = {"heads": 1, "latent": 32, "rope": 0}
    split = {"nsplit": 4} if find(variant).splits else {}
    assert check_batch_invariance(variant, **small, **split) == []
