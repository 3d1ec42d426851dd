"""Latency of calls with a stated mode and L2 state: eager, graph or host; cold, warm or n/a.

Every sample runs all of a call's input pools once, so eager and graph see the same cache. Device time is
taken between two events with the queue filled behind a sleeping kernel: the host is never in it. The span is
the host's clock from an idle device to an idle device, launches included.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from workbench.measure.profilers import nvtx_range, refuse_under_profiler
from workbench.measure.statistics import is_stable, quantile
from workbench.rows import Timing
from workbench.targets import HardwareTarget

Call = Callable[[], object]
Mode = Literal["eager", "graph"]
L2 = Literal["cold", "warm"]
COLD_FACTOR = 4  # x L2: rotating less than this left "cold" data up to 36 % warm
SLEEP_CYCLES_PER_US = 2000  # upper bound of the SM clock, so the sleep is never too short
MAX_CALLS_PER_SAMPLE = 256  # the launch queue is finite


class ImpossibleBandwidth(ValueError):
    """A result above the datasheet's DRAM rate: the cache was not cold or the bytes are miscounted."""


def pools_needed(bytes_per_call: int, target: HardwareTarget) -> int:
    """Distinct input pools that together are at least 4 x L2; 1 on cpu."""
    if bytes_per_call < 1:
        raise ValueError(f"bytes_per_call={bytes_per_call} must be at least 1: count what one call reads")
    if target.backend == "cpu":
        return 1
    return max(2, -(-COLD_FACTOR * l2_bytes(target) // bytes_per_call))


def l2_bytes(target: HardwareTarget) -> int:
    """L2 of the target, or of the device here when that is larger."""
    import torch

    here = torch.cuda.get_device_properties().L2_cache_size if torch.cuda.is_available() else 0
    return max(target.l2_bytes, here)


@dataclass
class Prepared:
    """A call made ready for sampling: warmed up, captured when the mode is graph."""

    calls: Sequence[Call]  # one sample runs all of them
    target: HardwareTarget
    mode: Mode
    l2: L2
    bytes_per_call: int = 0
    graph: Any = None
    sleep_cycles: int = 0
    samples: list[float] = field(default_factory=list)
    spans: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Every call of one sample, launched but not waited for."""
        if self.graph is not None:
            self.graph.replay()
        else:
            for call in self.calls:
                call()

    def sample(self) -> None:
        """Append one sample, in microseconds per call."""
        if self.target.backend == "cpu":
            start = time.perf_counter_ns()
            self.run()
            self.samples.append((time.perf_counter_ns() - start) / 1e3 / len(self.calls))
            return
        import torch

        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(self.sleep_cycles)
        begin.record()
        self.run()
        end.record()
        end.synchronize()
        self.samples.append(begin.elapsed_time(end) * 1e3 / len(self.calls))

    def sample_span(self) -> None:
        """Append one end-to-end span: idle device, launches, work, idle device; microseconds per call."""
        synchronize(self.target)
        start = time.perf_counter_ns()
        self.run()
        synchronize(self.target)
        self.spans.append((time.perf_counter_ns() - start) / 1e3 / len(self.calls))

    def timing(self) -> Timing:
        """The distribution so far. Raises ImpossibleBandwidth for a cold result above the DRAM peak."""
        on_cpu = self.target.backend == "cpu"
        median_us = quantile(self.samples, 0.5)
        check_bandwidth(self.bytes_per_call, median_us, self.target, "n/a" if on_cpu else self.l2)
        return Timing(
            mode="host" if on_cpu else self.mode,
            l2="n/a" if on_cpu else self.l2,
            n=len(self.samples),
            median_us=median_us,
            p10_us=quantile(self.samples, 0.1),
            p90_us=quantile(self.samples, 0.9),
            samples=tuple(round(s, 3) for s in self.samples),
            stable=is_stable(self.samples),
            span_us=quantile(self.spans, 0.5) if self.spans else None,
        )


def check_bandwidth(bytes_moved: int, latency_us: float, target: HardwareTarget, l2: str) -> None:
    """Raise ImpossibleBandwidth when `bytes_moved` cannot have come from DRAM in that time; warm data may."""
    gbps = bytes_moved / (latency_us * 1e3)
    if l2 != "warm" and gbps > target.dram_peak_gbps:
        raise ImpossibleBandwidth(
            f"{gbps:.0f} GB/s is above {target.name}'s peak of {target.dram_peak_gbps:.0f} GB/s: "
            "the cache was not cold or the bytes are miscounted"
        )


@contextmanager
def one_thread(target: HardwareTarget) -> Iterator[None]:
    """On cpu, compute with one thread: the scheduling of threads is not what is timed."""
    import torch

    threads = torch.get_num_threads()
    if target.backend == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def synchronize(target: HardwareTarget) -> None:
    """Wait for the device; nothing on cpu."""
    if target.backend == "cuda":
        import torch

        torch.cuda.synchronize()


def prepare(
    calls: Call | Sequence[Call],
    *,
    target: HardwareTarget,
    mode: Mode = "eager",
    l2: L2 = "warm",
    bytes_per_call: int = 0,
    warmup: int = 2,
) -> Prepared:
    """Warm up and, for graph mode, capture.

    `calls` do the same work, each on its own input pool. Raises ValueError when the pools cannot keep L2
    cold, for graph mode on cpu, and under a profiler; a failing call raises what it raises.
    """
    pools = [calls] if callable(calls) else list(calls)
    _check_request(pools, target, mode, l2, bytes_per_call)
    if target.backend == "cuda" and l2 == "warm":
        pools = pools[:1] * 8
    prepared = Prepared(pools, target, mode, l2, bytes_per_call)
    for _ in range(max(1, warmup)):
        pools[0]()
    synchronize(target)
    if target.backend == "cuda":
        _prepare_cuda(prepared)
    return prepared


def _check_request(
    pools: Sequence[Call], target: HardwareTarget, mode: str, l2: str, bytes_per_call: int
) -> None:
    refuse_under_profiler()
    if mode not in ("eager", "graph") or l2 not in ("cold", "warm"):
        raise ValueError(f"mode={mode!r}, l2={l2!r}: choose eager or graph, cold or warm")
    if not pools:
        raise ValueError("no calls to time: pass at least one")
    if target.backend == "cpu":
        if mode == "graph":
            raise ValueError(
                "mode='graph' on target 'cpu': a tape replay is an ordinary call, time it with mode='eager'"
            )
        return
    if l2 == "cold":
        needed = pools_needed(bytes_per_call, target)
        if len(pools) < needed:
            raise ValueError(
                f"{len(pools)} pools of {bytes_per_call} bytes stay in L2: pass at least {needed}"
            )
    if len(pools) > MAX_CALLS_PER_SAMPLE:
        raise ValueError(f"{len(pools)} pools overflow the launch queue: pass at most {MAX_CALLS_PER_SAMPLE}")


def _prepare_cuda(prepared: Prepared) -> None:
    import torch

    for call in prepared.calls:
        call()
    torch.cuda.synchronize()
    if prepared.mode == "graph":
        prepared.graph = capture(prepared.calls)
    start = time.perf_counter_ns()
    prepared.run()
    enqueue_us = (time.perf_counter_ns() - start) / 1e3
    torch.cuda.synchronize()
    prepared.sleep_cycles = int((1.5 * enqueue_us + 30) * SLEEP_CYCLES_PER_US)


def capture(calls: Sequence[Call]) -> Any:
    """One CUDA graph of all calls; unlike torch.cuda.graph it collects no garbage and empties no cache."""
    import torch

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for call in calls:
                call()
        except BaseException:
            with suppress(RuntimeError):  # the capture is invalid already; the first error tells why
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def sample_together(
    prepared: Mapping[str, Prepared], *, n: int = 20, budget_s: float = 10.0, seed: int = 0
) -> None:
    """Take `n` samples of each, one of each per round in random order; at least 3 before `budget_s` ends it.

    Drift of clocks and temperature then falls on all alike. The spans follow, a fifth as many.
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1")
    order, stop = random.Random(seed), time.monotonic() + budget_s
    names = list(prepared)
    for index in range(n):
        if index >= 3 and time.monotonic() > stop:
            break
        for name in order.sample(names, len(names)):
            with nvtx_range(name):
                prepared[name].sample()
    for _ in range(max(1, n // 5)):
        for name in order.sample(names, len(names)):
            prepared[name].sample_span()


def measure(
    calls: Call | Sequence[Call],
    *,
    target: HardwareTarget,
    mode: Mode = "eager",
    l2: L2 = "warm",
    n: int = 20,
    bytes_per_call: int = 0,
    budget_s: float = 10.0,
) -> Timing:
    """Latency of one call; `prepare` names the arguments and errors. On cpu the host clock is used."""
    one = prepare(calls, target=target, mode=mode, l2=l2, bytes_per_call=bytes_per_call)
    sample_together({"call": one}, n=n, budget_s=budget_s)
    return one.timing()
