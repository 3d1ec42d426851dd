"""A pool worn by requests: arrivals, tree verify that takes more slots than it keeps, ends and retractions.

Nothing is computed here but slots; the layouts at chosen ages are what a kernel is then timed on.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from workbench.kv.fragmentation import LayoutScore, layout_score
from workbench.kv.policies import Policy, SlotPolicy
from workbench.kv.slot_book import Slots
from workbench.kv.workload import Workload


@dataclass
class Request:
    """A request in the pool or waiting for it: its slots in token order."""

    id: int
    prompt_tokens: int
    total_tokens: int
    slots: Slots = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # [capacity]
    tokens: int = 0

    @property
    def held(self) -> Slots:  # [tokens]
        return self.slots[: self.tokens]

    @property
    def last_slot(self) -> int:
        return int(self.slots[self.tokens - 1]) if self.tokens else 0

    def start(self, slots: Slots, rows: int) -> None:
        """Hold the prompt's slots, with room for every later token."""
        self.slots = np.zeros(self.total_tokens + rows, dtype=np.int64)
        self.tokens = 0
        self.append(slots)

    def append(self, slots: Slots) -> None:
        self.slots[self.tokens : self.tokens + len(slots)] = slots
        self.tokens += len(slots)


@dataclass(frozen=True)
class Snapshot:
    """The layout of every running request between two steps."""

    policy: str
    workload: str
    wraps: float
    step: int
    size: int
    request_ids: tuple[int, ...]
    indptr: Slots  # [requests + 1]
    indices: Slots  # [tokens]
    sorts: int
    retractions: int
    moved_rows: int
    refused: int

    @property
    def occupancy(self) -> float:
        """Share of the pool's slots that hold a token."""
        return len(self.indices) / self.size

    def request(self, index: int) -> torch.Tensor:  # [tokens]
        """Slots of one request in token order."""
        return torch.from_numpy(self.indices[self.indptr[index] : self.indptr[index + 1]].copy())

    def longest(self) -> torch.Tensor:  # [tokens]
        """Slots of the request with the most tokens."""
        return self.request(int(np.argmax(np.diff(self.indptr))))

    def score(self) -> LayoutScore:
        """Over all requests, pairs across requests left out; the span is the pool's, not a request's."""
        return layout_score(self.indices, self.indptr)

    def owners(self) -> np.ndarray:  # [size + 1]
        """Request id per slot, -1 where free."""
        owners = np.full(int(max(self.size, self.indices.max(initial=0))) + 1, -1, dtype=np.int64)
        owners[self.indices] = np.repeat(np.array(self.request_ids, dtype=np.int64), np.diff(self.indptr))
        return owners


