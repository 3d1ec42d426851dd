"""Weights in safetensors: what a checkpoint stores, checked tensor by tensor, and written back."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from workbench.model.drafter import Drafter
from workbench.model.hf_config import (
    drafter_config,
    read_config,
    target_config,
    text_config,
    to_hf_drafter,
    to_hf_target,
)
from workbench.model.pair import empty_drafter, empty_target
from workbench.model.target import Target
from workbench.targets import ROOT

MODELS_DIR = ROOT / "data" / "models"


class Checkpoint:
    """The safetensors of a folder, single or sharded; block-scaled fp8 is dequantised on read."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder = folder
        self.files = shard_of_tensor(folder)
        self.block = fp8_block(config, folder)
        self.open: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def raw(self, name: str) -> Tensor:
        """The stored tensor. Raises ValueError or FileNotFoundError naming file and tensor."""
        if name not in self.files:
            raise ValueError(f"{self.folder} has no tensor {name!r}: the checkpoint is incomplete")
        path = self.files[name]
        if path not in self.open:
            self.open[path] = open_shard(path, name)
        return self.open[path].get_tensor(name)

    def read(self, name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """The tensor `name`, of exactly `shape`, in floating point."""
        tensor = self.raw(name)
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"{self.files[name]}: tensor {name!r} has shape {list(tensor.shape)}, "
                f"config.json implies {list(shape)}"
            )
        if tensor.dtype == torch.float8_e4m3fn:
            if self.block is None:
                raise ValueError(
                    f"{self.files[name]}: tensor {name!r} is fp8 but config.json names no weight_block_size"
                )
            return dequantise_fp8(tensor, self.raw(f"{name}_scale_inv"), self.block)
        if not tensor.is_floating_point():
            raise ValueError(
                f"{self.files[name]}: tensor {name!r} is {tensor.dtype}, a quantisation not supported"
            )
        return tensor


def shard_of_tensor(folder: Path) -> dict[str, Path]:
    """Which file holds which tensor, from the index or the single file."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    if not single.is_file():
        raise FileNotFoundError(f"{folder} has neither {single.name} nor {index.name}: no weights to load")
    return dict.fromkeys(open_shard(single, "").keys(), single)


def open_shard(path: Path, name: str) -> Any:
    wanted = f" (holds tensor {name!r})" if name else ""
    if not path.is_file():
        raise FileNotFoundError(f"shard {path} is missing{wanted}: download it again")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not readable safetensors{wanted}: {error}") from None


def fp8_block(config: dict[str, Any], folder: Path) -> tuple[int, int] | None:
    """The block of fp8 scales, None without quantisation. Raises ValueError for any other quantisation."""
    quantisation = text_config(config).get("quantization_config")
    if not quantisation:
        return None
    method = quantisation.get("quant_method")
    if method != "fp8" or quantisation.get("fmt", "e4m3") != "e4m3":
        raise ValueError(
            f"{folder / 'config.json'}: quant_method {method!r} is not supported: use a bf16 checkpoint "
            "or one with block-scaled fp8 (e4m3)"
        )
    rows, columns = quantisation.get("weight_block_size") or (128, 128)
    return rows, columns


def dequantise_fp8(tensor: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """weight [R, C] fp8 times scale [ceil(R / rows), ceil(C / columns)], in fp32."""
    rows = scale.float().repeat_interleave(block[0], 0)[: tensor.shape[0]]
    return tensor.float() * rows.repeat_interleave(block[1], 1)[:, : tensor.shape[1]]


def stored_name(name: str) -> str:
    """Checkpoint name of one of the target's own parameters."""
    return name if name.startswith("lm_head") else f"model.{name}"


def target_tensors(target: Target) -> Iterator[tuple[str, Tensor]]:
    """Every (checkpoint name, view of our weight) of a target; stacked experts appear one by one."""
    seen = set()
    for name, tensor in [*target.named_parameters(), *target.named_buffers()]:
        if name.endswith("frequencies") or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        prefix, _, kind = name.rpartition(".experts.")
        moe = target.config.moe
        if name.endswith("e_score_correction_bias") and moe and moe.selection != "noaux_tc":
            continue
        if not prefix:
            yield stored_name(name), tensor
            continue
        for expert in range(len(tensor)):
            at = f"model.{prefix}.experts.{expert}"
            if kind == "down_proj":
                yield f"{at}.down_proj.weight", tensor[expert]
            else:
                gate, up = tensor[expert].chunk(2)
                yield f"{at}.gate_proj.weight", gate
                yield f"{at}.up_proj.weight", up


