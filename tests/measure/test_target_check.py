"""Notebook 00: what speaks against measuring here, and what a share of the target's rate means."""

import os

import pytest

from workbench import targets
from workbench.experiments import target_check

CPU = targets.load("cpu")


@pytest.mark.parametrize(
    "load, cores, is_busy", [(0.1, 2, False), (1.0, 2, False), (1.8, 2, True), (1.8, 16, False)]
)
def test_load_is_judged_per_core(load, cores, is_busy):
    problem = target_check.load_problem(load, cores)
    assert bool(problem) is is_busy
    assert not is_busy or f"{load} on {cores} cores" in problem


@pytest.fixture(scope="module")
def rows():
    return target_check.run(target_check.Params(copy_mb=4, matmul_size=64, samples=3), step=lambda name: None)


@pytest.mark.parametrize(
    "load, told", [(0.0, "Nothing speaks against"), (99.0, "Not fit to measure: the load")]
)
def test_a_busy_machine_is_not_called_fit(rows, monkeypatch, load, told):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    others = [row for row in rows if row.case_id != "state/neighbours"]
    assert told in target_check.findings([*others, target_check._neighbours(CPU)])[-1]


def test_the_copy_is_compared_with_the_nominal_rate_and_stopped_at_the_peak(rows):
    [copy] = [row for row in rows if row.variant == "copy"]
    assert copy.metrics["target_rate"] == CPU.dram_gbps < copy.metrics["peak_rate"] == CPU.dram_peak_gbps
    told = target_check.findings(rows)[0]
    assert (
        f"of the {CPU.dram_gbps:.4g} GB/s" in told and f"above its peak of {CPU.dram_peak_gbps:.4g}" in told
    )
