"""Large logs: read in pieces, only the lines an engine's reader could use are kept."""

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from workbench.diagnose import sglang, vllm
from workbench.diagnose.lines import ANSI, GZIP, MAX_LINE, UTF16_MARKS, looks_binary

STREAM_ABOVE = 8 << 20  # bytes; smaller files are read whole
STREAM_PACKED_ABOVE = 1 << 20  # of a gzip archive
MAX_BYTES = 4 << 30
PIECE = 256 << 10
JSON_HEAD = re.compile(rb"\s*(?:\{|\[\s*[\[{\"])")  # a log may start with "[2026-"
BREAKS = re.compile(r"\r\n|\n|\r")
WRAPPED = ("iter = ", "iteration counter")  # records over several lines: nothing may be left out
KEPT_TAIL = 4  # last lines, which show whether the file breaks off
Progress = Callable[[Path, int, int], None]  # file, bytes done, bytes in all


def is_large_text(path: Path) -> bool:
    """Whether the file is text that is better read in pieces."""
    size = path.stat().st_size
    if size <= min(STREAM_ABOVE, STREAM_PACKED_ABOVE):
        return False
    with path.open("rb") as raw:
        packed = raw.read(2) == GZIP
    if size <= (STREAM_PACKED_ABOVE if packed else STREAM_ABOVE):
        return False
    try:
        with _open(path, packed) as stream:
            head = stream.read(4096)
    except (OSError, EOFError, zlib.error):
        return False
    return not (JSON_HEAD.match(head) or looks_binary(head) or head[:2] in UTF16_MARKS)


def read_engine_lines(path: Path, progress: Progress | None) -> tuple[list[str], list[str]] | None:
    """(lines an engine's reader could use, warnings); None when the file must be read whole."""
    kept: list[str] = []
    tail: list[str] = []
    warnings: list[str] = []
    is_own = False
    for line in _lines(path, warnings, progress):
        low = line.lower()
        if any(word in low for word in WRAPPED):
            return None
        is_head = not is_own and bool(vllm.OWN.search(line))
        is_own = is_own or is_head
        if is_head or sglang.may_matter(low) or vllm.may_matter(low):
            kept += [line]
            tail.clear()
        elif line.strip():
            tail = [*tail[1 - KEPT_TAIL :], line]
    return kept + tail, warnings


def _open(path: Path, packed: bool) -> BinaryIO:
    return gzip.open(path, "rb") if packed else path.open("rb")  # type: ignore[return-value]


def _lines(path: Path, warnings: list[str], progress: Progress | None) -> Iterator[str]:
    """Lines without colour codes, cut to a sane length."""
    rest = ""
    for piece in _pieces(path, warnings, progress):
        text = rest + piece.decode("utf-8", "replace")
        held = text[-1:] if text.endswith("\r") else ""  # its \n may come next
        *lines, rest = BREAKS.split(text[: len(text) - len(held)])
        rest = rest[:MAX_LINE] + held
        for line in lines:
            yield (ANSI.sub("", line) if "\x1b" in line else line)[:MAX_LINE]
    for line in BREAKS.split(rest):
        yield ANSI.sub("", line)[:MAX_LINE]


def _pieces(path: Path, warnings: list[str], progress: Progress | None) -> Iterator[bytes]:
    """Bytes, unpacked, cut at line ends where there are any, so that no character is split."""
    total, done, rest = path.stat().st_size, 0, b""
    with path.open("rb") as raw:
        packed = raw.read(2) == GZIP
        raw.seek(0)
        stream = gzip.GzipFile(fileobj=raw) if packed else raw
        while True:
            try:
                piece = stream.read(PIECE)
            except EOFError:
                warnings.append("the gzip archive is cut: only its first part was read")
                break
            except (OSError, zlib.error):
                if not packed:
                    raise
                warnings.append("the gzip archive is damaged: only its first part was read")
                break
            done += len(piece)
            if not piece or done > MAX_BYTES:
                warnings += [f"only the first {MAX_BYTES >> 30} GiB were read"] * bool(piece)
                break
            if progress:
                progress(path, raw.tell(), total)
            cut = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1 or len(piece)
            yield rest + piece[:cut]
            rest = piece[cut:]
    yield rest
