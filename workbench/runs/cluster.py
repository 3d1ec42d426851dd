"""Runs on other machines: Dask workers announce their hardware target, runs go to a worker that has it.

Needs the `cluster` extra. Each worker uses its own checkout, which must be of the same commit; the finished
run folder comes back as an archive, so no shared file system is needed.
"""

import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workbench import targets
from workbench.rows import RunStatus
from workbench.runs import provenance, sweep
from workbench.runs.execute import GOOD, Batch, close_batch, open_batch, run_one
from workbench.runs.manifest import PARTIAL_PREFIX, BatchManifest, RunManifest, read_run

RESOURCE_PREFIX = "target-"
EXTRA = "pip install 'specdecode-workbench[cluster]'"


def resource(target: str) -> dict[str, float]:
    """The Dask resource of a target: a worker has one, a run takes it, so runs never share a device."""
    return {RESOURCE_PREFIX + target: 1.0}


def serve_worker(address: str, target: str = "") -> None:
    """Join the scheduler at `address` as one worker of `target` and stay until it closes."""
    _require_dask()
    import asyncio

    from distributed import Nanny

    name = target or targets.detect().name
    targets.require_hardware(targets.load(name))

    async def serve() -> None:
        async with Nanny(
            address, nthreads=1, death_timeout=60, resources=resource(name), name=f"{name}-{os.getpid()}"
        ) as nanny:
            await nanny.finished()

    try:
        asyncio.run(serve())
    except RuntimeError as error:
        raise ValueError(f"no scheduler answers at {address}: start one with `dask scheduler`") from error


def run_batch_on(address: str, batch: Batch, planned: Sequence[sweep.PlannedRun]) -> BatchManifest:
    """Execute the plan on workers of a scheduler; folders arrive in `batch` as they finish."""
    _require_dask()
    from distributed import Client, as_completed

    with Client(address, timeout=20) as client:
        _require_worker(client, planned)
        batch.manifest.runs = {run.folder_name: RunStatus.RUNNING for run in planned}
        batch.save()
        futures = {_submit(client, batch, run): run for run in planned}
        for future in as_completed(futures):
            run = futures[future]
            batch.progress.begin(run.name)
            manifest = unpack_run(batch.folder, run.folder_name, future.result())
            batch.runs.append(manifest)
            batch.manifest.runs[run.folder_name] = manifest.status
            batch.progress.finish(manifest)
            batch.save()
    bad = [name for name, status in batch.manifest.runs.items() if status not in GOOD]
    close_batch(batch, RunStatus.FAILED if bad else RunStatus.PASSED, f"did not pass: {bad}" if bad else "")
    return batch.manifest


def execute_remote(
    notebook: str,
    target: str,
    parameters: dict[str, Any],
    batch_id: str,
    sha: str,
    render: Callable[..., Path],
    limit_s: int,
) -> bytes:
    """On a worker: one run in a temporary folder, returned as a tar archive of the run folder."""
    here = provenance.code_state()["sha"]
    if here != sha:
        raise ValueError(
            f"the worker has commit {here[:7] or 'none'}, the batch {sha[:7]}: check out the same"
        )
    run = sweep.plan_run(sweep.find_notebook(notebook), target, parameters)
    with tempfile.TemporaryDirectory(prefix="workbench-") as root:
        batch = open_batch(
            target,
            Path(root),
            render_run=render,
            render_index=lambda folder: folder,
            progress=Silent(),
            cell_timeout_s=limit_s,
        )
        batch.manifest.batch_id = batch_id
        run_one(batch, run)
        return pack_run(batch.folder / run.folder_name)


def pack_run(folder: Path) -> bytes:
    """The files of a run folder as an uncompressed tar archive."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, arcname=path.name)
    return stream.getvalue()


def unpack_run(batch: Path, name: str, archive: bytes) -> RunManifest:
    """Write a run folder that came from a worker: aside first, renamed when complete."""
    partial = batch / f"{PARTIAL_PREFIX}{name}"
    partial.mkdir()
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files.getmembers():
            source = files.extractfile(member)
            if source is None or Path(member.name).name != member.name:
                raise ValueError(
                    f"archive of {name} holds {member.name!r}, not a plain file: update the worker"
                )
            with (partial / member.name).open("wb") as sink:
                shutil.copyfileobj(source, sink)
    os.replace(partial, batch / name)
    return read_run(batch / name)


class Silent:
    """No progress: a worker's steps are in the run's stdout.log."""

    def begin(self, name: str) -> None: ...
    def step(self, name: str) -> None: ...
    def finish(self, manifest: RunManifest) -> None: ...


def _submit(client: Any, batch: Batch, run: sweep.PlannedRun) -> Any:
    parameters = {name: value for name, value in run.parameters.items() if name != "target"}
    return client.submit(
        execute_remote,
        run.name,
        run.target,
        parameters,
        batch.manifest.batch_id,
        batch.manifest.code["sha"],
        batch.render_run,
        batch.cell_timeout_s,
        resources=resource(run.target),
        pure=False,
        retries=0,
    )


def _require_worker(client: Any, planned: Sequence[sweep.PlannedRun]) -> None:
    """Raise ValueError when no worker has the target: a task without a worker would wait for ever."""
    workers = client.scheduler_info()["workers"].values()
    offered = {name.removeprefix(RESOURCE_PREFIX) for one in workers for name in one.get("resources", {})}
    for target in sorted({run.target for run in planned}):
        if target not in offered:
            raise ValueError(
                f"no worker offers target {target!r} (offered: {', '.join(sorted(offered)) or 'none'}):"
                f" start one with `workbench worker ADDRESS --target {target}`"
            )


def _require_dask() -> None:
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise ValueError(f"clusters need dask.distributed, which is not installed: {EXTRA}") from error
