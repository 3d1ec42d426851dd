import pytest
from pydantic import ValidationError

from workbench.rows import Origin, Row, RowStatus, Timing

TIMING = Timing(
    mode="graph", l2="cold", n=3, median_us=20.0, p10_us=19.0, p90_us=22.0, samples=(19.0, 20.0, 22.0)
)
FIELDS = dict(
    case_id="x", experiment="e", variant="v", target="cpu", origin=Origin.MEASURED, status=RowStatus.PASSED
)


def test_floor_ratio_and_flat_columns():
    row = Row(
        **FIELDS,
        timing=TIMING,
        floor_us=10.0,
        axes={"bs": 1},
        errors={"rel_fro": 1e-3},
        metrics={"gbps": 3.0},
    )
    flat = row.flat()
    assert row.floor_ratio == 2.0
    assert (flat["axis_bs"], flat["error_rel_fro"], flat["metric_gbps"], flat["median_us"]) == (
        1,
        1e-3,
        3.0,
        20.0,
    )


@pytest.mark.parametrize("status", [s for s in RowStatus if s is not RowStatus.PASSED])
def test_no_timing_without_a_passed_check(status):
    with pytest.raises(ValidationError, match="drop the timing"):
        Row(**(FIELDS | {"status": status, "reason": "r"}), timing=TIMING)


def test_failed_rows_say_why():
    with pytest.raises(ValidationError, match="without a reason"):
        Row(**(FIELDS | {"status": RowStatus.UNSUPPORTED}))


@pytest.mark.parametrize("origin", [Origin.DERIVED, Origin.PROJECTED])
def test_only_measured_rows_carry_a_timing(origin):
    with pytest.raises(ValidationError, match="put the number into metrics"):
        Row(**(FIELDS | {"origin": origin}), timing=TIMING)
