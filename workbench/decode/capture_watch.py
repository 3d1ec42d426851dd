"""Watches a capture: refuses the operations a recorded step may not contain, and remembers the last one."""

import traceback
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

HOST_READS = {
    "item": ".item()",
    "tolist": ".tolist()",
    "numpy": ".numpy()",
    "__array__": "conversion to NumPy",
    "__bool__": "a branch on a tensor's value",
    "__int__": "int() of a tensor",
    "__float__": "float() of a tensor",
    "__index__": "a tensor used as a Python index",
    "__contains__": "`in` on a tensor",
}
LEAVES_DEVICE = {"cpu": ".cpu()", "pin_memory": ".pin_memory()"}
FROM_HOST_WHY = "a tensor is made from host data; make it before the capture"
FROM_HOST = ("tensor", "as_tensor", "asarray", "from_numpy")


class CaptureError(ValueError):
    """A step that cannot be recorded. `operation` is what broke it, `where` the line that asked for it."""

    def __init__(self, operation: str, where: str, why: str) -> None:
        super().__init__(f"capture broke at {operation} in {where}: {why}")
        self.operation, self.where = operation, where


class HostReadWatch(TorchFunctionMode):
    """Refuses calls that move a tensor's value to the host; some of them never reach the dispatcher."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name in HOST_READS and tensor is not None:
            raise CaptureError(
                HOST_READS[name],
                find_caller(),
                "the host would wait for the device; keep the value in a tensor",
            )
        if name in LEAVES_DEVICE and tensor is not None:
            raise CaptureError(
                LEAVES_DEVICE[name], find_caller(), "the data would leave the device; copy it after the step"
            )
        if name in FROM_HOST and _is_host_array(args, kwargs or {}):
            raise CaptureError(f"torch.{name}", find_caller(), FROM_HOST_WHY)
        return func(*args, **(kwargs or {}))


def _is_host_array(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor would be made of more than one number of the host's; scalars travel as arguments."""
    data = args[0] if args else next((kwargs[name] for name in ("data", "obj") if name in kwargs), 0)
    return not isinstance(data, (torch.Tensor, Number, np.generic))


def find_refusal(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Why this dispatched operation cannot be recorded, or None."""
    tags, name = func.tags, func.name()
    if torch.Tag.data_dependent_output in tags or name in ("aten::is_nonzero", "aten::allclose"):
        return "its result is a value on the host; keep it in a tensor"
    if name == "aten::lift_fresh" and args[0].dim() > 0:  # scalars travel as launch arguments, on CUDA too
        return FROM_HOST_WHY
    if name in ("aten::index.Tensor", "aten::index_put_", "aten::index_put"):
        return _mask_index_refusal(name, args)
    if name == "aten::repeat_interleave.Tensor":
        return (
            None
            if kwargs.get("output_size") is not None
            else "its output size depends on the data: give output_size"
        )
    if torch.Tag.dynamic_output_shape in tags:
        return "its output size depends on the data; write into a tensor of fixed size"
    return None


def _mask_index_refusal(name: str, args: tuple[Any, ...]) -> str | None:
    masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if not masks or (name != "aten::index.Tensor" and args[2].numel() == 1):
        return None
    return "indexing with a mask has a size that depends on the data; use torch.where"


def find_caller() -> str:
    """`file.py:line in function` of the innermost frame outside torch and this package's capture code."""
    for frame in reversed(traceback.extract_stack()):
        path = frame.filename.replace("\\", "/")
        if "/torch/" not in path and not path.endswith(
            ("decode/capture_watch.py", "decode/replay.py", "decode/cuda_graph.py")
        ):
            return f"{path.rsplit('/', 1)[-1]}:{frame.lineno} in {frame.name}"
    return "unknown"
