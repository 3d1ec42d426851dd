"""What every variant must pass before it is timed: values, poison, padding, bucket reuse, invariance."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from workbench.attention import reference
from workbench.attention.api import verify_attention
from workbench.attention.case_inputs import UNUSED_SLOT, CaseInputs, build
from workbench.attention.cases import AttentionCase
from workbench.attention.checks import make_call
from workbench.attention.plan import DTYPES, VerifyPlan, make_plan
from workbench.attention.variants import find
from workbench.measure.correctness import LSE_ERROR, Errors, compare, judge, lse_distance
from workbench.shapes import VerifyShape


@dataclass(frozen=True)
class Verdict:
    """Errors of one case and the reason it failed, None when it passed."""

    errors: Errors
    lse_error: float
    reason: str | None


def poison(*tensors: torch.Tensor) -> None:
    """Fill with NaN what a call must overwrite; integer workspaces (counters) stay."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)


def poisoned_outputs(q: torch.Tensor, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, latent], lse [T, H]) full of NaN."""
    out = torch.empty((*q.shape[:2], latent), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    poison(out, lse)
    return out, lse


def plan_of(variant: str, case: AttentionCase, device: str, **options: Any) -> VerifyPlan:
    """The case's plan with poisoned workspaces; nsplit only where the variant splits."""
    nsplit = case.nsplit if find(variant).splits else "auto"
    plan = make_plan(case.shape, variant=variant, nsplit=nsplit, device=device, **options)
    poison(*plan.workspaces.values())
    return plan


def expected(inputs: CaseInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 (out, lse) of the oracle."""
    i = inputs
    return reference.attend(
        make_call(
            i.q, i.kv, i.qo_indptr, i.kv_indptr, i.kv_indices, i.tree_mask, i.draft_slots, i.mask_layout,
            i.sm_scale, i.latent, None, None,
        )
    )  # fmt: skip


def check_case(variant: str, case: AttentionCase, device: str = "cpu", **options: Any) -> Verdict:
    """Run one case through a variant; `options` go to make_plan."""
    inputs = build(case, device)
    plan = plan_of(variant, case, device, **options)
    out, lse = poisoned_outputs(inputs.q, case.latent)
    before = inputs.kv.clone()
    verify_attention(**inputs.arguments(), plan=plan, out=out, lse=lse, validate=True)
    changed = not torch.equal(before.view(torch.uint8), inputs.kv.contiguous().view(torch.uint8))
    asked = find(variant)
    verdict = verdict_of(
        out, lse, *expected(inputs), case.dtype, has_lse=asked.gives_lse, lse_bar=asked.lse_bar
    )
    return replace(verdict, reason="the call wrote into the pool") if changed else verdict


def verdict_of(
    out: torch.Tensor,
    lse: torch.Tensor,
    ref_out: torch.Tensor,
    ref_lse: torch.Tensor,
    dtype: str,
    has_lse: bool = True,
    lse_bar: float = LSE_ERROR,
) -> Verdict:
    """Compare with the oracle; rows that see nothing, padding included, must be exactly 0 and -inf."""
    errors, lse_error = compare(out, ref_out), lse_distance(lse, ref_lse) if has_lse else 0.0
    empty = ref_lse == -torch.inf
    reason = judge(errors, dtype, lse_error, lse_bar)
    if reason is None and bool(out[empty].any()):
        reason = "a row that sees nothing has out != 0"
    return Verdict(errors, lse_error, reason)


def bucket_cases(
    dtype: str = "fp32", latent: int = 64, rope: int = 16, heads: int = 8
) -> tuple[VerifyShape, list[AttentionCase]]:
    """A bucket and steps through it: full, shorter, fewer requests, reordered, empty, full (B8, B11)."""
    common = AttentionCase(dtype=dtype, latent=latent, rope=rope, heads=heads)
    lens = [
        ((4, 7, 1, 16), (60, 130, 64, 200)),
        ((1, 2, 1, 3), (5, 9, 1, 30)),
        ((5, 0, 2), (100, 0, 65)),
        ((16, 1, 7, 4), (200, 64, 130, 60)),
        ((0,), (0,)),
        ((16, 16, 16, 16), (200, 199, 17, 16)),
    ]
    steps = [
        replace(
            common, q_lens=q, kv_lens=kv, seed=seed, padding_requests=4 - len(q), padding_rows=64 - sum(q)
        )
        for seed, (q, kv) in enumerate(lens)
    ]
    return VerifyShape(4, heads, 16, 200, dtype, latent, rope), steps


class StaticBuffers:
    """Fixed input and output tensors of a bucket, filled anew for each step as a graph runner does."""

    def __init__(self, shape: VerifyShape, case: AttentionCase, device: str, pool_rows: int = 2048) -> None:
        """Room for the bucket in the case's mask layout and form; a step's slots stay below `pool_rows`."""
        tokens, dtype = shape.bs * shape.max_q_len, DTYPES[shape.dtype]
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        slots: dict[str, Any] = {"dtype": getattr(torch, case.index_dtype), "device": device}
        cells = tokens * (shape.max_kv_len if case.mask == "full" else shape.max_q_len) + 9
        words = -(-shape.max_q_len // 32) + 1
        mask = {
            "causal": None,
            "packed": torch.zeros((tokens, words), dtype=torch.uint32, device=device),
        }.get(case.mask, torch.zeros(cells, dtype=torch.bool, device=device))
        self.inputs = CaseInputs(
            q=torch.empty((tokens, shape.heads, shape.width), dtype=dtype, device=device),
            kv=torch.empty((pool_rows, shape.width), dtype=dtype, device=device),
            qo_indptr=torch.zeros(shape.bs + 1, **ints),
            kv_indptr=torch.zeros(shape.bs + 1, **ints),
            kv_indices=torch.full((shape.bs * shape.max_kv_len + 5,), UNUSED_SLOT, **slots),
            tree_mask=mask,
            draft_slots=torch.full((tokens + 5,), UNUSED_SLOT, **slots) if case.form == "slots" else None,
            mask_layout=case.mask,
            sm_scale=case.sm_scale,
            latent=shape.latent,
        )
        self.out, self.lse = poisoned_outputs(self.inputs.q, shape.latent)

    def load(self, step: CaseInputs) -> None:
        """Copy a step in; everything it does not cover becomes NaN or an unused slot."""
        mine = self.inputs
        poison(mine.kv, mine.q, self.out, self.lse)
        mine.q.copy_(step.q)
        mine.kv[: len(step.kv)].copy_(step.kv)
        mine.qo_indptr.copy_(step.qo_indptr)
        mine.kv_indptr.copy_(step.kv_indptr)
        for target, source in ((mine.kv_indices, step.kv_indices), (mine.draft_slots, step.draft_slots)):
            if target is not None and source is not None:
                target.fill_(UNUSED_SLOT)
                target[: len(source)].copy_(source)
        if mine.tree_mask is not None and step.tree_mask is not None:
            rows = slice(0, step.tree_mask.shape[0])
            source = step.tree_mask.view(torch.int32) if mine.tree_mask.dim() == 2 else step.tree_mask
            target = mine.tree_mask.view(torch.int32) if mine.tree_mask.dim() == 2 else mine.tree_mask
            target[rows, : source.shape[1]].copy_(source) if source.dim() == 2 else target[rows].copy_(source)


Replay = Callable[[], None]


def captured(call: Replay) -> Replay:
    """The call as a CUDA graph, warmed up on a side stream first."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def check_bucket(
    variant: str, device: str = "cpu", *, mask: str = "tree", form: str = "listed", **options: Any
) -> list[Verdict]:
    """One plan (on a GPU one captured graph) through all steps of a bucket, each against the oracle."""
    shape_options = {
        name: options.pop(name) for name in ("dtype", "latent", "rope", "heads") if name in options
    }
    shape, steps = bucket_cases(**shape_options)
    steps = [replace(step, mask=mask, form=form) for step in steps]
    plan = make_plan(replace(shape, mask_layout=mask), variant=variant, device=device, **options)
    poison(*plan.workspaces.values())
    buffers = StaticBuffers(shape, steps[0], device)
    buffers.load(build(steps[0], device))

    def call() -> None:
        verify_attention(**buffers.inputs.arguments(), plan=plan, out=buffers.out, lse=buffers.lse)

    replay = call if device == "cpu" else captured(call)
    verdicts = []
    for step in steps:
        buffers.load(build(step, device))
        replay()
        verdicts.append(verdict_of(buffers.out, buffers.lse, *expected(buffers.inputs), shape.dtype))
    return verdicts


