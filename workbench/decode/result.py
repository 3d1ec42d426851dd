"""What a decode returns."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from workbench.decode.acceptance import AcceptanceStats
from workbench.decode.decision import Reason, StepClaim
from workbench.measure.ledger import Ledger


@dataclass(frozen=True)
class ReplaySummary:
    """What the runner says of every step, and what it captured."""

    mode: str
    backend: str | None  # "tape", "cuda"; None in eager mode
    claims: list[StepClaim]
    captures: list[dict[str, Any]]  # one per bucket: see GraphRunner.capture_report
    capture_error: str | None = None

    @property
    def counts(self) -> Counter[Reason]:
        """Steps per reason."""
        return Counter(claim.reason for claim in self.claims)

    @property
    def replayed(self) -> int:
        return sum(claim.replayed is True for claim in self.claims)

    @property
    def eager(self) -> int:
        return sum(claim.replayed is False for claim in self.claims)

    @property
    def unknown(self) -> int:
        return sum(claim.replayed is None for claim in self.claims)

    @property
    def share(self) -> float:
        """Replayed among all steps."""
        return self.replayed / len(self.claims) if self.claims else 0.0

    def sentence(self) -> str:
        """`replayed 1462 / eager 18 (width_mismatch 14, batch_above_largest 4) / unknown 0`."""
        refusals = [f"{r.value} {n}" for r, n in self.counts.most_common() if r is not Reason.REPLAYED]
        why = f" ({', '.join(refusals)})" if refusals else ""
        return f"replayed {self.replayed} / eager {self.eager}{why} / unknown {self.unknown}"


@dataclass(frozen=True)
class DecodeResult:
    """Tokens of each prompt (a stop token is kept as the last), in order, and how they came about."""

    tokens: list[list[int]]
    accept_lengths: list[list[int]]  # per prompt and step, cut at the stop; sum + 1 (the prefill's) = tokens
    ledger: Ledger
    replay: ReplaySummary
    log_lines: list[str]
    acceptance: AcceptanceStats
    seconds: float
    prefill_s: float
    retractions: int = 0
    discarded: int = 0  # request-steps that ran past a stop
    shadow: list[Any] = field(default_factory=list)

    @property
    def mean_accept_length(self) -> float:
        """Tokens per verify pass, bonus included."""
        lengths = [n for per_prompt in self.accept_lengths for n in per_prompt]
        return sum(lengths) / len(lengths) if lengths else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens over the time outside of prefill."""
        decoded = sum(len(t) for t in self.tokens) - len(self.tokens)
        return decoded / max(self.seconds - self.prefill_s, 1e-9)
