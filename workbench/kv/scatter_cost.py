"""What one gap and one backward step cost: a regression of kernel latency on the layout score."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from workbench.kv.fragmentation import LayoutScore

CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class ScatterCost:
    """Latency of one layer = base + us_per_gap x gaps + us_per_descent x descents; bootstrap intervals."""

    base_us: float
    us_per_gap: float
    us_per_descent: float
    gap_interval_us: tuple[float, float]
    descent_interval_us: tuple[float, float]
    noise_us: float  # difference between two measurements of the same layout
    effect_us: float  # what the most scattered layout of the fit costs above a contiguous one, by the fit
    effect_interval_us: tuple[float, float]
    layouts: int
    draws: np.ndarray = field(default_factory=lambda: np.empty((0, 2)), compare=False, repr=False)

    @property
    def above_noise(self) -> bool:
        """With confidence, the most scattered layout costs more than one layout differs from itself."""
        return self.effect_interval_us[0] > self.noise_us

    def extra_us(self, score: LayoutScore) -> float:
        """Latency of one layer above the base, never negative."""
        return max(0.0, self.us_per_gap * score.gaps + self.us_per_descent * score.descents)

    def saving_interval_us(self, before: LayoutScore, after: LayoutScore) -> tuple[float, float] | None:
        """95 % interval of what one layer saves between two layouts; None for a cost without draws."""
        if not len(self.draws):
            return None
        change = np.array([before.gaps - after.gaps, before.descents - after.descents])
        return _interval(self.draws @ change)


def fit_scatter_cost(
    scores: Sequence[LayoutScore],
    latency_us: Sequence[float],
    *,
    noise_us: float,
    seed: int = 0,
) -> ScatterCost:
    """Least squares over layouts of one context, intervals from resampling layouts.

    A backward step is also a gap: `us_per_descent` comes on top. ValueError below 6 layouts.
    """
    if len(scores) != len(latency_us) or len(scores) < 6:
        raise ValueError(f"{len(scores)} layouts and {len(latency_us)} latencies: fit at least 6 pairs")
    design = np.array([[1.0, score.gaps, score.descents] for score in scores])
    latency = np.asarray(latency_us, dtype=np.float64)
    scale = np.maximum(design.max(0), 1.0)
    best = _solve(design / scale, latency)
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(latency), (RESAMPLES, len(latency)))
    draws = np.stack([_solve(design[pick] / scale, latency[pick]) for pick in picks])
    scatter = [score.gaps * score.span_ratio for score in scores]  # a reversed layout is not scattered
    worst = design[int(np.argmax(scatter)), 1:] / scale[1:]
    slopes, slope_draws = best / scale, draws / scale
    return ScatterCost(
        base_us=float(slopes[0]),
        us_per_gap=float(slopes[1]),
        us_per_descent=float(slopes[2]),
        gap_interval_us=_interval(slope_draws[:, 1]),
        descent_interval_us=_interval(slope_draws[:, 2]),
        noise_us=noise_us,
        effect_us=float(worst @ best[1:]),
        effect_interval_us=_interval(draws[:, 1:] @ worst),
        layouts=len(latency),
        draws=slope_draws[:, 1:],
    )


def _solve(design: np.ndarray, latency: np.ndarray) -> np.ndarray:  # [3]
    return np.linalg.lstsq(design, latency, rcond=None)[0]


def _interval(draws: np.ndarray) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    return float(np.quantile(draws, tail)), float(np.quantile(draws, 1 - tail))