def check_batch_invariance(variant: str, device: str = "cpu", **options: Any) -> list[str]:
    """Requests alone, in a batch and in another order must agree bitwise; returns what differs."""
    case_options = {
        name: options.pop(name) for name in ("dtype", "latent", "rope", "heads") if name in options
    }
    lens = [(4, 60), (1, 130), (16, 200), (7, 64)]
    ones = [AttentionCase((q,), (kv,), seed=q, **case_options) for q, kv in lens]
    alone = [_run_invariant(variant, ones[i : i + 1], device, options) for i in range(len(ones))]
    differing = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [1, 1, 1, 1, 1, 1, 1, 0], [3, 2]):
        together = _run_invariant(variant, [ones[i] for i in order], device, options)
        for place, (i, parts) in enumerate(zip(order, _per_request(together, [lens[i][0] for i in order]))):
            if not all(torch.equal(a, b) for a, b in zip(parts, alone[i])):
                differing.append(f"request {i} at place {place} of {order}")
    return differing


def _run_invariant(
    variant: str, cases: list[AttentionCase], device: str, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The requests as one batch, each with the tensors it has on its own."""
    parts = [build(case, device) for case in cases]
    offset, slots = 0, []
    for part, case in zip(parts, cases):
        slots.append(part.kv_indices[: case.kv_lens[0]] + offset)
        offset += len(part.kv)
    masks = [p.tree_mask[: c.q_lens[0] ** 2] for p, c in zip(parts, cases) if p.tree_mask is not None]
    merged = replace(
        cases[0], q_lens=tuple(c.q_lens[0] for c in cases), kv_lens=tuple(c.kv_lens[0] for c in cases)
    )
    plan = make_plan(merged.shape, variant=variant, device=device, batch_invariant=True, **options)
    q = torch.cat([part.q for part in parts])
    out, lse = poisoned_outputs(q, merged.latent)
    return verify_attention(
        q, torch.cat([part.kv for part in parts]), _indptr(merged.q_lens, device), _indptr(merged.kv_lens,
        device), torch.cat(slots), torch.cat(masks), sm_scale=merged.sm_scale, latent=merged.latent,
        plan=plan, out=out, lse=lse, batch_invariant=True,
    )  # fmt: skip


def _indptr(lens: Iterable[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *lens], device=device).cumsum(0).to(torch.int32)


def _per_request(
    outputs: tuple[torch.Tensor, torch.Tensor], q_lens: list[int]
) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(tensor.split(q_lens) for tensor in outputs)))
