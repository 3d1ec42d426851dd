"""Who runs next: admission, slots reserved a step ahead, retraction of the youngest, nothing ever lost."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(eq=False)
class Request:
    """One prompt on its way; `tokens` are what it has emitted, the last of them not in the pool yet."""

    index: int
    prompt: list[int]
    max_new_tokens: int
    stop_tokens: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)  # committed, in sequence order
    row: int = 0  # of the request table; 0 = none
    in_flight: int = 0  # launched steps whose results have not arrived
    is_done: bool = False
    retractions: int = 0

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - len(self.tokens)

    def context(self) -> list[int]:
        """Tokens whose KV the pool must hold: all but the last emitted one."""
        return self.prompt + self.tokens[:-1]

    def take(self, new: Sequence[int]) -> int:
        """Append tokens up to a stop token (kept) or the limit; returns how many counted."""
        for count, token in enumerate(new, start=1):
            self.tokens.append(token)
            if token in self.stop_tokens or len(self.tokens) >= self.max_new_tokens:
                self.is_done = True
                return count
        return len(new)


@dataclass
class Scheduler:
    """Books of one decode: waiting, running, rows of the table and slots of the pool."""

    allocator: Any
    max_batch: int
    width: int
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)  # oldest admission first
    retracted: int = 0
    free_rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free_rows = list(range(self.max_batch, 0, -1))

    @property
    def held_tokens(self) -> int:
        """Slots that are out."""
        return self.allocator.size - self.allocator.available_size()

    def admissible(self) -> Request | None:
        """The next waiting request if a row is free and its context and a step of everyone would fit."""
        if not self.waiting or not self.free_rows:
            return None
        request = self.waiting[0]
        reserve = self.width * (len(self.running) + 1)
        if len(request.prompt) + len(request.tokens) + reserve > self.allocator.available_size():
            return None
        return request

    def admit(self, request: Request) -> torch.Tensor:
        """Move the first waiting request to running; returns slots for its context [n] int64."""
        popped = self.waiting.popleft()
        assert popped is request
        slots = self.allocator.alloc(len(request.context()))
        assert slots is not None
        request.slots, request.row = slots.tolist(), self.free_rows.pop()
        self.running.append(request)
        return slots

    def due(self) -> list[Request]:
        """Running requests that may need another step; each step in flight emits at least one token."""
        return [r for r in self.running if r.remaining > r.in_flight]

    def reserve(self, requests: int) -> np.ndarray | None:
        """Slots for one step [requests, width], or None when the pool is exhausted."""
        slots = self.allocator.alloc(requests * self.width)
        return None if slots is None else slots.numpy().reshape(requests, self.width)

    def commit(self, request: Request, slots: np.ndarray, node_index: np.ndarray) -> None:
        """Keep the slots of accepted rows, in path order; free the rest. slots [width], node_index [a]."""
        kept = slots[node_index]
        rejected = np.ones(self.width, dtype=bool)
        rejected[node_index] = False
        request.slots.extend(kept.tolist())
        self.free(slots[rejected])

    def finish(self, request: Request) -> None:
        """Give back row and slots."""
        self.running.remove(request)
        self._release(request)

    def retract_youngest(self) -> Request:
        """Send the last admitted request back to the head of the queue; what it emitted stays with it."""
        request = self.running.pop()
        self._release(request)
        request.retractions += 1
        self.retracted += 1
        self.waiting.appendleft(request)
        return request

    def _release(self, request: Request) -> None:
        self.free(np.asarray(request.slots, dtype=np.int64))
        request.slots = []
        self.free_rows.append(request.row)
        request.row = 0

    def free(self, slots: np.ndarray) -> None:
        """Give slots [n] back to the allocator."""
        if len(slots):
            self.allocator.free(torch.from_numpy(np.ascontiguousarray(slots)))
