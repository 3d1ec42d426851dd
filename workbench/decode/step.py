"""One speculative step, from committed state to committed state: eager, in parts, or in one graph.

Every operation is on static buffers of the device; the host neither reads nor decides anything in here.
In order: receive, read state, draft, tree, mask, verify, context, accept, commit, send. A commit moves no
rows: accepted ones keep the slots they were written to, the step only enters them into the request's table.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.decode.buffers import RequestTable, StepBuffers
from workbench.decode.chain import accept_chain, draft_chain, set_chain_geometry
from workbench.decode.hooks import DecodeHooks
from workbench.decode.noise import NoiseSource
from workbench.decode.replay import is_recording, record_host_node
from workbench.decode.transfer import receive_inputs, send_results
from workbench.measure.stage_clock import NoClock, StageClock
from workbench.model.batch import ForwardBatch
from workbench.tree.accept import accept_greedy_batch
from workbench.tree.batch import build_chain_batch, build_ddtree_batch
from workbench.tree.sampling import draw_tokens
from workbench.tree.synthetic import AcceptanceLaw, accept_synthetic_batch

Shape = Literal["none", "chain", "chain_tree", "tree"]
SHAPES = ("none", "chain", "chain_tree", "tree")

# (segment, stage of the ledger), in the order of the step; sending comes after the last mark
SEGMENTS = (
    ("receive", "other"),
    ("state", "other"),
    ("draft", "draft"),
    ("tree", "tree"),
    ("mask", "mask"),
    ("verify", "verify"),
    ("context", "draft"),
    ("accept", "accept"),
    ("commit", "commit"),
)
SEGMENT_INDEX = {name: i for i, (name, _) in enumerate(SEGMENTS)}
SEGMENT_STAGES = tuple(stage for _, stage in SEGMENTS)
NO_TRACE = nullcontext()


@dataclass(frozen=True)
class StepSettings:
    """What the step computes; all of it is fixed at capture."""

    shape: Shape
    budget: int
    sampled: bool = False
    top_k: int | None = None
    top_p: float | None = None
    min_log_prob: float | None = None
    cut_to_remaining: bool = False
    law: AcceptanceLaw | None = (
        None  # draws the accepted depth instead of comparing: output is not the model's
    )


class DecodeStep:
    """The step of one pair of models over their pools; `attend` objects come with each bucket."""

    def __init__(
        self,
        target: Any,
        drafter: Any,
        pool: Any,
        draft_pool: Any,
        table: RequestTable,
        settings: StepSettings,
        *,
        noise: NoiseSource,
        clock: StageClock | None = None,
        hooks: DecodeHooks | None = None,
    ) -> None:
        self.target, self.drafter, self.pool, self.draft_pool = target, drafter, pool, draft_pool
        self.table, self.settings, self.noise = table, settings, noise
        self.clock, self.hooks = clock or NoClock(), hooks or DecodeHooks()
        self.attends: dict[tuple[int, int], tuple[Any, Any]] = {}  # (bs, width) -> (target's, drafter's)

    @property
    def has_drafter(self) -> bool:
        return self.settings.shape != "none"

    def run(self, b: StepBuffers) -> None:
        """The whole step, from the mailbox to the mailbox."""
        self.receive_and_draft(b)
        self.tree_part(b)
        self.verify_and_send(b)

    def receive_and_draft(self, b: StepBuffers) -> None:
        """From the mailbox to draft logits."""
        with self.segment("receive", b):
            self.receive(b)
        self.draft_part(b)

    def verify_and_send(self, b: StepBuffers) -> None:
        """From the tree to the mailbox."""
        self.verify_part(b)
        self.send(b)

    def draft_part(self, b: StepBuffers) -> None:
        """From committed state to draft logits."""
        with self.segment("state", b):
            self.read_state(b)
        if self.has_drafter:
            with self.segment("draft", b):
                self.draft(b)

    def tree_part(self, b: StepBuffers) -> None:
        """From draft logits to the tree."""
        with self.segment("tree", b):
            self.build_tree(b)

    def verify_part(self, b: StepBuffers) -> None:
        """From the tree to committed state."""
        with self.segment("mask", b):
            self.place_rows(b)
        with self.segment("verify", b):
            self.verify(b)
        if self.has_drafter:
            with self.segment("context", b):
                self.write_context(b)
        with self.segment("accept", b):
            self.accept(b)
        with self.segment("commit", b):
            self.commit(b)

    def segment(self, name: str, b: StepBuffers) -> "Segment":
        """Time a part, mark it in a trace, let hooks see it start."""
        index = SEGMENT_INDEX[name]
        self.hooks.before_stage(SEGMENT_STAGES[index], b)
        return Segment(self.clock, index)

    def receive(self, b: StepBuffers) -> None:
        """This step's table rows and slots."""
        receive_inputs(b.mail, self.table.turn, b.inputs)

    def read_state(self, b: StepBuffers) -> None:
        """Gather this batch's rows of the table; flatten their slots into kv_indices."""
        t, rows = self.table, b.req_index
        torch.index_select(t.kv_len, 0, rows, out=b.kv_len)
        torch.index_select(t.bonus, 0, rows, out=b.bonus)
        torch.index_select(t.remaining, 0, rows, out=b.remaining)
        torch.index_select(t.temperature, 0, rows, out=b.temperature)
        b.kv_indptr[1:] = b.kv_len.cumsum(0)
        flatten_slots(t.req_to_token, rows, b)

    def draft(self, b: StepBuffers) -> None:
        attend = self.attends[b.bs, b.width][1]
        b.draft_logits = self.drafter.draft(
            b.bonus, b.kv_len, b.kv_indptr, b.kv_indices, self.draft_pool, attend
        )  # [bs, L, V]

    def build_tree(self, b: StepBuffers) -> None:
        s = self.settings
        if s.shape == "none":
            b.tree.token_ids[:, 0] = b.bonus
            return
        assert b.draft_logits is not None
        limit = b.remaining if s.cut_to_remaining else None
        if s.shape == "chain":
            draft_chain(b.draft_logits, b.bonus, b.tree)
        elif s.shape == "chain_tree":
            chain = b.draft_logits[:, : b.width - 1]
            build_chain_batch(chain, b.tree, root_tokens=b.bonus, max_tokens=limit)
        else:
            build_ddtree_batch(
                b.draft_logits,
                s.budget,
                b.tree,
                root_tokens=b.bonus,
                max_tokens=limit,
                min_log_prob=s.min_log_prob,
            )

    def place_rows(self, b: StepBuffers) -> None:
        """Positions by depth, and the mask in the flat layout."""
        torch.add(b.kv_len[:, None], b.tree.depths, out=b.positions.view(b.bs, b.width))
        if self.settings.shape != "chain":
            b.mask.view(b.bs, b.width, b.width).copy_(b.tree.mask)

    def verify(self, b: StepBuffers) -> None:
        output = self.target.forward(self.forward_batch(b), self.pool, self.attends[b.bs, b.width][0])
        b.logits, b.taps = output.logits, output.taps

    def forward_batch(self, b: StepBuffers) -> ForwardBatch:
        """The verify pass's inputs, views of the buffers."""
        return ForwardBatch(
            token_ids=b.tree.token_ids.view(-1),
            positions=b.positions,
            out_slots=b.out_slots,
            qo_indptr=b.qo_indptr,
            kv_indptr=b.kv_indptr,
            kv_indices=b.kv_indices,
            tree_mask=None if self.settings.shape == "chain" else b.mask,
            max_q_len=b.width,
            max_kv_len=b.max_context + b.width,
        )

    def write_context(self, b: StepBuffers) -> None:
        """The drafter's context of every row; rows that are rejected lose their slots with it."""
        self.drafter.write_context(b.taps, b.positions, b.out_slots, self.draft_pool)

    def accept(self, b: StepBuffers) -> None:
        s = self.settings
        wanted = self.target_tokens(b)
        if s.law is not None:
            noise = self.noise.fill(b.noise)[: b.bs]
            accept_synthetic_batch(b.tree, wanted, b.accept, law=s.law, noise=noise)
        elif s.shape == "chain":
            accept_chain(b.tree.token_ids, wanted, b.accept)
        else:
            accept_greedy_batch(b.tree, wanted, b.accept)

    def target_tokens(self, b: StepBuffers) -> Tensor:
        """The target's own token after every row, [bs, N]: its argmax, or a draw."""
        assert b.logits is not None
        s = self.settings
        if not s.sampled:
            return b.logits.argmax(-1).view(b.bs, b.width)
        self.noise.fill(b.noise)
        temperature = b.temperature[:, None].expand(b.bs, b.width).reshape(-1, 1)
        drawn = draw_tokens(b.logits, b.noise, temperature=temperature, top_k=s.top_k, top_p=s.top_p)
        return drawn.view(b.bs, b.width)

    def commit(self, b: StepBuffers) -> None:
        """Enter accepted slots into the table, advance lengths, pack what the host reads."""
        t, rows = self.table, b.req_index
        is_live = rows > 0
        slots = b.out_slots.view(b.bs, b.width).gather(1, b.accept.node_index.clamp(min=0))
        ahead = torch.arange(b.max_accept, device=b.device)
        columns = (b.kv_len[:, None] + ahead).clamp(max=b.max_context - 1)
        t.req_to_token[rows[:, None], columns] = (
            slots.int()
        )  # columns behind the end are rewritten by the next step
        t.kv_len[rows] = torch.where(is_live, b.kv_len + b.accept.accept_length, 0)
        t.bonus[rows] = torch.where(is_live, b.accept.bonus, 0)
        t.remaining[rows] = b.remaining - b.accept.accept_length * is_live
        a = b.max_accept
        b.result[:, :a] = b.accept.tokens
        b.result[:, a : 2 * a] = b.accept.node_index
        b.result[:, 2 * a] = b.accept.accept_length
        b.result[:, 2 * a + 1] = b.tree.num_nodes
        b.result[:, 2 * a + 2] = b.tree.depths.amax(1)

    def send(self, b: StepBuffers) -> None:
        """Results and the clock's stamps, for the host."""
        stamps = self.clock.device_stamps
        results = b.result.view(-1)
        send_results(b.mail, self.table.turn, results if stamps is None else torch.cat([results, stamps]))

    def prepare_buffers(self, b: StepBuffers) -> None:
        """What never changes in a bucket."""
        if self.settings.shape == "chain":
            set_chain_geometry(b.tree)


