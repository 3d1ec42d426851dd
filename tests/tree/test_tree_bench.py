"""The bench checks before it times, and a wrong builder never gets a timing."""

import json
import subprocess
import sys

import pytest
import torch

from workbench import targets
from workbench.experiments.tree_bench import (
    HOST_PARTS,
    TreeBench,
    TreeCase,
    build_on_host,
    describe_difference,
)
from workbench.rows import RowStatus
from workbench.tree import TreeBuffers, build_ddtree_batch

CPU = targets.load("cpu")


def test_rows_of_a_small_case() -> None:
    rows = TreeBench(CPU, n=3, budget_s=0.2).run(TreeCase(2, 9, 300, slots=3, dtype="fp32"))
    assert {r.variant: r.status for r in rows} == {
        "triton": RowStatus.UNSUPPORTED,
        "torch": RowStatus.PASSED,
        "heap": RowStatus.PASSED,
    }
    heap = rows[-1]
    assert set(heap.metrics) == {f"{part}_us" for part in HOST_PARTS} and heap.timing is not None
    assert heap.bytes == 2 * 3 * 300 * 4 + 2 * (10 * (44 + 10) + 8)
    assert heap.floor_us == pytest.approx(heap.bytes / (CPU.dram_gbps * 1e3))


def test_a_wrong_builder_is_a_row_without_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_reversed(logits, budget, out, **options):
        return build_ddtree_batch(-logits, budget, out)

    monkeypatch.setattr("workbench.tree.batch.build_ddtree_batch", build_reversed)
    rows = TreeBench(CPU, n=3, methods=("torch",)).run(TreeCase(1, 8, 50, slots=3))
    assert [(r.status, r.timing) for r in rows] == [(RowStatus.INCORRECT, None)]
    assert "covers probability" in rows[0].reason


def test_host_path_equals_the_heap_and_differences_are_named() -> None:
    logits, out = torch.randn(3, 4, 60), TreeBuffers(3, 21)
    assert set(build_on_host(logits, 20, out)) == set(HOST_PARTS)
    assert describe_difference(out, logits, 20) == ""
    want = build_ddtree_batch(logits, 20, TreeBuffers(3, 21))
    assert all(
        torch.equal(a, b)
        for a, b in zip(out.tensors()[1:3] + out.tensors()[4:], want.tensors()[1:3] + want.tensors()[4:])
    )
    out.num_nodes[1] -= 1
    assert "request 1 has 20 nodes, the heap 21" in describe_difference(out, logits, 20)


def test_command_prints_rows_as_json() -> None:
    command = [sys.executable, "-m", "workbench.cli", "bench", "tree", "--target", "cpu", "--json"]
    done = subprocess.run(
        [
            *command,
            "--vocabs",
            "200",
            "--batches",
            "1",
            "--budgets",
            "8",
            "--methods",
            "heap",
            "--samples",
            "3",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["case_id"] == "heap/bs1-L7-B8-V200-bf16"
    bad = subprocess.run([*command, "--budgets", "0"], capture_output=True, text=True)
    assert bad.returncode == 2 and bad.stderr.strip() == (
        "workbench: --budgets 0: give numbers of at least 1 with commas between"
    )
