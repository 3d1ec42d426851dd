"""Text in and out: the checkpoint's own tokenizer, or plain bytes for the tiny pair."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from workbench.model.config import TargetConfig

BYTE_VALUES = 256


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(frozen=True)
class ByteTokenizer:
    """One token per UTF-8 byte, with the begin-of-text token in front; other ids decode to nothing."""

    bos_token_id: int | None = None

    def encode(self, text: str) -> list[int]:
        front = [] if self.bos_token_id is None else [self.bos_token_id]
        return front + list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(t for t in token_ids if 0 <= t < BYTE_VALUES).decode(errors="replace")


class CheckpointTokenizer:
    """A tokenizer.json, through the `tokenizers` library."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as FileTokenizer

        try:
            self.tokenizer: Any = FileTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise ValueError(f"{path} is not a readable tokenizer: {error}") from None

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids)


def load_tokenizer(folder: Path, config: TargetConfig, kind: str = "auto") -> Tokenizer:
    """The tokenizer of a model folder. `kind="bytes"` feeds bytes to any model with at least 256 tokens.

    Raises ValueError when the folder has none, or when its vocabulary is too small for bytes.
    """
    if kind not in ("auto", "bytes"):
        raise ValueError(f"tokenizer {kind!r}: choose auto or bytes")
    path = folder / "tokenizer.json"
    if kind == "auto" and path.is_file():
        return CheckpointTokenizer(path)
    is_byte_model = config.mask_token_id == BYTE_VALUES
    if kind == "auto" and not is_byte_model:
        raise ValueError(f"{folder} has no tokenizer.json: copy the checkpoint's, or use --tokenizer bytes")
    if config.vocab_size < BYTE_VALUES:
        raise ValueError(
            f"{folder} has a vocabulary of {config.vocab_size}: bytes need at least {BYTE_VALUES}"
        )
    return ByteTokenizer(config.bos_token_id if is_byte_model else None)


@dataclass
class TextStream:
    """Turns tokens that arrive a few at a time into text, holding back a character until it is whole."""

    tokenizer: Tokenizer
    pending: list[int] = field(default_factory=list)
    shown: str = ""

    def push(self, token_ids: list[int]) -> str:
        """The text that these tokens complete, maybe empty."""
        self.pending += token_ids
        text = self.tokenizer.decode(self.pending)
        whole = text.rstrip("\ufffd") if len(text) - len(text.rstrip("\ufffd")) <= 1 else text
        fresh = whole[len(self.shown) :]
        self.shown = max(self.shown, whole, key=len)
        if fresh.endswith("\n") and whole == text:
            self.pending, self.shown = [], ""
        return fresh
