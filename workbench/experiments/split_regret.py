"""What "auto" loses against the best split count of a sweep, and when that is only noise."""

from dataclasses import dataclass

from workbench.experiments.verify_variants import differ
from workbench.rows import Row


@dataclass(frozen=True)
class Regret:
    """ "auto" against the fastest plan of its sweep.

    `twins`: rows of the sweep whose count resolves to auto's very plan.
    """

    auto: Row
    best: Row
    twins: tuple[Row, ...] = ()

    @property
    def share(self) -> float:
        """auto's median over the best, minus one; not below 0."""
        return max(0.0, median_us(self.auto) / median_us(self.best) - 1)

    @property
    def lead(self) -> float:
        """What the best of the sweep takes longer than auto, as a share; not below 0."""
        return max(0.0, median_us(self.best) / median_us(self.auto) - 1)

    @property
    def is_same_plan(self) -> bool:
        return plan_of(self.auto) == plan_of(self.best)

    @property
    def is_told(self) -> bool:
        """False when two plans were timed and one has no 95 % interval: fewer than 6 samples give none."""
        return self.is_same_plan or all(map(has_interval, (self.auto, self.best, *self.twins)))

    @property
    def is_ahead(self) -> bool:
        """Whether auto's plan, which the sweep does not have, is faster than all of it, intervals apart."""
        return self.lead > 0 and not self.twins and differ(self.auto, self.best)

    @property
    def is_noise(self) -> bool:
        """True unless auto is slower, and every measurement of its plan has a 95 % interval of its own."""
        is_apart = all(differ(row, self.best) for row in (self.auto, *self.twins))
        return self.is_same_plan or self.share == 0 or not is_apart


def has_interval(row: Row) -> bool:
    """Whether the median of a row has a 95 % interval."""
    return all(isinstance(row.metrics.get(f"ci95_{edge}_us"), float) for edge in ("low", "high"))


def plan_of(row: Row) -> tuple[object, object]:
    """What tells two plans of one variant and shape apart: the splits it resolved to, and its workspace."""
    return row.metrics.get("plan_nsplit"), row.metrics.get("workspace_bytes")


def regrets(rows: list[Row]) -> list[Regret]:
    """Per variant and shape, how much slower "auto" is than the best count measured."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.timing is not None:
            groups.setdefault((row.variant, str(row.axes["case"])), []).append(row)
    found = []
    for group in groups.values():
        auto = [row for row in group if row.axes["nsplit"] == "auto"]
        fixed = [row for row in group if row.axes["nsplit"] != "auto"]
        if auto and fixed:
            best = min(fixed, key=median_us)
            twins = tuple(row for row in fixed if plan_of(row) == plan_of(auto[0]))
            found.append(Regret(auto[0], best, twins))
    return found


def median_us(row: Row) -> float:
    """Of a row that was timed."""
    assert row.timing is not None
    return row.timing.median_us
