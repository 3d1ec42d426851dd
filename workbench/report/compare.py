"""`workbench compare`: two stored sides, refused when they were not taken under the same conditions."""

from dataclasses import dataclass
from pathlib import Path

from workbench.experiments.stored_rows import Pair, Side, differences, load_remark, load_side, pair_rows


@dataclass(frozen=True)
class Comparison:
    """Pairs of two sides and the conditions in which they differ."""

    first: Side
    second: Side
    unlike: list[str]
    pairs: list[Pair]


def compare_folders(first: Path, second: Path, force: bool = False) -> Comparison:
    """Compare two runs, batches or rows files. ValueError for unlike machines, unless `force`."""
    left, right = load_side(first), load_side(second)
    unlike = differences(left, right)
    if unlike and not force:
        raise ValueError(
            f"refused to compare {first} with {second}: {'; '.join(unlike)} (use --force to see the ratios)"
        )
    pairs = pair_rows(left, right)
    if not pairs:
        raise ValueError(f"{first} and {second} have no timed case in common: give two runs of one notebook")
    return Comparison(left, right, unlike, pairs)


def format_comparison(comparison: Comparison) -> str:
    """A text table, with the differing conditions first."""
    lines = [f"NOT THE SAME CONDITIONS: {text}" for text in comparison.unlike]
    lines += filter(None, [load_remark(comparison.first, comparison.second)])
    lines.append(f"first  {comparison.first.name} ({comparison.first.commit or 'no commit'})")
    lines.append(f"second {comparison.second.name} ({comparison.second.commit or 'no commit'})")
    lines.append(
        f"{'first us':>12} {'second us':>12} {'ratio':>7}  {'95 % bounds':<15} verdict            case"
    )
    lines += [_line(pair) for pair in comparison.pairs]
    return "\n".join(lines)


def _line(pair: Pair) -> str:
    case = " ".join(pair.key)
    if pair.ratio is None:
        return f"{'':>12} {'':>12} {'':>7}  {'':<15} {pair.verdict:<18} {case}: {pair.reason}"
    bounds = f"{pair.low:.3f}..{pair.high:.3f}"
    state = f"{pair.timing.mode}/{pair.timing.l2}" if pair.timing else ""
    medians = f"{pair.first_us:12.3f} {pair.second_us:12.3f} {pair.ratio:7.3f}"
    return f"{medians}  {bounds:<15} {pair.verdict:<18} {case} {state}"
