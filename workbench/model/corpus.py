"""The training text: this Python's standard-library sources, with one file in twenty held out."""

import hashlib
import platform
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from workbench.model.pair import END

LICENCE = "Python Software Foundation License Version 2 (the sources; they are not redistributed here)"
SEPARATOR = 0  # no source file holds a NUL byte; stands for END in the byte tensor
LARGEST_FILE_BYTES = 400_000  # larger ones are generated tables
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Corpus:
    """Files by relative path with their SHA-256; the text itself as bytes."""

    python: str
    files: dict[str, str]
    held_out: tuple[str, ...]
    texts: dict[str, bytes] = field(repr=False)

    @property
    def list_sha256(self) -> str:
        """Hash of the sorted `sha256  path` list, as sha256sum would print it."""
        lines = "".join(f"{digest}  {path}\n" for path, digest in sorted(self.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def joined(self, *, held_out: bool) -> Tensor:
        """All training (or held-out) files as one uint8 tensor, separated by NUL."""
        chosen = set(self.held_out)
        parts = [text for path, text in sorted(self.texts.items()) if (path in chosen) == held_out]
        blob = b"\0" + b"\0".join(parts) + b"\0"
        return torch.frombuffer(bytearray(blob), dtype=torch.uint8)

    def manifest(self) -> dict[str, object]:
        """What a reader needs to rebuild or check the corpus."""
        return {
            "source": "Python standard library, *.py below sysconfig.get_path('stdlib')",
            "licence": LICENCE,
            "python": self.python,
            "list_sha256": self.list_sha256,
            "held_out": list(self.held_out),
            "files": dict(sorted(self.files.items())),
        }


def is_held_out(path: str) -> bool:
    """By hash of the path: the same files on every machine and version."""
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def read_corpus(root: Path | None = None, python: str | None = None) -> Corpus:
    """Every readable source file below `root`, the standard library of Python version `python`.

    Both default to the running Python. Raises ValueError when there are too few files to train on.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    texts: dict[str, bytes] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if {"site-packages", "dist-packages", "__pycache__"} & set(relative.parts):
            continue
        data = path.read_bytes()
        if 0 < len(data) <= LARGEST_FILE_BYTES and b"\0" not in data and is_utf8(data):
            texts[relative.as_posix()] = data
    held_out = tuple(path for path in texts if is_held_out(path))
    if not held_out or len(held_out) == len(texts):
        raise ValueError(
            f"{root} holds {len(texts)} usable source files: give the folder of a standard library"
        )
    files = {path: hashlib.sha256(data).hexdigest() for path, data in texts.items()}
    return Corpus(python or platform.python_version(), files, held_out, texts)


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def to_tokens(window: Tensor) -> Tensor:
    """int64 token ids of a uint8 window; separators become END."""
    tokens = window.long()
    return tokens.masked_fill(tokens == SEPARATOR, END)


def sample_windows(data: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """`count` random windows [count, length] of token ids, drawn on the data's device."""
    starts = torch.randint(0, len(data) - length, (count, 1), generator=generator, device=data.device)
    return to_tokens(data[starts + torch.arange(length, device=data.device)])
