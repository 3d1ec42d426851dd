"""Every option of a decoder in one place, checked before anything is allocated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from workbench.decode.graph_runner import MODES, Mode, Progress
from workbench.decode.hooks import DecodeHooks
from workbench.decode.step import SHAPES, Shape
from workbench.tree.synthetic import AcceptanceLaw


@dataclass(frozen=True)
class DecodeOptions:
    """Keyword arguments of SpeculativeDecoder. Raises ValueError that names the value and the fix."""

    mode: Mode = "step_graph"  # eager, split_graph (two graphs, tree on the host) or step_graph
    shape: Shape = "tree"  # none (autoregressive), chain, chain_tree (a chain as a tree) or tree
    budget: int = 16  # nodes besides the root
    variant: str = "auto"  # of the target's verify attention
    nsplit: int | str = "auto"
    draft_variant: str = "auto"  # of the drafter's block attention
    max_batch: int = 8
    max_context: int | None = None  # tokens per request; None = the model's, at most 2048
    pool_tokens: int | None = None  # slots; None = max_batch * max_context
    batch_sizes: Sequence[int] | None = None  # buckets to capture; None = powers of two up to max_batch
    padding: bool = True  # round a batch up to the next bucket
    strict: bool = False  # raise when a step that should replay does not
    pad_trees: bool = True  # False: verify only as many rows as the largest tree has
    min_log_prob: float | None = None  # floor of a path's log-probability
    cut_to_remaining: bool = False  # no deeper than the tokens a request may still emit
    stop_tokens: Sequence[int] = ()
    allocator: Any = None  # None = TokenKVAllocator(pool_tokens)
    law: AcceptanceLaw | None = None  # synthetic acceptance: tokens are then not the model's
    hooks: DecodeHooks | None = None
    log_interval: int = 40  # steps per decode log line
    log_sink: Callable[[str], None] | None = None
    ledger: bool = True  # time the stages
    random_kv: bool = False  # noise in the pool instead of a prefill (timing at long contexts)
    lag: int = 1  # steps that the host reads behind
    seed: int = 0
    shadow_steps: Sequence[int] = ()  # steps that are recomputed eagerly and compared
    capture_progress: Progress | None = None

    def __post_init__(self) -> None:
        for name, known in (("mode", MODES), ("shape", SHAPES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(known)}")
        if self.shape != "none" and self.budget < 1:
            raise ValueError(f"budget={self.budget} must be at least 1: a tree has a root and `budget` nodes")
        for name in ("max_batch", "log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.lag not in (0, 1):
            raise ValueError(f"lag={self.lag}: the host reads 0 or 1 steps behind")
        if not self.pad_trees and self.mode != "split_graph":
            raise ValueError(
                "pad_trees=False needs mode='split_graph': only there the host sees a tree's width"
            )

    @classmethod
    def make(cls, options: dict[str, Any]) -> "DecodeOptions":
        """From keyword arguments. Raises ValueError for a name that is no option."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(options.keys() - set(known))
        if unknown:
            raise ValueError(
                f"unknown option {unknown[0]!r} of SpeculativeDecoder: choose from {', '.join(known)}"
            )
        return cls(**options)

    def widths(self, drafter: Any) -> tuple[int, int]:
        """(rows per request, most tokens a step may emit)."""
        if self.shape == "none":
            return 1, 1
        drafts = min(drafter.config.block_size - 1, self.budget)
        return (self.budget if self.shape == "tree" else drafts) + 1, drafts + 1

    def pick_batch_sizes(self, width: int, slots: int) -> list[int]:
        """Buckets in ascending order. Raises ValueError for one that cannot run."""
        sizes = self.batch_sizes
        chosen = sorted(set(sizes)) if sizes is not None else default_batch_sizes(self.max_batch)
        if not chosen or chosen[0] < 1:
            raise ValueError(f"batch_sizes={sizes}: give sizes of at least 1")
        if chosen[-1] * width > slots:
            raise ValueError(
                f"bucket {chosen[-1]} x {width} needs {chosen[-1] * width} slots, the pool has {slots}: "
                f"raise pool_tokens or lower batch_sizes"
            )
        if chosen[-1] > self.max_batch:
            raise ValueError(f"batch size {chosen[-1]} is above max_batch={self.max_batch}: raise max_batch")
        return chosen


def default_batch_sizes(max_batch: int) -> list[int]:
    """Powers of two up to `max_batch`, and itself."""
    return sorted({2**i for i in range(max_batch.bit_length()) if 2**i <= max_batch} | {max_batch})
