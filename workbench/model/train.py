"""Training of the tiny pair: the target first, then the drafter on the frozen target's hidden states."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.model.config import DrafterConfig, TargetConfig
from workbench.model.corpus import sample_windows
from workbench.model.drafter import Drafter
from workbench.model.moe import Router
from workbench.model.pair import TINY_DRAFTER, TINY_TARGET, random_drafter, random_target
from workbench.model.target import Target

TARGET_SHARE = 0.65  # of the time or the steps; the rest trains the drafter
LOG_EVERY = 20
BIAS_STEP = 1e-3  # per step, towards balanced experts (DeepSeek-V3, section 2.1.2)


@dataclass(frozen=True)
class TrainOptions:
    """What one training run was asked to do; `minutes` wins over `steps` when given."""

    device: str = "cpu"
    seed: int = 0
    steps: int = 1000
    minutes: float | None = None
    batch: int = 4
    context: int = 256
    blocks: int = 32  # anchors per sequence in the drafter's pass
    peak_lr: float = 3e-3
    drafter_lr: float = 2e-3
    weight_decay: float = 0.1
    dropout: float = 0.0  # of the target's residual branches; a small corpus is seen many times
    compiled: bool = False
    target: TargetConfig = TINY_TARGET
    drafter: DrafterConfig = TINY_DRAFTER


@dataclass
class TrainLog:
    """(step, seconds, loss) of every logged step, per phase."""

    curve: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)


def default_options(device: str) -> TrainOptions:
    """Sizes that suit the device: the whole context on a GPU, a short one on a CPU."""
    if device.startswith("cuda"):
        return TrainOptions(device=device, batch=64, context=1024, blocks=96)
    return TrainOptions(device=device)


def schedule(fraction: float, warmup: float = 0.02) -> float:
    """Learning-rate factor: linear warm-up, then a cosine down to 2 % of the peak."""
    if fraction < warmup:
        return max(fraction / warmup, 0.02)
    done = (fraction - warmup) / (1 - warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def progress(options: TrainOptions, share: float) -> Iterator[tuple[int, float]]:
    """(step, fraction done) until this phase's share of the time or of the steps is used."""
    began, step = time.monotonic(), 0
    while True:
        if options.minutes is None:
            fraction = step / max(1, round(options.steps * share))
        else:
            fraction = (time.monotonic() - began) / (options.minutes * 60 * share)
        if fraction >= 1 and step > 0:
            return
        yield step, min(fraction, 1.0)
        step += 1


def make_optimizer(model: nn.Module, lr: float, options: TrainOptions) -> torch.optim.AdamW:
    """AdamW with decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=options.device.startswith("cuda"))


def autocast(options: TrainOptions) -> AbstractContextManager[object]:
    """bf16 on a GPU, plain fp32 on a CPU."""
    if options.device.startswith("cuda"):
        return torch.autocast("cuda", torch.bfloat16)
    return nullcontext()


def target_loss(target: Target, tokens: Tensor, dropout: float) -> tuple[Tensor, list[Tensor]]:
    """Mean cross-entropy in nats per byte over windows [B, T + 1], and each expert's share of the routes."""
    hidden, _, loads = target.score(tokens[:, :-1], dropout)
    logits = target.head(hidden)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), loads


def balance_experts(target: Target, loads: list[Tensor]) -> None:
    """Raise the selection bias of experts that got less than their share, lower it for the others."""
    routers = [module for module in target.modules() if isinstance(module, Router)]
    for router, load in zip(routers, loads):
        router.e_score_correction_bias += BIAS_STEP * torch.sign(load.mean() - load)


def optimise(
    model: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    data: Tensor,
    options: TrainOptions,
    log: TrainLog,
    phase: str,
    report: Callable[[str], None],
) -> None:
    """One phase: sample windows on the device, step, log every LOG_EVERY steps (the only host syncs)."""
    share, peak = (
        (TARGET_SHARE, options.peak_lr) if phase == "target" else (1 - TARGET_SHARE, options.drafter_lr)
    )
    generator = torch.Generator(options.device).manual_seed(options.seed + len(phase))
    optimizer, began = make_optimizer(model, peak, options), time.monotonic()
    curve = log.curve.setdefault(phase, [])
    step = 0
    for step, fraction in progress(options, share):
        for group in optimizer.param_groups:
            group["lr"] = peak * schedule(fraction)
        tokens = sample_windows(data, options.batch, options.context + 1, generator)
        with autocast(options):
            loss = loss_of(tokens)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % LOG_EVERY == 0:
            curve.append((step, round(time.monotonic() - began, 2), round(loss.item(), 4)))
            if step % (LOG_EVERY * 10) == 0:
                report(f"{phase} step {step} ({fraction:.0%}): loss {curve[-1][2]:.3f} nats per byte")
    log.steps[phase], log.seconds[phase] = step + 1, round(time.monotonic() - began, 1)
    log.tokens[phase] = (step + 1) * options.batch * options.context


