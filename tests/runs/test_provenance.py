"""The manifest can rebuild its code: commit, dirty flag, and a patch that applies."""

import subprocess
from pathlib import Path

import pytest

from workbench.runs import provenance


def git(root: Path, *words: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(
        ["git", "-C", str(root), *identity, *words], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    root.mkdir()
    git(root, "init", "-q")
    (root / "a.py").write_text("one = 1\n")
    (root / ".gitignore").write_text("ignored/\n")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    return root


def test_clean_and_dirty(checkout: Path) -> None:
    clean = provenance.code_state(checkout)
    assert clean["sha"] == git(checkout, "rev-parse", "HEAD").strip() and not clean["dirty"]
    assert provenance.commit_label(clean) == clean["sha"][:7]
    (checkout / "ignored").mkdir()
    (checkout / "ignored" / "x").write_text("x")
    assert not provenance.code_state(checkout)["dirty"]
    (checkout / "a.py").write_text("one = 2\n")
    dirty = provenance.code_state(checkout)
    assert dirty["dirty"] and provenance.commit_label(dirty) == clean["sha"][:7] + "-dirty"
    assert dirty["patch_sha256"] == provenance.sha256(provenance.source_patch(checkout))


def test_patch_rebuilds_the_tree(checkout: Path, tmp_path: Path) -> None:
    (checkout / "a.py").write_text("one = 2\n")
    (checkout / "new.py").write_text("two = 2\nthree = 3\n")
    (checkout / "data.bin").write_bytes(b"\0\1")
    patch = tmp_path / "source.patch"
    patch.write_text(provenance.source_patch(checkout))
    assert "# new file data.bin: 2 bytes, sha256" in patch.read_text()
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", str(checkout), str(copy))
    git(copy, "apply", str(patch))
    for name in ("a.py", "new.py"):
        assert (copy / name).read_text() == (checkout / name).read_text()


def test_copy_without_git_states_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "workbench").mkdir()
    (tmp_path / "workbench" / "a.py").write_text("one = 1\n")
    monkeypatch.delenv("WORKBENCH_COMMIT", raising=False)
    code = provenance.code_state(tmp_path)
    assert provenance.commit_label(code) == "nogit" and code["package_sha256"]
    monkeypatch.setenv("WORKBENCH_COMMIT", "0123456789abcdef")
    assert provenance.commit_label(provenance.code_state(tmp_path)) == "0123456"
    (tmp_path / "workbench" / "a.py").write_text("one = 2\n")
    assert provenance.code_state(tmp_path)["package_sha256"] != code["package_sha256"]


def test_only_known_variables_are_recorded() -> None:
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0", "API_TOKEN": "secret", "HOME": "/x"}
    variables |= {"WORKBENCH_RUN_DIR": "/x/y"}
    assert provenance.environment(variables) == {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "1"}


def test_repro_command_survives_a_shell() -> None:
    command = provenance.repro_command("20_x", "cpu", {"splits": [1, 2], "label": "a b"})
    assert command == "workbench run 20_x --target cpu -p 'splits=[1, 2]' -p 'label=a b'"
