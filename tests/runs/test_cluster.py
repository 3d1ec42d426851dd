"""A run on a Dask worker comes back whole; a target that nobody offers is refused at once."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workbench.rows import RunStatus
from workbench.runs import cluster, execute, sweep
from workbench.runs.manifest import read_run
from workbench.runs.verify import verify_folder

pytest.importorskip("distributed")


@pytest.fixture
def scheduler() -> Iterator[str]:
    """A scheduler and one worker of target cpu, as a user starts them."""
    from distributed import LocalCluster

    quiet = {"dashboard_address": None, "processes": False, "protocol": "tcp://"}
    with LocalCluster(n_workers=0, host="127.0.0.1", **quiet) as local:
        command = [
            sys.executable,
            "-m",
            "workbench.cli",
            "worker",
            local.scheduler_address,
            "--target",
            "cpu",
        ]
        worker = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(execute.ROOT)})
        try:
            yield local.scheduler_address
        finally:
            worker.terminate()
            worker.wait(20)


@pytest.mark.slow
def test_run_on_a_worker(scheduler: str, open_batch: Callable[..., execute.Batch]) -> None:
    from distributed import Client

    with Client(scheduler) as client:
        client.wait_for_workers(1, timeout=60)
    batch = open_batch()
    planned = [sweep.plan_run(sweep.find_notebook("00"), "cpu", {"samples": 3})]
    assert cluster.run_batch_on(scheduler, batch, planned).status is RunStatus.PASSED
    assert read_run(batch.folder / planned[0].folder_name).parameters["samples"] == 3
    assert not any(verify_folder(batch.folder).values())
    gpu = sweep.PlannedRun(planned[0].notebook, "h200", planned[0].params)
    with pytest.raises(ValueError, match=r"no worker offers target 'h200' \(offered: cpu\)"):
        cluster.run_batch_on(scheduler, open_batch(), [gpu])


def test_archive_keeps_every_file(tmp_path: Path, open_batch: Callable[..., execute.Batch]) -> None:
    batch = open_batch()
    folder = tmp_path / "10_x_0"
    folder.mkdir()
    manifest = execute.opening_manifest(batch, sweep.plan_run(sweep.find_notebook("00"), "cpu"), {})
    execute.write_json(folder / "manifest.json", manifest)
    (folder / "stdout.log").write_bytes(bytes(range(256)))
    cluster.unpack_run(batch.folder, "10_x_0", cluster.pack_run(folder))
    copies = {path.name: path.read_bytes() for path in (batch.folder / "10_x_0").iterdir()}
    assert copies == {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "sub").mkdir()
    with pytest.raises(ValueError, match="not a plain file: update the worker"):
        cluster.unpack_run(batch.folder, "20_x_0", cluster.pack_run(folder))


def test_other_commit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the batch 0123456: check out the same"):
        cluster.execute_remote("00", "cpu", {}, "cpu/b", "0123456789", lambda *_: tmp_path, 60)


def test_without_dask_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ValueError, match=r"pip install 'specdecode-workbench\[cluster\]'"):
        cluster.serve_worker("tcp://127.0.0.1:1")
