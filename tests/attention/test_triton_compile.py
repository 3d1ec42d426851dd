"""The Triton kernels compile for every GPU target, inside its shared memory, pipelined as designed."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from workbench import targets

SCRIPT = Path(__file__).with_name("compile_kernels.py")


@cache
def report(variant: str, target: str) -> list[dict[str, Any]]:
    """One dict per kernel and row count."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    run = subprocess.run(
        [sys.executable, SCRIPT, variant, target],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def check_shared_memory(variant: str, target: str) -> None:
    for kernel in report(variant, target):
        print(kernel)
        assert kernel["smem_bytes"] <= targets.load(target).smem_per_block_bytes, kernel


@pytest.mark.parametrize("target", ["h200", "rtx-pro-6000"])
def test_fits_the_shared_memory_of_its_target(target: str) -> None:
    check_shared_memory("triton_split", target)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "target"),
    [("triton_split", "b200"), *(("triton_serial", name) for name in ("h200", "rtx-pro-6000", "b200"))],
)
def test_fits_the_shared_memory_of_other_targets(variant: str, target: str) -> None:
    check_shared_memory(variant, target)


def test_the_split_kernel_copies_asynchronously_and_uses_wgmma_on_hopper() -> None:
    few, many = (k for k in report("triton_split", "h200") if k["kernel"] == "_split_kernel")
    assert few["async_copies"] > 0 and few["mma"] > 0
    assert many["async_copies"] > 0 and many["wgmma"] > 0


def test_the_split_kernel_does_not_spill_on_sm_120() -> None:
    kernels = report("triton_split", "rtx-pro-6000")
    assert [k["stack_bytes"] for k in kernels] == [0] * len(kernels), kernels
    assert all(k["async_copies"] > 0 for k in kernels if k["kernel"] == "_split_kernel")
