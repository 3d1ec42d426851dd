"""Start the child process of a run, pass its lines on while it works, and stop it when asked."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from workbench.runs.child import OUTCOME_FILE
from workbench.targets import ROOT, HardwareTarget

LOG_FILE = "stdout.log"
JOB_FILE = "job.json"
POLL_S = 0.2
DRAIN_S = 2.0  # a grandchild may keep the pipe open after the child has ended
STOP_S = 15.0  # how long an interrupted child may take to save its notebook


@dataclass(frozen=True)
class Outcome:
    """How a child ended; `cell` counts from 1 in the executed notebook."""

    status: str
    reason: str
    cell: int | None = None
    signal: str = ""


def child_environment(target: HardwareTarget, run_folder: Path, run_id: str) -> dict[str, str]:
    """This process's environment plus what a run needs; on `cpu` GPUs are hidden and Triton interprets."""
    environment = dict(os.environ)
    path = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {
        "WORKBENCH_RUN_DIR": str(run_folder),
        "WORKBENCH_RUN_ID": run_id,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "JUPYTER_PREFER_ENV_PATH": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    if target.backend == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    return environment


def run_child(
    job: Mapping[str, Any], folder: Path, environment: Mapping[str, str], on_line: Callable[[str], None]
) -> Outcome:
    """Run one job in `folder`; every line goes to stdout.log and `on_line`. Ctrl-C stops the child first."""
    job_path = folder / JOB_FILE
    job_path.write_text(json.dumps(job, allow_nan=False), encoding="utf-8")
    command = [sys.executable, "-m", "workbench.runs.child", str(job_path)]
    with (folder / LOG_FILE).open("wb") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            _pump(process, log, on_line)
        except BaseException:
            _stop(process)
            raise
    return _read_outcome(folder, process.returncode)


def _pump(process: subprocess.Popen[bytes], log: IO[bytes], on_line: Callable[[str], None]) -> None:
    """Copy output line by line until the child has ended and its pipe is drained."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    rest, ended_at = b"", None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            chunk = process.stdout.read() if selector.select(POLL_S) else None
            if chunk == b"":
                break
            if chunk:
                log.write(chunk)
                log.flush()
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    on_line(line.decode("utf-8", "replace"))
            if process.poll() is not None:
                ended_at = ended_at or time.monotonic()
                if not chunk and time.monotonic() - ended_at > DRAIN_S:
                    break
    process.stdout.close()
    process.wait()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the child so that it saves its notebook; kill it when that takes too long."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_outcome(folder: Path, exit_code: int) -> Outcome:
    """The child's own account, or what its exit code says when it left none."""
    path = folder / OUTCOME_FILE
    if path.is_file():
        return Outcome(**json.loads(path.read_text(encoding="utf-8")))
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return Outcome("KILLED", f"the process of the run was killed ({name})", signal=name)
    return Outcome("FAILED", f"the process of the run ended with code {exit_code}: see {LOG_FILE}")
