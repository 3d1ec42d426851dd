"""triton_split under Triton's interpreter: axes, public bugs, bucket reuse, batch invariance."""

import itertools

import pytest

from workbench import targets
from workbench.attention.cases import AttentionCase, corner_cases, interpreter_cases
from workbench.attention.conformance import check_batch_invariance, check_bucket, check_case
from workbench.attention.variants import find

VARIANT = "triton_split"
REASON = find(VARIANT).supports(AttentionCase().shape, targets.load("cpu"))
QUICK = interpreter_cases(limit_programs=40)[::2]
CORNERS = [case for case in corner_cases() if sum(case.q_lens) * case.heads < 150]
LAYOUTS = list(itertools.product(("causal", "tree", "full", "packed"), ("listed", "slots")))

pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.filterwarnings("ignore:divide by zero"),  # numpy's, for the log of a row that sees nothing
]


@pytest.mark.parametrize("case", QUICK + CORNERS, ids=str)
def test_matches_the_oracle(case: AttentionCase) -> None:
    verdict = check_case(VARIANT, case)
    assert verdict.reason is None, verdict


@pytest.mark.slow
@pytest.mark.parametrize("case", interpreter_cases(seed=1, limit_programs=1500), ids=str)
def test_matches_the_oracle_on_every_pair_of_axes(case: AttentionCase) -> None:
    verdict = check_case(VARIANT, case)
    assert verdict.reason is None, verdict


def test_one_plan_serves_every_step_of_its_bucket() -> None:
    verdicts = check_bucket(VARIANT, mask="tree", form="slots", heads=1, latent=32)
    assert [verdict.reason for verdict in verdicts] == [None] * 6


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "form"), LAYOUTS)
def test_one_plan_serves_every_step_in_every_layout(mask: str, form: str) -> None:
    verdicts = check_bucket(VARIANT, mask=mask, form=form, heads=4)
    assert [verdict.reason for verdict in verdicts] == [None] * 6


def test_a_request_does_not_depend_on_its_batch() -> None:
    small = {"heads": 1, "latent": 32, "rope": 0}
    assert check_batch_invariance(VARIANT, **small, nsplit=4) == []
