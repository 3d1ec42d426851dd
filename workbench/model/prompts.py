"""Prompts for decode experiments, from data/prompts."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from workbench.targets import ROOT

PROMPTS_FILE = ROOT / "data" / "prompts" / "prompts.toml"


@dataclass(frozen=True)
class Prompt:
    name: str
    kind: str  # "code" or "prose"
    text: str


def load_prompts(kind: str | None = None, path: Path = PROMPTS_FILE) -> list[Prompt]:
    """All prompts, or those of one kind. Raises ValueError for a kind that does not occur."""
    entries = tomllib.loads(path.read_text())["prompt"]
    prompts = [Prompt(e["name"], e["kind"], e["text"].removesuffix("\n")) for e in entries]
    kinds = sorted({prompt.kind for prompt in prompts})
    if kind is not None and kind not in kinds:
        raise ValueError(f"prompt kind {kind!r}: choose one of {', '.join(kinds)}")
    return [prompt for prompt in prompts if kind in (None, prompt.kind)]
