"""Cells, parameters and a progress recorder for notebooks that exist only in tests."""

from pydantic import BaseModel, ConfigDict, Field

from workbench.runs.manifest import RunManifest

ROWS = """
from workbench.report import notebook
from workbench.rows import Row
import types
def run(params, step): step('count'); return [Row(case_id='a', experiment='e', variant='v', target='cpu',
    origin='measured', status='PASSED', metrics={'x': x})]
rows = notebook.run(types.SimpleNamespace(__name__='e', run=run), None)
notebook.show_findings(['x is ' + str(x)])
"""


class TinyParams(BaseModel):
    model_config = ConfigDict(extra="forbid")
    target: str = Field("cpu", description="target")
    seed: int = Field(0, description="seed")
    x: int = Field(1, description="a number")


class Recorder:
    """Keeps what a batch reports."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def begin(self, name: str) -> None:
        self.seen.append(("begin", name))

    def step(self, name: str) -> None:
        self.seen.append(("step", name))

    def finish(self, manifest: RunManifest) -> None:
        self.seen.append(("finish", manifest.status.value))