def fill_experts(target: Target, checkpoint: Checkpoint) -> set[str]:
    """Copy experts that a checkpoint keeps stacked; returns the names done."""
    done = set()
    for name, tensor in target.named_parameters():
        if ".experts." in name and f"model.{name}" in checkpoint:
            tensor.copy_(checkpoint.read(f"model.{name}", tensor.shape))
            prefix, _, kind = name.rpartition(".")
            parts = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
            done |= {f"model.{prefix}.{e}.{part}.weight" for e in range(len(tensor)) for part in parts}
    return done


@torch.no_grad()
def load_target(folder: str | Path, *, device: str = "cpu", dtype: str | None = None) -> Target:
    """A target from a Hugging Face folder, in `dtype` or the checkpoint's own.

    Raises ValueError or FileNotFoundError naming the file and the tensor that is wrong.
    """
    folder = Path(folder)
    data = read_config(folder)
    config = target_config(data, folder)
    checkpoint = Checkpoint(folder, data)
    target = empty_target(replace(config, dtype=dtype or config.dtype), device)
    done = fill_experts(target, checkpoint)
    for name, tensor in target_tensors(target):
        if name not in done:
            tensor.copy_(checkpoint.read(name, tensor.shape))
    return target


@torch.no_grad()
def load_drafter(folder: str | Path, target: Target) -> Drafter:
    """A DFlash drafter in the published layout, on the target's device and in its dtype.

    Raises ValueError when it was made for another target (hidden size, tap layers).
    """
    folder = Path(folder)
    data = read_config(folder)
    config = drafter_config(data, folder)
    if config.hidden_size != target.config.hidden_size or max(config.tap_layers) >= target.config.num_layers:
        raise ValueError(
            f"{folder / 'config.json'}: hidden_size={config.hidden_size}, target_layer_ids="
            f"{list(config.tap_layers)} do not fit target {target.config.name!r}: it has hidden_size="
            f"{target.config.hidden_size} and {target.config.num_layers} layers"
        )
    checkpoint = Checkpoint(folder, data)
    drafter = empty_drafter(replace(config, dtype=target.config.dtype), target)
    for name, tensor in drafter.named_parameters():
        tensor.copy_(checkpoint.read(name, tensor.shape))
    target.set_tap_layers(config.tap_layers)
    return drafter


def load_pair(
    name: str | Path = "tiny", *, device: str = "cpu", dtype: str | None = None
) -> tuple[Target, Drafter]:
    """The pair `data/models/<name>`, or a folder that holds a target and `drafter/` beside it."""
    folder = Path(name) if Path(name).is_dir() else MODELS_DIR / name
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no model {str(name)!r}: neither a folder nor in {MODELS_DIR}; run `workbench train`"
        )
    if not (folder / "drafter").is_dir():
        raise FileNotFoundError(
            f"{folder / 'drafter'} does not exist: {folder} holds a target without a drafter"
        )
    target = load_target(folder, device=device, dtype=dtype)
    return target, load_drafter(folder / "drafter", target)


def save_pair(target: Target, drafter: Drafter, folder: Path) -> None:
    """Write both as bf16 safetensors with their config.json, in the layouts `load_pair` reads."""
    (folder / "drafter").mkdir(parents=True, exist_ok=True)
    write_model(folder, dict(target_tensors(target)), to_hf_target(target.config))
    write_model(folder / "drafter", dict(drafter.named_parameters()), to_hf_drafter(drafter.config))


def write_model(
    folder: Path, tensors: dict[str, Tensor] | dict[str, nn.Parameter], config: dict[str, Any]
) -> None:
    stored = {}
    for name, tensor in tensors.items():
        keep = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        stored[name] = tensor.detach().to("cpu", keep).contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
