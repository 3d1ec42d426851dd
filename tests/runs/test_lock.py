"""Two batches never share a GPU."""

import os

import pytest

from workbench import targets
from workbench.runs.lock import hold_device


def test_second_holder_is_refused_and_told_who(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"test-{os.getpid()}")
    gpu = targets.load("h200")
    refused = pytest.raises(ValueError, match=f"process {os.getpid()} already measures")
    with hold_device(gpu), refused, hold_device(gpu):
        pass
    with hold_device(gpu), hold_device(targets.load("cpu")), hold_device(targets.load("cpu")):
        pass
