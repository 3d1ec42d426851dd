"""A batch without most of its reports, small enough to be committed."""

from collections.abc import Collection
from pathlib import Path

from workbench.report.index import render_index
from workbench.runs.manifest import REPORT_FILE, run_folders


def slim(batch: Path, keep: Collection[str] = ()) -> list[Path]:
    """Delete the reports of a batch except those of the notebooks in `keep` ("60"); returns what is gone.

    A report holds the whole plotting library and can be rendered again from the notebook beside it.
    """
    folders = run_folders(batch)
    unknown = [name for name in keep if not any(folder.name.startswith(name) for folder in folders)]
    if unknown:
        known = ", ".join(folder.name for folder in folders)
        raise ValueError(f"no run {unknown[0]!r} in {batch}: choose from {known}")
    reports = [f / REPORT_FILE for f in folders if not any(f.name.startswith(name) for name in keep)]
    gone = [path for path in reports if path.is_file()]
    for path in gone:
        path.unlink()
    render_index(batch)
    return gone
