"""Graphs of a step: what every backend offers, and the CPU backend, a tape of the operations that ran.

The tape stands for a CUDA graph where there is none. Capture runs the step once and records each dispatched
operation (aten and custom) with the tensors it read and wrote; replay runs the operations again on those very
tensors. The step's Python does not run: a counter in it stands still, a rebound input has no effect, a write
in place does. What differs from CUDA: the capture itself executes, so it is done on dummy rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench.decode.capture_watch import CaptureError, HostReadWatch, find_caller, find_refusal

_RECORDING: list["Tape"] = []


class Graph(Protocol):
    """A recorded step."""

    @property
    def nodes(self) -> int:
        """Operations of one replay; -1 where only a trace can tell."""
        ...

    def replay(self) -> None:
        """Run what was recorded on the tensors it was recorded with."""
        ...


class GraphBackend(Protocol):
    """Makes graphs on one kind of device."""

    name: str  # "tape" or "cuda"

    def new_pool(self) -> Any:
        """A memory pool that several captures share."""
        ...

    def capture(self, step: Callable[[], object], pool: Any = None) -> Graph:
        """Record `step`. Raises CaptureError that names the operation; the process stays usable."""
        ...

    def reserved_bytes(self) -> int:
        """Memory that captures hold so far."""
        ...


def is_recording() -> bool:
    """True while a tape is being recorded."""
    return bool(_RECORDING)


def record_host_node(node: Callable[[], None]) -> None:
    """Make every replay of the tape being recorded run `node` too: a clock's mark, as an event in a graph."""
    if _RECORDING:
        _RECORDING[-1].instructions.append(node)


@dataclass(frozen=True)
class Recompute:
    """Run an operation again and put its results into the tensors of the recording."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[torch.Tensor, ...]

    def __call__(self) -> None:
        new = self.func(*self.args, **self.kwargs)
        for old, value in zip(self.results, (new,) if isinstance(new, torch.Tensor) else tree_leaves(new)):
            old.copy_(value)


def rerun(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
    """Run an operation that writes into its arguments again; a partial of its C++ entry, no Python frame."""
    return partial(getattr(func, "_op", func), *args, **kwargs)


class Tape:
    """The recorded operations; holding them keeps every tensor they touch at its address."""

    def __init__(self) -> None:
        self.instructions: list[Callable[[], object]] = []
        self.ops: list[str] = []
        self.reserved_bytes = 0

    @property
    def nodes(self) -> int:
        return len(self.ops)

    def replay(self) -> None:
        with torch.no_grad(), torch.profiler.record_function("tape_launch"):
            for instruction in self.instructions:
                instruction()

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Append what a replay has to do for this operation; a view of an input needs nothing."""
        outputs = tuple(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        if func._schema.is_mutable:
            self.instructions.append(rerun(func, args, kwargs))
        elif not outputs or _is_view(outputs, args, kwargs):
            return
        else:
            self.reserved_bytes += sum(o.untyped_storage().nbytes() for o in outputs)
            if func.name() in (
                "aten::empty.memory_format",
                "aten::empty_like",
                "aten::empty_strided",
                "aten::new_empty",
            ):
                return
            self.instructions.append(_recompute(func, args, kwargs, outputs))
        self.ops.append(func.name())


def _is_view(outputs: tuple[torch.Tensor, ...], args: Any, kwargs: Any) -> bool:
    inputs = {
        leaf.untyped_storage()._cdata
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor)
    }
    return all(o.untyped_storage()._cdata in inputs for o in outputs)


def _recompute(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[torch.Tensor, ...]
) -> Callable[[], object]:
    """The out= form where the operation has one with the same arguments, else run it and copy."""
    form = _out_form(func)
    if form is None or len(outputs) != len(form[1]):
        return Recompute(func, args, kwargs, outputs)
    return rerun(form[0], args, kwargs | dict(zip(form[1], outputs)))


def _out_form(func: Any) -> tuple[Any, list[str]] | None:
    """(out overload, names of its out arguments) that takes exactly the arguments of `func`."""
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    if func.namespace != "aten" or any(name in ("dtype", "device") for name, _ in wanted):
        return None
    for overload in func.overloadpacket.overloads():
        candidate = getattr(func.overloadpacket, overload)
        arguments = candidate._schema.arguments
        plain = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if plain == wanted and len(plain) < len(arguments):
            return candidate, [a.name for a in arguments if a.is_out]
    return None


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func.namespace == "profiler":
            return func(*args, **named)
        if (
            func._can_decompose()
        ):  # under inference mode composites arrive whole; what breaks a capture is inside
            with self:
                return func.decompose(*args, **named)
        why = find_refusal(func, args, named)
        if why:
            raise CaptureError(func.name(), find_caller(), why)
        result = func(*args, **named)
        self.tape.record(func, args, named, result)
        return result


class TapeBackend:
    """Graphs on the CPU. The pool is a list of tapes: it shares nothing, it only counts what they hold."""

    name = "tape"

    def __init__(self) -> None:
        self._reserved_bytes = 0

    def new_pool(self) -> None:
        return None

    def capture(self, step: Callable[[], object], pool: Any = None) -> Tape:
        """Run `step` once and record it. `pool` is not needed here."""
        if _RECORDING:
            raise CaptureError(
                "a capture", find_caller(), "another capture is being recorded; finish it first"
            )
        tape = Tape()
        _RECORDING.append(tape)
        try:
            with torch.no_grad(), HostReadWatch(), _Recorder(tape):
                step()
        except CaptureError:
            raise
        except Exception as error:
            last = tape.ops[-1] if tape.ops else "the first operation"
            raise CaptureError(
                f"the operation after {last}", "the step", f"{type(error).__name__}: {error}"
            ) from error
        finally:
            _RECORDING.pop()
        self._reserved_bytes += tape.reserved_bytes
        return tape

    def reserved_bytes(self) -> int:
        return self._reserved_bytes


def make_backend(device: torch.device | str) -> GraphBackend:
    """The graph backend of `device`. Raises ValueError for a device without graphs."""
    kind = torch.device(device).type
    if kind == "cpu":
        return TapeBackend()
    if kind == "cuda":
        from workbench.decode.cuda_graph import CudaBackend

        return CudaBackend()
    raise ValueError(f"device {kind!r} has no graphs: use mode='eager', or a cpu or cuda target")
