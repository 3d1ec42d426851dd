"""Graphs on a GPU: torch.cuda.CUDAGraph with one shared pool, and a named reason when a capture breaks."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.decode.capture_watch import CaptureError, HostReadWatch, find_caller, find_refusal
from workbench.rows import first_line


class _Watch(TorchDispatchMode):
    """Refuses what would invalidate the capture before CUDA does, and remembers the last operation."""

    def __init__(self) -> None:
        super().__init__()
        self.last = "the first operation"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func.namespace != "profiler":
            why = find_refusal(func, args, named) or _leaves_device(func, args, named)
            if why:
                raise CaptureError(func.name(), find_caller(), why)
            self.last = func.name()
        return func(*args, **named)


def _leaves_device(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    if func.name() == "aten::_to_copy" and args[0].is_cuda and str(kwargs.get("device") or "cuda") == "cpu":
        return "the data would leave the device; copy it after the step"
    return None


class CudaGraph:
    """One captured graph."""

    nodes = -1  # counted from a trace

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class CudaBackend:
    """Captures on a side stream; memory of all captures comes from the pool that is passed."""

    name = "cuda"

    def __init__(self) -> None:
        self._reserved_bytes = 0

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], object], pool: Any = None) -> CudaGraph:
        """Record `step` without running it."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # else what the capture gives back hides what it takes
        before = torch.cuda.memory_reserved()
        graph, watch, pool = torch.cuda.CUDAGraph(), _Watch(), pool or self.new_pool()
        stream = torch.cuda.current_stream()
        try:
            with (
                torch.no_grad(),
                torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
                HostReadWatch(),
                watch,
            ):
                step()
        except CaptureError:
            self._recover(stream, pool)
            raise
        except Exception as error:
            self._recover(stream, pool)
            root = error.__context__ or error  # leaving a broken capture raises a second error over the first
            raise CaptureError(f"the operation after {watch.last}", "the step", first_line(root)) from error
        self._reserved_bytes += max(0, torch.cuda.memory_reserved() - before)
        return CudaGraph(graph)

    def _recover(self, stream: torch.cuda.Stream, pool: Any) -> None:
        """Leave the capture stream and the pool: torch stays in both when ending a capture fails."""
        torch.cuda.set_stream(stream)
        with contextlib.suppress(RuntimeError):  # says so when the pool has been left already
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        torch.cuda.synchronize()

    def reserved_bytes(self) -> int:
        return self._reserved_bytes
