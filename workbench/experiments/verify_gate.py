"""The correctness gate of one variant: plan, run into poisoned outputs, compare with fp64."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from workbench.experiments.verify_cases import SM_SCALE, VerifyCase, VerifyInputs
from workbench.measure import timing
from workbench.measure.correctness import compare, judge, lse_distance
from workbench.rows import GpuState, RowStatus, Scalar, first_line

if TYPE_CHECKING:
    import torch

    from workbench.attention.plan import VerifyPlan
    from workbench.attention.variants import Variant

    Expected = tuple[torch.Tensor, torch.Tensor]


NOT_REACHED = "not reached"


@dataclass
class Candidate:
    """One variant of one case on its way from plan to row."""

    variant: "Variant"
    case: VerifyCase  # what it runs: causal or paged for a peer that takes nothing else
    asked: VerifyCase  # what was asked for; rows of one shape are compared by this
    nsplit: int | str = "auto"
    tunables: dict[str, Any] = field(default_factory=dict)  # those the variant has
    status: RowStatus = RowStatus.SKIPPED
    reason: str = NOT_REACHED
    errors: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, Scalar] = field(default_factory=dict)
    run: "VerifyRun | None" = None
    prepared: timing.Prepared | None = None
    gpu: GpuState | None = None

    @property
    def label(self) -> str:
        """Unique within a case: triton_split@auto."""
        return "@".join([self.variant.name, str(self.nsplit)])

    def fail(self, error: Exception) -> None:
        """Turn an exception into a status and a one-line reason."""
        self.status, self.reason = classify(error)
        self.run = self.prepared = None


@dataclass
class VerifyRun:
    """A planned call of one variant on each of the inputs' pools, all into the same outputs.

    A peer plans on the host for the indices of one pool, so it needs a plan for each.
    """

    inputs: VerifyInputs
    plans: "list[VerifyPlan]"
    out: "torch.Tensor"  # [T, H, latent]
    lse: "torch.Tensor"  # [T, H]
    tree_mask: "torch.Tensor | None"

    def call(self, pool: int) -> None:
        """Attend once; every launch is asynchronous."""
        from workbench.attention import verify_attention

        data = self.inputs
        verify_attention(
            data.q[pool], data.kv, data.qo_indptr, data.kv_indptr, data.kv_indices[pool], self.tree_mask,
            sm_scale=SM_SCALE, latent=data.case.latent, plan=self.plans[pool % len(self.plans)],
            out=self.out, lse=self.lse,
        )  # fmt: skip

    def poison(self) -> None:
        """NaN in every output."""
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))

    def calls(self) -> list[Callable[[], None]]:
        """One call per pool."""
        return [partial(self.call, pool) for pool in range(self.inputs.pools)]


def classify(error: Exception) -> tuple[RowStatus, str]:
    """The row status that an exception stands for, and its first line."""
    text = first_line(error)[:300]
    kind = type(error).__name__
    if "OutOfMemory" in kind or isinstance(error, MemoryError):
        return RowStatus.OUT_OF_MEMORY, text
    if "Compil" in kind or "NVRTC" in kind:
        return RowStatus.COMPILE_ERROR, f"{kind}: {text}"
    return RowStatus.RUNTIME_ERROR, f"{kind}: {text}"


def qualify(candidate: Candidate, inputs: VerifyInputs, expected: "Expected") -> None:
    """Plan, run once and compare; only a correct candidate keeps its run. A failing launch raises."""
    candidate.run = plan_run(candidate, inputs)
    plan = candidate.run.plans[0]
    candidate.metrics |= {"plan_nsplit": plan.nsplit, "workspace_bytes": plan.workspace_bytes}
    check(candidate, expected)


def plan_run(candidate: Candidate, inputs: VerifyInputs) -> VerifyRun:
    """Make the plan and the outputs of a candidate."""
    import torch

    from workbench.attention import make_plan

    case, q = candidate.case, inputs.q[0]
    options = {"nsplit": candidate.nsplit, "device": q.device} | candidate.tunables
    count = inputs.pools if candidate.variant.backend == "peer" else 1
    plans = [make_plan(case.shape, variant=candidate.variant.name, **options) for _ in range(count)]
    out = torch.empty(*q.shape[:2], case.latent, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return VerifyRun(inputs, plans, out, lse, inputs.tree_mask if case.mask == "tree" else None)


def check(candidate: Candidate, expected: "Expected") -> None:
    """Poison the outputs, attend on pool 0, compare with fp64; sets errors, status and reason."""
    run = candidate.run
    assert run is not None
    run.poison()
    run.call(0)
    errors, lse_abs = compare(run.out, expected[0]), None
    candidate.errors = errors.as_dict()
    if run.lse.isnan().all() and candidate.variant.backend == "peer":
        candidate.metrics |= {"gives_lse": False}
    else:
        lse_abs = lse_distance(run.lse, expected[1])
        candidate.errors |= {"lse_error": lse_abs}
    _set_status(candidate, judge(errors, candidate.case.dtype, lse_abs, candidate.variant.lse_bar))


def recheck(candidate: Candidate) -> None:
    """The replayed graph must give what an eager call gives: compared on the last pool, outputs poisoned."""
    run, prepared = candidate.run, candidate.prepared
    if run is None or prepared is None or prepared.graph is None:
        return
    run.poison()
    prepared.run()
    replayed = run.out.clone()
    run.poison()
    prepared.calls[-1]()
    reason = judge(compare(replayed, run.out), candidate.case.dtype)
    if reason:
        _set_status(candidate, f"the replayed graph differs from an eager call: {reason}")


def _set_status(candidate: Candidate, reason: str | None) -> None:
    candidate.status, candidate.reason = (RowStatus.INCORRECT, reason) if reason else (RowStatus.PASSED, "")
    if reason:
        candidate.run = candidate.prepared = None
