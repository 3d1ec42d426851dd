"""Live progress of a batch: which notebook, which named step, how long so far."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from workbench.rows import RunStatus
from workbench.runs.manifest import RunManifest

STYLES = {RunStatus.PASSED: "green", RunStatus.SKIPPED: "yellow"}


class LiveProgress:
    """A line that moves in a terminal; one plain line per step where the output is a file or a pipe."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=False, file=sys.stdout)
        self.total, self.number, self.name, self.current = total, 0, "", ""
        self.batch_started = self.run_started = time.monotonic()
        self.spinner = Spinner("dots")
        self.live = Live(self, console=self.console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "LiveProgress":
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Take the moving line away; calling it twice is harmless."""
        if self.live.is_started:
            self.live.stop()

    def __rich__(self) -> Text | Spinner:
        if not self.name:
            return Text("starting")
        now = time.monotonic()
        self.spinner.update(
            text=f"[{self.number}/{self.total}] {self.name}: {self.current}"
            f"   {now - self.run_started:.0f} s, batch {now - self.batch_started:.0f} s"
        )
        return self.spinner

    def begin(self, name: str) -> None:
        """A notebook starts."""
        self.number, self.name, self.current = self.number + 1, name, "starting its kernel"
        self.run_started = time.monotonic()
        self._say(self.current)

    def step(self, name: str) -> None:
        """The running notebook entered a named step."""
        self.current = name
        self._say(name)

    def finish(self, manifest: RunManifest) -> None:
        """A run is final; its line stays on the screen."""
        if manifest.status is RunStatus.SKIPPED:
            self.number += 1
        line = Text(f"{manifest.status.value:<12}", STYLES.get(manifest.status, "bold red"))
        name = manifest.notebook.removesuffix(".ipynb")
        line.append(f"{name:<24}{manifest.elapsed_s or 0:7.1f} s  {manifest.reason}", "")
        self.console.print(line, soft_wrap=True)

    def _say(self, text: str) -> None:
        if not self.console.is_terminal:
            elapsed = f"[{time.monotonic() - self.batch_started:6.1f} s]"
            line = f"{elapsed} {self.number}/{self.total} {self.name}: {text}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
            self.console.file.flush()
