"""The child process of one run: papermill on one notebook, with the true outcome written for the parent.

Started as `python -m workbench.runs.child JOB.json`. A dead kernel or a cell over its limit leaves a notebook
whose metadata says "completed", so the outcome is taken from the exceptions, never from the notebook.
"""

import json
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from papermill.execute import execute_notebook

ENGINE = "workbench"
OUTCOME_FILE = "outcome.json"
SOCKET_PATH_LIMIT = 90  # a Unix socket's path ends at 107 characters
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class WatchedKernel(AsyncKernelManager):
    """A kernel manager that keeps the exit code of a kernel which died by itself."""

    exit_code: int | None = None

    async def _async_is_alive(self) -> bool:
        if self.has_kernel and self.provisioner is not None:
            code = await self.provisioner.poll()
            if code is not None:
                WatchedKernel.exit_code = code
                return False
            return True
        return False

    is_alive = _async_is_alive


class CountingClient(PapermillNotebookClient):
    """A client that knows which cell runs; cells are counted from 1."""

    cell_number = 0

    def execute_cell(self, cell: Any, cell_index: int, *args: Any, **kwargs: Any) -> Any:
        CountingClient.cell_number = cell_index + 1
        return super().execute_cell(cell, cell_index, *args, **kwargs)


class WorkbenchEngine(NBClientEngine):
    """papermill's engine over Unix sockets: no clash over ports, no TCP warning."""

    @classmethod
    def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **kwargs: Any) -> Any:
        limit_s = kwargs.pop("execution_timeout", None)
        start_s = kwargs.pop("start_timeout", 60)
        kwargs.pop("input_path", None)
        with tempfile.TemporaryDirectory(prefix="wb-") as folder:
            manager = WatchedKernel(kernel_name=kernel_name, connection_file=f"{folder}/k.json")
            if len(folder) < SOCKET_PATH_LIMIT:
                manager.transport = "ipc"
                manager.ip = f"{folder}/k"
            client = CountingClient(nb_man, km=manager, timeout=limit_s, startup_timeout=start_s, **kwargs)
            client.coalesce_streams = True
            client.owns_km = True  # so that the kernel is shut down with the client
            return client.execute()


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Execute the notebook of `job`; the outcome as a dict: status, reason, cell, signal."""
    papermill_engines.register(ENGINE, WorkbenchEngine)
    try:
        execute_notebook(
            job["notebook"],
            job["output"],
            parameters=job["parameters"],
            engine_name=ENGINE,
            progress_bar=False,
            cwd=job["cwd"],
            execution_timeout=job["cell_timeout_s"],
            stdout_file=sys.stdout,
            stderr_file=sys.stderr,
        )
    except PapermillExecutionError as error:
        where, text = error.cell_index + 1, ANSI.sub("", f"{error.ename}: {error.evalue}")
        return {"status": "FAILED", "reason": f"cell {where} raised {_first_line(text)}", "cell": where}
    except CellTimeoutError:
        cell, limit = CountingClient.cell_number, job["cell_timeout_s"]
        return {
            "status": "TIMEOUT",
            "reason": f"cell {cell} ran longer than its limit of {limit} s",
            "cell": cell,
        }
    except DeadKernelError:
        cell, name = CountingClient.cell_number, _signal_name(WatchedKernel.exit_code)
        return {
            "status": "KILLED",
            "reason": f"the kernel died in cell {cell} ({name})",
            "cell": cell,
            "signal": name,
        }
    except KeyboardInterrupt:
        cell = CountingClient.cell_number
        return {"status": "INTERRUPTED", "reason": f"interrupted in cell {cell}", "cell": cell}
    except Exception as error:
        return {"status": "FAILED", "reason": _first_line(f"{type(error).__name__}: {error}")}
    return _check_every_cell_ran(Path(job["output"]))


def _check_every_cell_ran(output: Path) -> dict[str, Any]:
    """PASSED only when each non-empty code cell has an execution count: a dead kernel leaves none."""
    cells = json.loads(output.read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(cells, 1):
        if cell["cell_type"] == "code" and "".join(cell["source"]).strip() and not cell["execution_count"]:
            return {"status": "FAILED", "reason": f"cell {number} was never executed", "cell": number}
    return {"status": "PASSED", "reason": ""}


def _signal_name(exit_code: int | None) -> str:
    if exit_code is None:
        return "exit code unknown"
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[0][:500]


def main() -> None:
    """Run the job named on the command line and write its outcome beside the notebook."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    outcome = run_job(job)
    (Path(job["output"]).parent / OUTCOME_FILE).write_text(json.dumps(outcome), encoding="utf-8")
    sys.exit(0 if outcome["status"] == "PASSED" else 1)


if __name__ == "__main__":
    main()