class Segment:
    """A timed part of a step; a class, since it is entered between two launches."""

    __slots__ = ("clock", "index", "trace")

    def __init__(self, clock: StageClock, index: int) -> None:
        self.clock, self.index = clock, index
        self.trace = mark_trace(f"stage:{SEGMENT_STAGES[index]}")

    def __enter__(self) -> None:
        self.trace.__enter__()
        self._mark(False)

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._mark(True)
        self.trace.__exit__(*error)

    def _mark(self, is_end: bool) -> None:
        clock, index = self.clock, self.index
        clock.mark(index, is_end)
        if is_recording():
            record_host_node(lambda: clock.mark(index, is_end))


def mark_trace(name: str) -> AbstractContextManager[Any]:
    """A named range in a profiler trace; free while no profiler runs."""
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else NO_TRACE


def flatten_slots(req_to_token: Tensor, rows: Tensor, b: StepBuffers) -> None:
    """kv_indices = the first kv_len slots of each request in a row; the capacity behind is dummy slots."""
    owner = torch.searchsorted(b.kv_indptr[1:], b.flat_index, right=True, out_int32=True).long()
    is_used = owner < b.bs
    owner = owner.clamp(max=b.bs - 1)
    column = (b.flat_index - b.kv_indptr[owner]).clamp(max=b.max_context - 1)
    slots = req_to_token.view(-1).index_select(0, rows[owner] * b.max_context + column)
    b.kv_indices.copy_(torch.where(is_used, slots, 0))
