"""Request workloads: arrivals, lengths and the decode step, read from data/workloads/*.toml."""

import tomllib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from workbench.targets import ROOT

WORKLOADS_DIR = ROOT / "data" / "workloads"


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts: one value, or log-normal around a median and cut at `max`."""

    kind: Literal["fixed", "lognormal"]
    value: int = 0
    median: float = 0.0
    sigma: float = 0.0
    max: int = 0

    def draw(self, rng: np.random.Generator) -> int:
        """One length, at least 1."""
        if self.kind == "fixed":
            return self.value
        return int(np.clip(round(self.median * np.exp(self.sigma * rng.standard_normal())), 1, self.max))


@dataclass(frozen=True)
class Workload:
    """What the churn replays. A step hands out `rows` slots per request and keeps `accept_length` of them."""

    name: str
    title: str
    origin: str
    arrival: Literal["closed", "poisson"]  # closed: a finished request is replaced at once
    max_running: int
    requests_per_step: float
    prompt_tokens: Lengths
    output_tokens: Lengths
    shape: Literal["plain", "chain", "tree"]  # accepted rows: the only one, the first ones, the root and any
    rows: int
    accept_length: float
    accept_spread: Literal["fixed", "geometric"]

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.rows < 1:
            raise ValueError(f"workload {self.name!r}: max_running and rows must be at least 1")
        if not 1 <= self.accept_length <= self.rows:
            raise ValueError(
                f"workload {self.name!r}: accept_length={self.accept_length} is not in 1..{self.rows} rows"
            )
        if self.arrival == "poisson" and self.requests_per_step <= 0:
            raise ValueError(f"workload {self.name!r}: poisson arrivals need requests_per_step > 0")

    def draw_accepts(self, count: int, rng: np.random.Generator) -> np.ndarray:  # [count]
        """Accept lengths of one step, bonus row included."""
        if self.accept_spread == "fixed":
            return np.full(count, round(self.accept_length))
        return np.minimum(rng.geometric(1 / self.accept_length, count), self.rows)


def names() -> list[str]:
    """Every preset."""
    return sorted(path.stem for path in WORKLOADS_DIR.glob("*.toml"))


def load(name: str) -> Workload:
    """The preset called `name`. ValueError lists the known ones or names what the file lacks."""
    if name not in names():
        known = ", ".join(names())
        raise ValueError(
            f"unknown workload {name!r}: choose one of {known}, or add data/workloads/{name}.toml"
        )
    data: dict[str, Any] = tomllib.loads((WORKLOADS_DIR / f"{name}.toml").read_text())
    try:
        arrival, step = data["arrival"], data["step"]
        return Workload(
            name=name,
            title=data["title"],
            origin=data["origin"],
            arrival=arrival["kind"],
            max_running=arrival["max_running"],
            requests_per_step=arrival.get("requests_per_step", 0.0),
            prompt_tokens=Lengths(**data["prompt_tokens"]),
            output_tokens=Lengths(**data["output_tokens"]),
            **step,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"data/workloads/{name}.toml: {error}") from error