def train_target(data: Tensor, options: TrainOptions, log: TrainLog, report: Callable[[str], None]) -> Target:
    """A target trained on the uint8 tensor `data`, in fp32."""
    target = random_target(replace(options.target, dtype="fp32"), options.seed, options.device, std=0.04)
    for layer in target.layers:  # keep the residual stream's variance flat with depth
        for linear in (layer.self_attn.o_proj, getattr(layer.mlp, "down_proj", None)):
            if linear is not None:
                linear.weight.data.mul_((2 * options.target.num_layers) ** -0.5)
    target.train().requires_grad_(True)
    step = torch.compile(target_loss) if options.compiled else target_loss

    def loss_of(tokens: Tensor) -> Tensor:
        loss, loads = step(target, tokens, options.dropout)
        balance_experts(target, loads)
        return loss

    optimise(target, loss_of, data, options, log, "target", report)
    return target.eval().requires_grad_(False)


def sample_anchors(options: TrainOptions, batch: int, generator: torch.Generator | None = None) -> Tensor:
    """Random block starts [batch, blocks] with room for a whole block of labels behind each."""
    last = options.context - options.drafter.block_size
    return torch.randint(1, last, (batch, options.blocks), device=options.device, generator=generator)


def draft_blocks(drafter: Drafter, tokens: Tensor, taps: Tensor, anchors: Tensor) -> Tensor:
    """Logits [B, blocks, L, V] of blocks that start at `anchors`, all in one pass over the sequence.

    A block sees the context in front of its anchor and itself, never another block.
    """
    c = drafter.config
    (batch, blocks), length = anchors.shape, taps.shape[1]
    steps = torch.arange(c.block_size, device=tokens.device)
    positions = (anchors[..., None] + steps).flatten(1)  # [B, Q]
    block_tokens = torch.full((batch, blocks, c.block_size), c.mask_token_id, device=tokens.device)
    block_tokens[..., 0] = tokens.gather(1, anchors)
    block_of = torch.arange(blocks, device=tokens.device).repeat_interleave(c.block_size)  # [Q]
    in_context = torch.arange(length, device=tokens.device) < anchors[:, block_of][..., None]  # [B, Q, S]
    in_block = (block_of[:, None] == block_of[None, :]).expand(batch, -1, -1)
    visible = torch.cat((in_context, in_block), dim=-1)[:, None]
    angles = (*drafter.rotary(positions), *drafter.rotary(torch.arange(length, device=tokens.device)))
    context = drafter.context(taps)
    x = drafter.embed(block_tokens.flatten(1))
    for layer in drafter.layers:
        x = x + layer.self_attn(layer.input_layernorm(x), context, angles, visible)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    drafts = drafter.norm(x).unflatten(1, (blocks, c.block_size))[:, :, 1:]
    return drafter.logits(drafts)


def drafter_loss(drafter: Drafter, tokens: Tensor, taps: Tensor, teacher: Tensor, anchors: Tensor) -> Tensor:
    """Cross-entropy against the target's own distribution, weighted exp(-depth / (block / 2)).

    teacher [B, T, V]: the target's logits; row t predicts token t + 1.
    """
    block = drafter.config.block_size
    logits = draft_blocks(drafter, tokens, taps, anchors)  # [B, blocks, L, V]
    rows = anchors[..., None] + torch.arange(block - 1, device=tokens.device)  # predicts tokens anchor+1..
    batch_index = torch.arange(len(tokens), device=tokens.device)[:, None, None]
    wanted = teacher[batch_index, rows].float().softmax(-1)
    losses = -(wanted * logits.log_softmax(-1)).sum(-1)  # [B, blocks, L]
    weights = torch.exp(-torch.arange(block - 1, device=tokens.device) / (block / 2))
    return (losses * weights).mean() / weights.mean()


def train_drafter(
    target: Target, data: Tensor, options: TrainOptions, log: TrainLog, report: Callable[[str], None]
) -> Drafter:
    """A drafter for the frozen `target`, in fp32."""
    target.set_tap_layers(options.drafter.tap_layers)
    drafter = random_drafter(replace(options.drafter, dtype="fp32"), target, options.seed + 1, std=0.04)
    drafter.train().requires_grad_(True)
    loss_fn = torch.compile(drafter_loss) if options.compiled else drafter_loss
    generator = torch.Generator(options.device).manual_seed(options.seed + 2)

    def loss_of(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            hidden, taps, _ = target.score(tokens[:, :-1])
            teacher = target.head(hidden)
        return loss_fn(
            drafter, tokens[:, :-1], taps, teacher, sample_anchors(options, len(tokens), generator)
        )

    optimise(drafter, loss_of, data, options, log, "drafter", report)
    return drafter.eval().requires_grad_(False)
