"""The peers table of kernels/README.md is what the stored rows say."""

from collections.abc import Iterable

import pytest

from workbench.experiments.verify_cases import VerifyCase, published_us, table_cases
from workbench.rows import Row
from workbench.rows_file import read_rows
from workbench.targets import ROOT

TABLE = next((ROOT / "papermill_runs" / "h200").glob("*_8b67591/10_verify_variants_*/rows.parquet"))
PEERS = ROOT / "data" / "reference" / "h200" / "verify_peers.parquet"
TEXT = " ".join((ROOT / "kernels" / "README.md").read_text().split())
CASES = [case for case in table_cases() if case.layout == "random"]


def times(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    return {(row.variant, str(row.axes["case"])): row.timing.median_us for row in rows if row.timing}


OURS = {str(row.axes["case"]): row for row in read_rows(TABLE) if row.variant == "cuda_flash"}
US = times(read_rows(PEERS)) | times(read_rows(TABLE))  # ours from the notebook, peers from their own call


def thousands(tokens: int) -> str:
    return "25.6k" if tokens == 25600 else f"{tokens / 1000:.0f}k"


def flashmla_us(case: VerifyCase) -> float:
    in_order = VerifyCase(case.bs, case.heads, case.q_len, case.ctx, "contiguous")
    published = published_us(in_order, "h200") | published_us(case, "h200")
    return next(us for name, us in published.items() if name == "flashmla")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_row_of_the_table(case: VerifyCase) -> None:
    row, triton = OURS[case.name], US["triton_split", case.name]
    assert row.timing and row.timing.stable is not None
    ours, mark = row.timing.median_us, "" if row.timing.stable else " ~"
    peers = [US["flashinfer_fa2", case.name], US["flashinfer_fa3", case.name], flashmla_us(case)]
    cells = [
        case.bs, case.heads, case.q_len, thousands(case.ctx), row.metrics["plan_nsplit"],
        f"{ours:.1f}{mark}", f"{row.floor_ratio:.1f}", f"{triton:.1f}",
        *(f"**{us:.1f}**" if us <= ours else f"{us:.1f}" for us in peers),
    ]  # fmt: skip
    assert f"| {' | '.join(map(str, cells))} |" in TEXT


def test_what_is_said_of_the_peers() -> None:
    def ratios(variant: str, mine: str = "cuda_flash") -> list[float]:
        return [US[variant, case.name] / US[mine, case.name] for case in CASES]

    fa2, fa3, triton = ratios("flashinfer_fa2"), ratios("flashinfer_fa3"), ratios("triton_split")
    mla = [flashmla_us(case) / US["cuda_flash", case.name] for case in CASES]
    assert len(CASES) == 39 and min(fa2) > 1
    assert f"on all 39 shapes, {min(fa2):.2f} to {max(fa2):.2f} times" in TEXT
    won = sum(ratio > 1 for ratio in ratios("flashinfer_fa2", "triton_split"))
    assert f"`triton_split` on {won}" in TEXT
    for name, wgmma in (("fa3", fa3), ("FlashMLA", mla)):
        assert f"{name} (wgmma): faster on {sum(ratio > 1 for ratio in wgmma)} of 39" in TEXT
    assert f"at most {1 / min(*fa3, *mla):.1f} times faster" in TEXT
    assert f"faster on all 39, {min(triton):.2f} to {max(triton):.2f} times" in TEXT
