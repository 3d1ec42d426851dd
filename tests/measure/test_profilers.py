"""Traces are written and read again, and leave the process as fast as it was."""

import time
from statistics import median

import pytest
import torch

from workbench.measure import trace
from workbench.measure.profilers import record_trace


def test_a_recorded_trace_holds_the_operations(tmp_path) -> None:
    record_trace(tmp_path / "trace.json", lambda: torch.ones(3).exp())
    assert "aten::exp" in [op.name for op in trace.load(tmp_path / "trace.json").ops]


@pytest.mark.gpu
def test_graph_launches_are_no_slower_after_a_trace(tmp_path) -> None:
    x, graph = torch.zeros(64, device="cuda"), torch.cuda.CUDAGraph()
    x.add_(1)
    with torch.cuda.graph(graph):
        for _ in range(2000):
            x.add_(1)

    def launch_us() -> float:
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            graph.replay()
            times.append((time.perf_counter() - start) * 1e6)
        return median(times)

    launch_us()
    before_us = launch_us()
    record_trace(tmp_path / "trace.json", graph.replay)
    assert len(trace.load(tmp_path / "trace.json").kernels) == 2000
    assert launch_us() < 5 * before_us + 50
