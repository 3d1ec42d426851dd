"""The shadow check: a chosen step is computed a second time, eagerly and from the same state, and compared.

It answers what no counter can: was the replayed step right? It compares tokens, logits, the KV rows written,
the inputs the graph worked on, and rows it should not have touched. Draft logits and tree are judged first; a
tree that differs in near ties only is right, and the recomputed verify pass then takes it as its input. It
waits for the device: few steps only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.decode.attend import plan_drafter, plan_target
from workbench.decode.buffers import StepBuffers
from workbench.decode.decision import ReplayDecision
from workbench.decode.step import DecodeStep
from workbench.decode.tree_check import differing_parts

if TYPE_CHECKING:
    from workbench.decode.loop import SpeculativeDecoder

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 5e-2, torch.float16: 1e-2}
INPUTS = ("req_index", "kv_len", "bonus", "temperature", "positions", "mask")


@dataclass(frozen=True)
class ShadowReport:
    """How one step differs from its eager recomputation; errors are relative to the largest value."""

    step: int
    replayed: bool
    wrong_requests: list[int]  # rows of the batch whose tokens differ
    logits_error: float
    kv_error: float
    stray_slots: list[int]  # rows outside of the step's own that changed
    differing: list[str] = field(default_factory=list)  # inputs that were not what they should be
    smallest_gap: float | None = None  # least top-1/top-2 logit gap among the wrong requests' rows
    tolerance: float = 0.0
    draft_error: float = 0.0  # of the draft logits
    chose_otherwise: bool = False  # another tree than the recomputed one, of the same worth

    @property
    def is_ok(self) -> bool:
        within = max(self.logits_error, self.kv_error, self.draft_error) <= self.tolerance
        return within and not (self.wrong_requests or self.stray_slots or self.differing)

    def sentence(self) -> str:
        """One line for a log or a finding."""
        if self.is_ok:
            ties = ", near ties in the tree settled otherwise" if self.chose_otherwise else ""
            return (
                f"step {self.step}: equal to its eager recomputation (logits {self.logits_error:.1e}{ties})"
            )
        parts = []
        if self.differing:
            parts.append(f"inputs differ: {', '.join(self.differing)}")
        if self.wrong_requests:
            parts.append(f"tokens differ for requests {self.wrong_requests}")
        if self.stray_slots:
            parts.append(f"{len(self.stray_slots)} rows of others overwritten (slot {self.stray_slots[0]})")
        parts.append(f"logits off by {self.logits_error:.1e}, KV rows by {self.kv_error:.1e}")
        if self.draft_error > self.tolerance:
            parts.append(f"draft logits by {self.draft_error:.1e}")
        return f"step {self.step}: {'; '.join(parts)}"


@dataclass
class _State:
    """What a step changes besides its buffers."""

    table: list[Tensor]
    noise: tuple[Tensor, Tensor]
    rows: list[tuple[Tensor, Tensor]]  # (pool buffer, its rows at `slots`)
    slots: Tensor
    checksums: list[Tensor]

    @classmethod
    def take(cls, d: SpeculativeDecoder, slots: Tensor) -> _State:
        pools = [d.pool.buffer] + ([d.draft_pool.buffer] if d.draft_pool is not None else [])
        return cls(
            [t.clone() for t in d.table.tensors()],
            d.noise.snapshot(),
            [(pool, pool[:, slots].clone()) for pool in pools],
            slots,
            [checksum(pool, d.allocator.size + 1) for pool in pools],
        )

    def restore(self, d: SpeculativeDecoder) -> None:
        for tensor, saved in zip(d.table.tensors(), self.table):
            tensor.copy_(saved)
        d.noise.restore(self.noise)
        for pool, rows in self.rows:
            pool[:, self.slots] = rows


def checksum(pool: Tensor, rows: int) -> Tensor:
    """One number per slot [rows] over pool [layers, >= rows, width]; layer by layer, to save memory."""
    total = torch.zeros(rows, dtype=torch.float64, device=pool.device)
    for layer in pool:
        total += layer[:rows].float().abs().sum(1)
    return total


def run_with_shadow(
    d: SpeculativeDecoder,
    part: str,
    b: StepBuffers,
    decision: ReplayDecision,
    index: int,
    written: StepBuffers,
) -> tuple[bool, ShadowReport]:
    """Run `part` of step `index` as decided, recompute the whole step eagerly, compare, then go on.

    The host has left the step's inputs in the mailbox of `written`, in a split step perhaps another bucket's.
    """
    wanted = _wanted_inputs(b, written, index)
    slots, live = wanted[b.bs :], int((wanted[: b.bs] > 0).sum())
    with torch.no_grad():
        before = _State.take(d, slots)
        replayed = d.runner.run(part, b, decision)
        after = _State.take(d, slots)
        before.restore(d)
        recomputed = _recompute(d, b, wanted, live)
        report = _compare(d, index, replayed, b, recomputed, before, after, live)
        after.restore(d)
    return replayed, replace(report, differing=report.differing + _differing_mail(b, wanted, index, live))


def _wanted_inputs(b: StepBuffers, written: StepBuffers, index: int) -> Tensor:
    """[bs * (1 + width)] what the host wrote for the step, cut or padded to the bucket of `b`."""
    sent = torch.tensor(written.mail.written(index))
    wanted, n = torch.zeros(b.bs * (1 + b.width), dtype=torch.int64), min(b.bs, written.bs)
    wanted[:n] = sent[:n]
    slots = sent[written.bs :].view(written.bs, written.width)
    wanted[b.bs :].view(b.bs, b.width)[:n] = slots[:n, : b.width]
    return wanted.to(b.device)


def _differing_mail(b: StepBuffers, wanted: Tensor, index: int, live: int) -> list[str]:
    """What the host wrote against what the step worked on; what it found against what the host will read."""
    if b.device.type == "cuda":
        torch.cuda.synchronize()
    differing = []
    if not torch.equal(b.req_index[:live], wanted[:live]):
        differing.append("req_index as the host wrote it")
    used = live * b.width
    if not torch.equal(b.out_slots[:used], wanted[b.bs :][:used]):
        differing.append("out_slots as the host wrote them")
    if b.mail.arrived(index)[: b.result.numel()] != b.result.view(-1).tolist():
        differing.append("results as the host reads them")
    return differing


@dataclass(frozen=True)
class _Recomputed:
    """A clean step, and what it says of the step's draft."""

    buffers: StepBuffers
    draft_error: float
    wrong_tree: list[str]
    chose_otherwise: bool


