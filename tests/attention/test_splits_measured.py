"""nsplit="auto" against the sweeps of data/reference/h200/splits.parquet: 7 listed shapes, 20 random ones."""

from math import ceil

import pytest

from workbench import targets
from workbench.attention.variants import find
from workbench.experiments.verify_cases import parse_case
from workbench.rows import Row
from workbench.rows_file import read_rows
from workbench.targets import ROOT

H200 = targets.load("h200")
SWEEPS: dict[tuple[str, str], list[Row]] = {}
for row in read_rows(ROOT / "data" / "reference" / "h200" / "splits.parquet"):
    SWEEPS.setdefault((row.variant, str(row.axes["case"])), []).append(row)


def choice(variant: str, case: str) -> tuple[int, list[float]]:
    """(tokens a split of auto's plan works on, times of every plan of the sweep with just these)."""
    shape, launcher = parse_case(case).shape, find(variant).load()
    tunables = launcher.default_tunables(shape, H200, False)
    nsplit = launcher.choose_nsplit(shape, H200, tunables, False)

    def tokens(count: int) -> int:
        return ceil(ceil(shape.max_kv_len / count) / tunables["block_n"]) * tunables["block_n"]

    same = [
        r.timing.median_us
        for r in SWEEPS[variant, case]
        if r.timing and tokens(int(r.metrics["plan_nsplit"] or 1)) == tokens(nsplit)
    ]
    return tokens(nsplit), same


def test_the_sweeps_are_what_they_are_said_to_be() -> None:
    assert len(SWEEPS) == 2 * 27 and {variant for variant, _ in SWEEPS} == {"cuda_flash", "triton_split"}
    assert sum(not choice(*key)[1] for key in SWEEPS) <= 1  # a choice made since that no sweep holds


@pytest.mark.parametrize("key", SWEEPS, ids="-".join)
def test_auto_is_within_5_percent_of_the_best_of_its_sweep(key: tuple[str, str]) -> None:
    tokens, same = choice(*key)
    if not same:
        pytest.skip(f"splits of {tokens} tokens were not measured")
    best = min(r.timing.median_us for r in SWEEPS[key] if r.timing)
    assert min(same) <= 1.05 * best
