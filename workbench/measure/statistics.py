"""Order statistics of latency samples: nothing is assumed about their distribution."""

from collections.abc import Sequence

STABLE_HALF_WIDTH = 0.02  # of the median: below this two variants can be compared


def quantile(samples: Sequence[float], q: float) -> float:
    """The q-quantile by linear interpolation. Raises ValueError for no samples."""
    if not samples:
        raise ValueError("quantile of no samples: measure at least once")
    ordered = sorted(samples)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Bounds of the true median from the binomial law of ranks; None for too few samples (n < 6 at 95 %)."""
    ordered, n = sorted(samples), len(samples)
    outside, all_ways, widest = 0, 2**n, 0  # integers: a float overflows from about a thousand samples on
    ways = 1  # n over rank
    for rank in range(n // 2):
        outside += 2 * ways  # the true median lies outside x[rank] .. x[n-1-rank]
        if outside / all_ways > 1 - confidence:
            break
        ways = ways * (n - rank) // (rank + 1)
        widest = rank + 1
    return (ordered[widest - 1], ordered[n - widest]) if widest else None


def is_stable(samples: Sequence[float]) -> bool | None:
    """True when the median is known to within 2 %; None when too few samples say anything."""
    interval = median_interval(samples)
    if interval is None:
        return None
    return (interval[1] - interval[0]) / 2 <= STABLE_HALF_WIDTH * quantile(samples, 0.5)