def _recompute(d: SpeculativeDecoder, b: StepBuffers, wanted: Tensor, live: int) -> _Recomputed:
    """A clean step on fresh buffers: no hooks, no clock, nothing shared with what was captured."""
    s = d.step
    clean = DecodeStep(
        s.target, s.drafter, s.pool, s.draft_pool, s.table, s.settings, noise=d.noise
    )  # fmt: skip
    wide = StepBuffers(b.bs, d.width, b.max_accept, b.max_context, b.device)
    clean.prepare_buffers(wide)
    wide.req_index.copy_(wanted[: b.bs])
    clean.attends[b.bs, d.width] = clean.attends[b.bs, b.width] = _fresh_plans(d, b)
    clean.draft_part(wide)
    draft_error = 0.0
    if b.draft_logits is not None and wide.draft_logits is not None:
        draft_error = relative_error(b.draft_logits[:live], wide.draft_logits[:live])
        wide.draft_logits[:live] = b.draft_logits[:live]  # judged; the tree is judged as one of these
    clean.tree_part(wide)
    is_linked = s.settings.shape != "chain"
    wrong = differing_parts(b.tree, wide.tree, wide.draft_logits, live, is_linked=is_linked)
    own = wide.tree.token_ids[:live, : b.width]  # rows behind a narrower step are no nodes
    chose_otherwise = not wrong and not torch.equal(b.tree.token_ids[:live], own)
    fresh = wide
    if b.width != d.width:
        fresh = StepBuffers(b.bs, b.width, b.max_accept, b.max_context, b.device)
        fresh.adopt(wide)
    if not wrong:  # near ties may have been settled otherwise: the rest of the step follows its own tree
        for name in ("token_ids", "depths", "parents", "mask", "num_nodes", "next_token", "next_sibling"):
            getattr(fresh.tree, name)[:live] = getattr(b.tree, name)[:live]
    fresh.inputs.copy_(wanted)
    clean.verify_part(fresh)
    return _Recomputed(fresh, draft_error, wrong, chose_otherwise)


