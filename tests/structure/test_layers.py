"""Imports point to the left of the reading order, and importing the package costs nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "workbench"
ORDER = [
    *("targets", "shapes", "rows", "rows_file", "measure", "attention", "kv", "tree", "model"),
    *("decode", "diagnose", "experiments", "runs", "report", "cli"),
]
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def layer_of(path: Path) -> int:
    return ORDER.index(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))


def imported_layers(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("workbench.")}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_left(path: Path) -> None:
    wrong = {name for name in imported_layers(path) if name in ORDER and ORDER.index(name) > layer_of(path)}
    assert not wrong, (
        f"{path.relative_to(ROOT)} imports {sorted(wrong)}, which are to its right in {' <- '.join(ORDER)}"
    )


def test_import_is_light() -> None:
    code = "import sys, workbench; print(sorted({'torch', 'triton', 'cupy', 'numpy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
    cumulative_us = int(done.stderr.splitlines()[-1].split("|")[1])
    assert done.stderr.splitlines()[-1].strip().endswith("workbench")
    assert cumulative_us < 300_000


def test_command_line_starts_without_torch() -> None:
    code = (
        "import sys; from workbench.cli import load_commands; load_commands();"
        "print(sorted({'torch', 'triton', 'cupy', 'transformers', 'papermill'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]" and not done.stderr


def test_device_code_folder_hides_no_package() -> None:
    """`kernels` must stay the name of another project's package, also from the repository root."""
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s and s.origin)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert str(ROOT) not in done.stdout
    assert not list((ROOT / "kernels").rglob("__init__.py"))
