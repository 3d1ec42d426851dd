"""A target with its drafter: untrained for tests, or read from a folder of weights."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from workbench.model.config import DrafterConfig, MoEConfig, TargetConfig
from workbench.model.drafter import Drafter
from workbench.model.target import Target

MASK, END = 256, 257  # behind the 256 byte values; END stands before and behind every document
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

TINY_TARGET = TargetConfig(
    name="tiny",
    vocab_size=264,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    latent=128,
    rope=32,
    nope=32,
    v_head_dim=64,
    intermediate_size=704,
    first_dense=3,
    moe=MoEConfig(routed=8, per_token=2, width=128, shared=1),
    max_position=2048,
    tap_layers=(1, 2, 3),
    bos_token_id=END,
    eos_token_ids=(END,),
    mask_token_id=MASK,
)
TINY_DRAFTER = DrafterConfig(
    hidden_size=256,
    num_layers=2,
    num_heads=8,
    kv_heads=2,
    head_dim=32,
    intermediate_size=512,
    block_size=8,
    mask_token_id=MASK,
    tap_layers=(1, 2, 3),
    vocab_size=264,
)


@contextlib.contextmanager
def built_as(device: torch.device | str, dtype: torch.dtype) -> Iterator[None]:
    """Modules built inside live on `device` in `dtype` from the start: no second copy in fp32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def empty_target(config: TargetConfig, device: torch.device | str = "cpu") -> Target:
    """A target in `config.dtype` whose matrices are uninitialised memory."""
    with built_as("meta", DTYPES[config.dtype]):
        target = Target(config)
    target.to_empty(device=device)
    if config.tie_embeddings:
        target.lm_head.weight = target.embed_tokens.weight
    target.rotary.frequencies.copy_(target.rotary.make_frequencies())
    return target.eval().requires_grad_(False)


def empty_drafter(config: DrafterConfig, target: Target) -> Drafter:
    """A drafter on the target's device, in `config.dtype`, uninitialised."""
    with built_as("meta", DTYPES[config.dtype]):
        drafter = Drafter(config, target)
    drafter.to_empty(device=target.device)
    drafter.rotary.frequencies.copy_(drafter.rotary.make_frequencies())
    return drafter.eval().requires_grad_(False)


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, std: float = 0.02) -> None:
    """Normal(0, std) matrices from a generator on the model's own device; norms one, biases zero."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("frequencies"):
            continue
        if tensor.dim() > 1:
            tensor.normal_(0, std, generator=generator)
        else:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)


def random_target(
    config: TargetConfig, seed: int = 0, device: torch.device | str = "cpu", std: float = 0.02
) -> Target:
    """An untrained target in `config.dtype`."""
    target = empty_target(config, device)
    init_weights(target, seed, std)
    return target


def random_drafter(config: DrafterConfig, target: Target, seed: int = 0, std: float = 0.02) -> Drafter:
    """An untrained drafter on the target's device."""
    drafter = empty_drafter(config, target)
    init_weights(drafter, seed, std)
    return drafter


def random_pair(
    seed: int = 0,
    *,
    dtype: str = "fp32",
    device: str = "cpu",
    target_config: TargetConfig = TINY_TARGET,
    drafter_config: DrafterConfig = TINY_DRAFTER,
    std: float = 0.1,
) -> tuple[Target, Drafter]:
    """An untrained pair, tiny by default. A large `std` keeps its argmax decisions apart from rounding."""
    target = random_target(replace(target_config, dtype=dtype), seed, device, std)
    return target, random_drafter(replace(drafter_config, dtype=dtype), target, seed + 1, std)
