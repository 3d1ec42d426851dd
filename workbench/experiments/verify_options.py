"""How verify-attention cases are timed."""

from dataclasses import dataclass

from workbench.measure import timing


@dataclass(frozen=True)
class BenchOptions:
    """How every case is timed."""

    mode: timing.Mode = "graph"
    l2: timing.L2 = "cold"
    n: int = 20
    budget_s: float = 3.0  # per case, all variants together
    utilisation: bool = False  # keep each variant busy for half a second and read GPM
    timed: bool = True
    seed: int = 0
    experiment: str = "verify_variants"