def _fresh_plans(d: SpeculativeDecoder, b: StepBuffers) -> tuple[Any, Any]:
    r, s = d.runner, d.step
    options = {"nsplit": r.nsplit, "device": d.device}
    layout = "causal" if s.settings.shape == "chain" else "tree"
    target = plan_target(
        s.target.config, b.bs, b.width, b.max_context, s.target.dtype,
        variant=r.variant, mask_layout=layout, **options,
    )  # fmt: skip
    if not s.has_drafter:
        return target, None
    options["nsplit"] = "auto"
    drafter = plan_drafter(
        s.drafter.config, b.bs, b.max_context, s.drafter.dtype, variant=r.draft_variant, **options
    )
    return target, drafter


def _compare(
    d: SpeculativeDecoder,
    index: int,
    replayed: bool,
    b: StepBuffers,
    recomputed: _Recomputed,
    before: _State,
    after: _State,
    live: int,
) -> ShadowReport:
    reference = recomputed.buffers
    assert b.logits is not None and reference.logits is not None
    is_node = torch.arange(b.width, device=b.device) < reference.tree.num_nodes[:, None]  # [bs, N]
    is_node[live:] = False
    nodes = is_node.view(-1)
    wrong = (b.result[:live] != reference.result[:live]).any(1).nonzero()[:, 0].tolist()
    target_rows = d.pool.buffer[:, before.slots][:, nodes]
    stray: set[int] = set()
    own = set(before.slots.tolist()) | {0}
    for then, now in zip(before.checksums, after.checksums):
        stray |= set((then != now).nonzero()[:, 0].tolist()) - own
    return ShadowReport(
        step=index,
        replayed=replayed,
        wrong_requests=wrong,
        logits_error=relative_error(b.logits[nodes], reference.logits[nodes]),
        kv_error=relative_error(after.rows[0][1][:, nodes], target_rows),
        stray_slots=sorted(stray),
        differing=_differing_inputs(b, reference, live) + recomputed.wrong_tree,
        smallest_gap=_smallest_gap(reference, wrong),
        tolerance=TOLERANCE[d.pool.buffer.dtype],
        draft_error=recomputed.draft_error,
        chose_otherwise=recomputed.chose_otherwise,
    )


def _differing_inputs(b: StepBuffers, reference: StepBuffers, live: int) -> list[str]:
    """Names of inputs that the step computed or kept differently, for the live requests."""
    differing = []
    for name in INPUTS:
        mine, right = getattr(b, name).view(b.bs, -1)[:live], getattr(reference, name).view(b.bs, -1)[:live]
        if not torch.equal(mine, right):
            differing.append(name)
    if not torch.equal(b.kv_indptr[: live + 1], reference.kv_indptr[: live + 1]):
        differing.append("kv_indptr")
    used = int(reference.kv_indptr[live])
    if not torch.equal(b.kv_indices[:used], reference.kv_indices[:used]):
        differing.append("kv_indices")
    return differing


def relative_error(value: Tensor, right: Tensor) -> float:
    """Largest difference over the largest magnitude; inf when either is not finite."""
    if value.numel() == 0:
        return 0.0
    if not (value.isfinite().all() and right.isfinite().all()):
        return float("inf")
    scale = right.abs().max().clamp(min=1e-12)
    return float((value.double() - right.double()).abs().max() / scale)


def _smallest_gap(reference: StepBuffers, wrong: list[int]) -> float | None:
    """Top-1/top-2 gap that decides whether a difference may be rounding."""
    if not wrong or reference.logits is None:
        return None
    logits = reference.logits.view(reference.bs, reference.width, -1)[wrong]
    top = logits.topk(2, dim=-1).values
    return float((top[..., 0] - top[..., 1]).min())
