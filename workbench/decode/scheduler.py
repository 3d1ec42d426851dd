"""Who runs next: admission, slots reserved a step ahead, retraction of the youngest, nothing ever lost."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# Reserve for up to 16 steps at once, but no more than a quarter of what is free.
AHEAD_STEPS, AHEAD_SHARE = 16, 4


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
    freed: list[int] = field(default_factory=list)  # on their way back to the allocator
    reserved: list[int] = field(default_factory=list)  # for the next steps

    def __post_init__(self) -> None:
        self.free_rows = list(range(self.max_batch, 0, -1))

    @property
    def held_tokens(self) -> int:
        """Slots that are out."""
        return self.allocator.size - self.available

    @property
    def available(self) -> int:
        """Slots that nobody holds."""
        return self.allocator.available_size() + len(self.freed) + len(self.reserved)

    def admissible(self) -> Request | None:
        """The next waiting request if a row is free and its context and a step of everyone would fit."""
        if not self.waiting or not self.free_rows:
            return None
        request = self.waiting[0]
        reserve = self.width * (len(self.running) + 1)
        if len(request.prompt) + len(request.tokens) + reserve > self.available:
            return None
        return request

    def admit(self, request: Request) -> torch.Tensor:
        """Move the first waiting request to running; returns slots for its context [n] int64."""
        popped = self.waiting.popleft()
        assert popped is request
        self.flush(with_reserved=True)
        slots = self.allocator.alloc(len(request.context()))
        assert slots is not None
        request.slots, request.row = slots.tolist(), self.free_rows.pop()
        self.running.append(request)
        return slots

    def due(self) -> list[Request]:
        """Running requests that may need another step; each step in flight emits at least one token."""
        return [r for r in self.running if r.remaining > r.in_flight]

    def reserve(self, requests: int) -> list[list[int]] | None:
        """Slots for one step, [requests][width], or None when the pool is exhausted."""
        n, width = requests * self.width, self.width
        if len(self.reserved) < n and not self._refill(n):
            return None
        slots, self.reserved = self.reserved[:n], self.reserved[n:]
        return [slots[at : at + width] for at in range(0, n, width)]

    def _refill(self, n: int) -> bool:
        """Reserve for this step and, where there is room, a few more: the books cost the host per call."""
        self.flush()
        free = self.allocator.available_size()
        missing = n - len(self.reserved)
        if missing > free:
            return False
        slots = self.allocator.alloc(max(missing, min(AHEAD_STEPS * n, free // AHEAD_SHARE)))
        assert slots is not None
        self.reserved += slots.tolist()
        return True

    def commit(self, request: Request, slots: list[int], node_index: list[int]) -> None:
        """Keep the slots of accepted rows, in path order; free the rest. slots [width], node_index [a]."""
        request.slots += [slots[node] for node in node_index]
        accepted = set(node_index)
        self.free([slot for node, slot in enumerate(slots) if node not in accepted])

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
        self.free(request.slots)
        self.flush(with_reserved=not self.running)
        request.slots = []
        self.free_rows.append(request.row)
        request.row = 0

    def free(self, slots: list[int]) -> None:
        """Give slots back; the allocator gets them with the next refill."""
        self.freed += slots

    def flush(self, with_reserved: bool = False) -> None:
        """Give the allocator what has been freed, in order; also what is reserved ahead, where asked."""
        freed, self.freed = self.freed, []
        if with_reserved:
            freed, self.reserved = freed + self.reserved, []
        if freed:
            self.allocator.free(torch.tensor(freed, dtype=torch.int64))
