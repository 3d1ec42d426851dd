"""What the live panels compute: a split sweep, a draft tree, a worn pool; each also as stored rows."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from workbench import targets
from workbench.rows import Origin, Row, RowStatus, Scalar

if TYPE_CHECKING:
    from workbench.kv.churn import Snapshot
    from workbench.tree import DraftTree

EXPERIMENT = "explore"
MAX_NSPLIT = 16
WEAR_WRAPS = 2.0


class Params(BaseModel):
    """Where the panels start; each control changes one of these."""

    model_config = ConfigDict(extra="forbid")
    target: str = Field("cpu", description="hardware target")
    seed: int = Field(0, description="seed of inputs, logits and arrivals")
    variant: str = Field("torch_split", description="verify-attention variant")
    ctx: int = Field(1024, ge=1, description="committed tokens of the request")
    q_len: int = Field(8, ge=1, le=64, description="draft rows of the request, root included")
    budget: int = Field(16, ge=1, le=128, description="tree nodes without the root")
    depth: int = Field(7, ge=1, le=15, description="draft slots, the longest path")
    peak: float = Field(2.0, ge=0, description="scale of the draft logits: larger is more certain")
    policy: str = Field("fifo", description="KV allocation policy")
    workload: str = Field("chat", description="what wears the pool, see data/workloads")
    slots: int = Field(16384, ge=256, description="slots of the pool")


def run(params: Params, step: Callable[[str], None] = print) -> list[Row]:
    """Rows of the split sweep, one of the tree and one of the pool, at the starting values."""
    targets.require_hardware(targets.load(params.target))
    step(f"sweep split counts of {params.variant}")
    rows = sweep_splits(params)
    step(f"build a tree of budget {params.budget}")
    tree = build_tree(params)
    shape: dict[str, Scalar] = {"nodes": len(tree), "longest_path": int(tree.depths.max())}
    rows.append(_row(params, "tree", {"budget": params.budget, "peak": params.peak}, shape))
    step(f"wear a pool of {params.slots} slots under {params.policy}")
    snapshot = wear_pool(params)
    score = snapshot.score()
    layout: dict[str, Scalar] = {"mean_run": score.mean_run, "descents": score.descents}
    layout["occupancy"] = snapshot.occupancy
    return [*rows, _row(params, "pool", {"policy": params.policy, "workload": params.workload}, layout)]


def findings(rows: list[Row]) -> list[str]:
    """What the starting values show."""
    timed = [row for row in rows if row.timing and row.axes["nsplit"] != "auto"]
    best = min(timed, key=lambda row: row.timing.median_us if row.timing else 0)
    tree = next(row for row in rows if row.variant == "tree").metrics
    pool = next(row for row in rows if row.variant == "pool").metrics
    return [
        f"{best.variant} is fastest with nsplit={best.axes['nsplit']} of {len(timed)} counts tried.",
        f"The tree has {tree['nodes']} nodes, its longest path {tree['longest_path']} drafts.",
        f"In the worn pool a run of neighbouring slots holds {pool['mean_run']:.1f} tokens on average.",
    ]


def sweep_splits(params: Params) -> list[Row]:
    """Latency of one variant at 1, 2, 4, ... splits and at "auto". ValueError lists the known variants."""
    from workbench.attention import variants
    from workbench.experiments.nsplit_sweep import powers_of_two, sweep
    from workbench.experiments.verify_bench import Bench, BenchOptions
    from workbench.experiments.verify_cases import VerifyCase

    known = {variant.name: variant for variant in variants() if variant.splits}
    if params.variant not in known:
        raise ValueError(f"variant {params.variant!r} has no split count: choose one of {', '.join(known)}")
    target = targets.load(params.target)
    case = VerifyCase(1, 8, params.q_len, params.ctx, dtype="fp32" if target.backend == "cpu" else "bf16")
    options = BenchOptions(n=6, budget_s=1.0, seed=params.seed, experiment=EXPERIMENT)
    return sweep(case, known[params.variant], powers_of_two(MAX_NSPLIT), Bench(target, options))


def build_tree(params: Params) -> "DraftTree":
    """The best-first tree over random logits of `depth` slots and 32 tokens."""
    import torch

    from workbench.tree import build_ddtree

    generator = torch.Generator().manual_seed(params.seed)
    logits = params.peak * torch.randn(params.depth, 32, generator=generator)  # [L, V]
    return build_ddtree(logits, params.budget, root_token=0)


def wear_pool(params: Params) -> "Snapshot":
    """The pool after its slots were handed out twice over. ValueError lists policies or workloads."""
    from workbench.kv.churn import Churn, age_pool
    from workbench.kv.policies import policy
    from workbench.kv.workload import load

    churn = Churn(policy(params.policy), load(params.workload), params.slots, params.seed)
    return age_pool(churn, WEAR_WRAPS)


def _row(params: Params, variant: str, axes: dict[str, Scalar], metrics: dict[str, Scalar]) -> Row:
    return Row(
        case_id=f"explore/{variant}",
        experiment=EXPERIMENT,
        variant=variant,
        target=params.target,
        origin=Origin.DERIVED,
        status=RowStatus.PASSED,
        axes=axes,
        metrics=metrics,
        repro="workbench run explore",
    )
