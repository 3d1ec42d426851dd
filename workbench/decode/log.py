"""Decode, prefill and capture lines in SGLang's format: one reader serves servers' logs and ours."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime


def timestamp() -> str:
    """The prefix of every line."""
    return datetime.now().strftime("[%Y-%m-%d %H:%M:%S]")


@dataclass
class DecodeLog:
    """Writes one line every `interval` decode steps: means over the interval, the flag of its last step.

    `flag` of None leaves the graph field out, as servers before it existed do. `width` is the draft tokens a
    verify pass may accept; 0 leaves the accept fields out (no speculation).
    """

    interval: int
    device: str  # the word before "graph:"
    pool_tokens: int
    width: int
    sink: Callable[[str], None] | None = None
    clock: Callable[[], float] = time.perf_counter
    lines: list[str] = field(default_factory=list)
    _steps: int = 0
    _tokens: int = 0
    _passes: int = 0
    _since: float = -1.0

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"log_interval={self.interval} must be at least 1: a line every so many steps")

    def write(self, text: str) -> None:
        """Keep and emit one line with its time stamp."""
        line = f"{timestamp()} {text}"
        self.lines.append(line)
        if self.sink:
            self.sink(line)

    def add_step(
        self, accept_lengths: Sequence[int], held_tokens: int, queued: int, flag: bool | None
    ) -> None:
        """Count a step of len(accept_lengths) requests; every `interval` steps write the line."""
        if self._since < 0:
            self._since = self.clock()
        self._steps += 1
        self._passes += len(accept_lengths)
        self._tokens += sum(accept_lengths)
        if self._steps % self.interval == 0:
            self._write_decode(len(accept_lengths), held_tokens, queued, flag)

    def add_prefill(
        self, new_requests: int, new_tokens: int, held_tokens: int, running: int, queued: int
    ) -> None:
        """Write the line of one prefill batch; prefill here never runs from a graph."""
        if self._since < 0:
            self._since = self.clock()
        self.write(
            f"Prefill batch, #new-seq: {new_requests}, #new-token: {new_tokens}, #cached-token: 0, "
            f"{self._usage(held_tokens)}, #running-req: {running}, #queue-req: {queued}, "
            f"{self.device} graph: False"
        )

    def begin_capture(
        self, width: int, batch_sizes: Sequence[int], backend: str, available_gb: float
    ) -> None:
        """Write the line from which ceiling and width can be read before any decode line exists."""
        self.write(
            f"Capture target verify {self.device.upper()} graph begin. backend={backend}, "
            f"num_tokens_per_req={width}, bs={list(batch_sizes)}, avail mem={available_gb:.2f} GB"
        )

    def end_capture(self, seconds: float, used_gb: float, available_gb: float) -> None:
        """Write the line that closes a capture."""
        self.write(
            f"Capture target verify {self.device.upper()} graph end. elapsed={seconds:.2f} s, "
            f"mem usage={used_gb:.2f} GB, avail mem={available_gb:.2f} GB."
        )

    def _write_decode(self, running: int, held_tokens: int, queued: int, flag: bool | None) -> None:
        now = self.clock()
        seconds = max(now - self._since, 1e-9)
        accept = self._tokens / max(1, self._passes)
        fields = [f"Decode batch, #running-req: {running}", self._usage(held_tokens)]
        if self.width:
            fields += [f"accept len: {accept:.2f}", f"accept rate: {(accept - 1) / self.width:.2f}"]
        if flag is not None:
            fields.append(f"{self.device} graph: {flag}")
        fields += [f"gen throughput (token/s): {self._tokens / seconds:.2f}", f"#queue-req: {queued}"]
        self.write(", ".join(fields))
        self._since, self._tokens, self._passes = now, 0, 0

    def _usage(self, held_tokens: int) -> str:
        return f"#token: {held_tokens}, token usage: {held_tokens / self.pool_tokens:.2f}"
