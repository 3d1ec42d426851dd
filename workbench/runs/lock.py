"""One batch at a time on a device: two that share a GPU would measure each other."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench.targets import HardwareTarget


@contextmanager
def hold_device(target: HardwareTarget) -> Iterator[None]:
    """Hold the visible GPUs until the block ends; no-op on cpu. ValueError names who has them."""
    if target.backend == "cpu":
        yield
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace(",", "-")
    path = Path(tempfile.gettempdir()) / f"workbench-gpu-{visible}.lock"
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            raise ValueError(
                f"process {owner} already measures on this GPU: wait for it, or set CUDA_VISIBLE_DEVICES"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
