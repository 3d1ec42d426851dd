"""Text of logs as it really arrives: any encoding, colour codes, progress bars, compression, huge files."""

import gzip
import re
import zlib
from pathlib import Path

MAX_BYTES = 256 << 20
MAX_LINE = 20_000  # characters; a longer line is data, not a log line
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
CONTROLS = bytes(set(range(32)) - set(b"\b\t\n\v\f\r\x1b"))
GZIP = b"\x1f\x8b"
FORMATS = {
    b"PK\x03\x04": "a zip archive: unpack it and give the files inside",
    b"\x28\xb5\x2f\xfd": "zstd data: unpack it with zstd -d",
    b"\xfd7zXZ": "xz data: unpack it with xz -d",
    b"BZh": "bzip2 data: unpack it with bzip2 -d",
    b"PAR1": "a Parquet file: its tables are not read here",
    GZIP: "a gzip archive inside another: unpack it",
}
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def read_bytes(path: Path) -> tuple[bytes, list[str]]:
    """The first 256 MiB of a file, unpacked when gzipped, and warnings about what is missing."""
    with path.open("rb") as stream:
        raw = stream.read(MAX_BYTES + 1)
    if raw[:2] == GZIP:
        return _unpack(raw)
    if path.suffix == ".gz" and raw:
        return raw[:MAX_BYTES], ["named .gz but no gzip archive: read as it is"]
    if len(raw) > MAX_BYTES:
        return raw[:MAX_BYTES], [f"only the first {MAX_BYTES >> 20} MiB were read"]
    return raw, []


def _unpack(raw: bytes) -> tuple[bytes, list[str]]:
    """Gunzip up to the limit; a damaged or cut archive gives what can be read."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        data = unpacker.decompress(raw, MAX_BYTES)
    except zlib.error:
        return _unpack_piecewise(raw), ["the gzip archive is damaged: only its first part was read"]
    if unpacker.unconsumed_tail:
        return data, [f"only the first {MAX_BYTES >> 20} MiB were read"]
    if unpacker.unused_data[:2] == GZIP:
        try:
            return gzip.decompress(raw)[:MAX_BYTES], []
        except (OSError, EOFError, zlib.error):
            return data, ["the gzip archive is damaged: only its first part was read"]
    return data, [] if unpacker.eof else ["the gzip archive is cut: only its first part was read"]


def _unpack_piecewise(raw: bytes) -> bytes:
    unpacker, parts = zlib.decompressobj(wbits=31), []
    try:
        for start in range(0, len(raw), 4096):
            parts.append(unpacker.decompress(raw[start : start + 4096]))
    except zlib.error:
        pass  # the parts before the damage are what can be read; the caller warns
    return b"".join(parts)[:MAX_BYTES]


def decode_text(raw: bytes) -> str:
    """Text without colour codes; bytes that are no text become replacement characters."""
    if raw[:2] in UTF16_MARKS:
        return ANSI.sub("", raw.decode("utf-16", "replace"))
    return ANSI.sub("", raw.decode("utf-8-sig", "replace"))


def split_lines(text: str) -> list[str]:
    """Lines at \\n, \\r\\n and the \\r of progress bars, cut to a sane length."""
    return [line[:MAX_LINE] for line in re.split(r"\r\n|\n|\r", text)]


def looks_binary(raw: bytes) -> bool:
    """True for data no text reader should try: zeros, or control characters that no log holds."""
    head = raw[:4096]
    controls = len(head) - len(head.translate(None, CONTROLS))
    return raw[:2] not in UTF16_MARKS and (
        head.count(0) > len(head) // 100 or controls > max(2, len(head) // 33)
    )


def describe_content(raw: bytes) -> str:
    """What a file is that no reader recognises, and what would help."""
    if not raw.strip():
        return "the file is empty" if not raw else "the file holds nothing but white space"
    for magic, text in FORMATS.items():
        if raw.startswith(magic):
            return text
    if looks_binary(raw):
        return "binary data: export it as text, SQLite or JSON first"
    lines = raw.count(b"\n") + (not raw.endswith(b"\n"))
    return f"{lines:,} lines of text, none of them of an engine, profiler or monitor that is known here"