class Churn:
    """One allocator under one workload; `step` is a decode step of the whole batch."""

    def __init__(self, policy: Policy, workload: Workload, size: int, seed: int = 0) -> None:
        largest = max(workload.prompt_tokens.value, workload.prompt_tokens.max)
        largest += max(workload.output_tokens.value, workload.output_tokens.max) + workload.rows
        if largest + 2 * 64 > size:
            raise ValueError(
                f"pool size={size} is too small for one request of workload {workload.name!r}: "
                f"use at least {largest + 2 * 64} slots"
            )
        self.policy, self.workload, self.size = policy, workload, size
        self.allocator: SlotPolicy = policy.make(size)
        self.rng = np.random.default_rng(seed)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.steps = self.retractions = self.moved_rows = self.refused = self._next_id = 0

    def step(self) -> None:
        """Admit, reserve rows for every running request, keep the accepted ones, free the rest."""
        self._arrive()
        self._admit()
        self.steps += 1
        windows = self._reserve()
        if windows is None:
            return
        keep = self._accepted(len(self.running))
        if self.policy.compacts:
            self.moved_rows += int((keep & (np.cumsum(keep, 1) - 1 != np.arange(keep.shape[1]))).sum())
            keep = np.arange(keep.shape[1]) < keep.sum(1, keepdims=True)
        for request, window, kept in zip(self.running, windows, keep):
            request.append(window[kept])
        self.allocator.free(torch.from_numpy(windows[~keep]))
        for request in [r for r in self.running if r.tokens >= r.total_tokens]:
            self._leave(request)

    def longest_tokens(self) -> int:
        """Tokens of the longest running request; 0 when none runs."""
        return max((request.tokens for request in self.running), default=0)

    def snapshot(self) -> Snapshot:
        """The present layout, copied."""
        lengths = [request.tokens for request in self.running]
        held = [request.held for request in self.running] or [np.empty(0, dtype=np.int64)]
        return Snapshot(
            policy=self.policy.name,
            workload=self.workload.name,
            wraps=self.allocator.wraps,
            step=self.steps,
            size=self.size,
            request_ids=tuple(request.id for request in self.running),
            indptr=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
            indices=np.concatenate(held),
            sorts=getattr(self.allocator, "sorts", 0),
            retractions=self.retractions,
            moved_rows=self.moved_rows,
            refused=self.refused,
        )

    def _arrive(self) -> None:
        if self.workload.arrival == "closed":
            count = max(0, self.workload.max_running - len(self.running) - len(self.waiting))
        else:
            count = int(self.rng.poisson(self.workload.requests_per_step))
        for _ in range(count):
            prompt = self.workload.prompt_tokens.draw(self.rng)
            total = prompt + self.workload.output_tokens.draw(self.rng)
            self.waiting.append(Request(self._next_id, prompt, total))
            self._next_id += 1

    def _admit(self) -> None:
        """Prefill waiting requests in order while a step of the whole batch would still fit."""
        while self.waiting and len(self.running) < self.workload.max_running:
            request = self.waiting[0]
            spare = (len(self.running) + 1) * self.workload.rows
            if self.allocator.available_size() < request.prompt_tokens + spare:
                return
            slots = self.allocator.alloc(request.prompt_tokens)
            if slots is None:
                return
            request.start(slots.numpy(), self.workload.rows)
            self.running.append(self.waiting.popleft())

    def _reserve(self) -> np.ndarray | None:  # [running, rows]
        """Rows of one step; requests are retracted until it fits. None when nothing runs."""
        while self.running:
            windows = self._try_reserve()
            if windows is not None:
                return windows
            self.refused += 1
            self._retract()
        return None

    def _try_reserve(self) -> np.ndarray | None:  # [running, rows]
        rows, count = self.workload.rows, len(self.running)
        if not self.policy.uses_last_slot:
            slots = self.allocator.alloc(rows * count)
            return None if slots is None else slots.numpy().reshape(count, rows)
        taken: list[Slots] = []
        for request in self.running:
            slots = self.allocator.alloc(rows, request.last_slot)
            if slots is None:
                self.allocator.free(torch.from_numpy(np.concatenate([*taken, np.empty(0, dtype=np.int64)])))
                return None
            taken.append(slots.numpy())
        return np.stack(taken)

    def _retract(self) -> None:
        """Send back the request with the fewest output tokens, then the longest prompt, as SGLang does."""
        request = min(self.running, key=lambda r: (r.tokens - r.prompt_tokens, -r.prompt_tokens))
        self._leave(request)
        self.retractions += 1
        request.prompt_tokens = request.tokens  # its output so far is prefilled again
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        self.allocator.free(torch.from_numpy(request.held.copy()))
        self.running.remove(request)

    def _accepted(self, count: int) -> np.ndarray:  # [count, rows] bool
        rows = self.workload.rows
        accepts = self.workload.draw_accepts(count, self.rng)[:, None]
        if self.workload.shape != "tree":
            return np.arange(rows) < accepts
        order = self.rng.random((count, rows))
        order[:, 0] = -1.0  # the root is always accepted
        return order.argsort(1).argsort(1) < accepts


def age_pool(churn: Churn, wraps: float, min_tokens: int = 0) -> Snapshot:
    """Run until the pool has wrapped `wraps` times and a request holds `min_tokens`; the layout there.

    ValueError if no request gets that long within two more wraps.
    """
    while churn.allocator.wraps < wraps or churn.longest_tokens() < min_tokens:
        if churn.allocator.wraps > wraps + 2:
            name = churn.workload.name
            raise ValueError(f"no request of workload {name!r} holds {min_tokens} tokens: lower the context")
        churn.step()
    return churn.snapshot()


def run_churn(
    policy: Policy,
    workload: Workload,
    size: int,
    ages: Sequence[float],
    *,
    seed: int = 0,
    min_tokens: int = 0,
) -> list[Snapshot]:
    """Snapshots at the first quiet points at which the pool has wrapped each of `ages` times."""
    churn = Churn(policy, workload, size, seed)
    return [age_pool(churn, age, min_tokens) for age in sorted(ages)]
