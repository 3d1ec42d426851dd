"""Where a result comes from: code, notebook, kernels, machine, software, environment and command."""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from workbench.targets import ROOT

TIMER_SOURCES = ("workbench/measure/timing.py", "workbench/measure/statistics.py")
KERNEL_PATTERNS = (
    "kernels/**/*.cu",
    "kernels/**/*.cuh",
    "workbench/attention/*.py",
    "workbench/tree/*.py",
    "workbench/kv/*.py",
)
SOFTWARE = (
    "torch",
    "triton",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "numpy",
    "plotly",
    "papermill",
    "nbclient",
    "nbconvert",
    "ipykernel",
    "pyarrow",
    "duckdb",
    "pydantic",
    "safetensors",
    "transformers",
    "nvidia-ml-py",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc",
)
ENVIRONMENT_PREFIXES = (
    "OMP_",
    "MKL_",
    "TRITON_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_",
    "CUPY_",
    "NCCL_",
    "WORKBENCH_",
)
COMMIT_VARIABLE = "WORKBENCH_COMMIT"
MAX_UNTRACKED_BYTES = 200_000  # larger new files are named in the patch, not copied into it


def sha256(data: bytes | str) -> str:
    """Hexadecimal digest; text is encoded as UTF-8."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def file_sha256(path: Path) -> str:
    """Digest of a file's bytes."""
    return sha256(path.read_bytes())


def code_state(root: Path = ROOT) -> dict[str, Any]:
    """Commit, branch, dirty flag and patch hash of the checkout.

    A copy without git has the commit that WORKBENCH_COMMIT states (else ""), and a digest of its sources by
    which that statement can be checked.
    """
    sha = _git(root, "rev-parse", "HEAD").strip()
    patch = source_patch(root) if sha else ""
    return {
        "sha": sha or os.environ.get(COMMIT_VARIABLE, ""),
        "branch": _git(root, "rev-parse", "--abbrev-ref", "HEAD").strip() if sha else "",
        "dirty": bool(patch),
        "patch_sha256": sha256(patch) if patch else "",
        "package_sha256": "" if sha else package_hash(root),
    }


def commit_label(code: dict[str, Any]) -> str:
    """`<sha7>`, `<sha7>-dirty`, or `nogit`: the way a batch folder names its code."""
    if not code["sha"]:
        return "nogit"
    return code["sha"][:7] + ("-dirty" if code["dirty"] else "")


def source_patch(root: Path = ROOT) -> str:
    """`git diff HEAD` plus new files that git does not ignore; "" for a clean checkout."""
    changed = _git(root, "diff", "HEAD", "--binary")
    return changed + "".join(_new_file(root, name) for name in _untracked(root))


def package_hash(root: Path = ROOT) -> str:
    """One digest over every source of the package, for a copy without git."""
    parts = [
        f"{path.relative_to(root)} {file_sha256(path)}" for path in sorted(root.glob("workbench/**/*.py"))
    ]
    return sha256("\n".join(parts))


def kernel_hashes(root: Path = ROOT) -> dict[str, str]:
    """Path -> digest of every source that becomes device code."""
    paths = sorted(path for pattern in KERNEL_PATTERNS for path in root.glob(pattern))
    return {str(path.relative_to(root)): file_sha256(path) for path in paths}


def timer_version(root: Path = ROOT) -> str:
    """Digest of the code that takes times; results of two versions are not compared silently."""
    present = [root / name for name in TIMER_SOURCES if (root / name).is_file()]
    return sha256("".join(file_sha256(path) for path in present))[:12] if present else ""


def software() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result, read without importing them."""
    found = {"python": platform.python_version()}
    for name in SOFTWARE:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables with a known prefix; nothing else is recorded, and no path of a run folder."""
    kept = {key: value for key, value in sorted(variables.items()) if key.startswith(ENVIRONMENT_PREFIXES)}
    return {key: value for key, value in kept.items() if not key.startswith("WORKBENCH_RUN_")}


def repro_command(notebook: str, target: str, parameters: dict[str, Any]) -> str:
    """One line that redoes the run; parameters are the ones that differ from the defaults."""
    words = ["workbench", "run", notebook, "--target", target]
    for name, value in parameters.items():
        words += ["-p", f"{name}={value if isinstance(value, str) else _json(value)}"]
    return shlex.join(words)


def lock_sha256(root: Path = ROOT) -> str:
    """Digest of constraints.txt."""
    path = root / "constraints.txt"
    return file_sha256(path) if path.is_file() else ""


def argv() -> list[str]:
    """This process's command line, the program by name only."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def _json(value: Any) -> str:
    import json

    return json.dumps(value, allow_nan=False)


def _git(root: Path, *words: str) -> str:
    """Output of a git command, "" where git or the repository is absent."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, timeout=60, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def _untracked(root: Path) -> Sequence[str]:
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return [name for name in listed.split("\0") if name]


def _new_file(root: Path, name: str) -> str:
    """A new file as a patch hunk, or one line with its digest when it is large or not text."""
    path = root / name
    if not path.is_file():
        return f"# new, not a plain file: {name}\n"
    data = path.read_bytes()
    if len(data) > MAX_UNTRACKED_BYTES or b"\0" in data:
        return f"# new file {name}: {len(data)} bytes, sha256 {sha256(data)}\n"
    lines = data.decode("utf-8", "replace").splitlines()
    head = f"diff --git a/{name} b/{name}\nnew file mode 100644\n--- /dev/null\n+++ b/{name}\n"
    return head + f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)
