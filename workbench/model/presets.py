"""Named models to measure with: the trained pair, one tensor-parallel rank of Kimi K2, DeepSeek-V2-Lite."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from workbench.model.config import DrafterConfig, MoEConfig, TargetConfig, Yarn
from workbench.model.drafter import Drafter
from workbench.model.pair import random_drafter, random_target
from workbench.model.target import Target
from workbench.model.weights import load_pair, load_target

RANKS = 8

# moonshotai/Kimi-K2-Instruct-0905 and K2.5/K2.6's text part, config.json
KIMI_K2 = TargetConfig(
    name="kimi-k2",
    vocab_size=163_840,
    hidden_size=7168,
    num_layers=61,
    num_heads=64,
    q_lora=1536,
    latent=512,
    rope=64,
    nope=128,
    v_head_dim=128,
    intermediate_size=18_432,
    first_dense=1,
    moe=MoEConfig(routed=384, per_token=8, width=2048, shared=1, scaling=2.827),
    norm_eps=1e-5,
    rope_theta=50_000.0,
    yarn=Yarn(64.0, 4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
    max_position=262_144,
    tap_layers=(1, 12, 24, 35, 47, 58),
    bos_token_id=163_584,
    eos_token_ids=(163_586,),
)
# z-lab/Kimi-K2.5-DFlash; an MLP width of 18,432 is what makes its checkpoint 6.48 GiB
KIMI_DRAFTER = DrafterConfig(
    hidden_size=7168,
    num_layers=6,
    num_heads=64,
    kv_heads=8,
    head_dim=128,
    intermediate_size=18_432,
    block_size=8,
    mask_token_id=163_838,
    tap_layers=KIMI_K2.tap_layers,
    vocab_size=163_840,
    norm_eps=1e-5,
)
# deepseek-ai/DeepSeek-V2-Lite, config.json
DEEPSEEK_V2_LITE = TargetConfig(
    name="deepseek-v2-lite",
    vocab_size=102_400,
    hidden_size=2048,
    num_layers=27,
    num_heads=16,
    latent=512,
    rope=64,
    nope=128,
    v_head_dim=128,
    intermediate_size=10_944,
    first_dense=1,
    moe=MoEConfig(
        routed=64, per_token=6, width=1408, shared=2, scoring="softmax", selection="greedy", normalise=False
    ),
    yarn=Yarn(40.0, 4096, beta_fast=32.0, beta_slow=1.0, mscale=0.707, mscale_all_dim=0.707),
    max_position=163_840,
    bos_token_id=100_000,
    eos_token_ids=(100_001,),
)


@dataclass(frozen=True)
class Preset:
    """A model to build or load. `real` is what it stands for, per rank, at the real model's expert bytes."""

    name: str
    target: TargetConfig
    drafter: DrafterConfig | None
    summary: str
    real: TargetConfig | None = None
    real_expert_bits: float = 16.0  # per expert weight, scales included
    left_out: tuple[str, ...] = ()  # what one rank alone does not do


def rank_config(config: TargetConfig, ranks: int, **changes: object) -> TargetConfig:
    """One tensor-parallel rank: heads, MLP and expert widths and vocabulary divided, the rest whole."""
    moe = config.moe and replace(config.moe, width=config.moe.width // ranks)
    return replace(
        config,
        num_heads=config.num_heads // ranks,
        intermediate_size=config.intermediate_size // ranks,
        vocab_size=config.vocab_size // ranks,
        moe=moe,
        **changes,  # type: ignore[arg-type]
    )


def rank_drafter(config: DrafterConfig, ranks: int) -> DrafterConfig:
    """One rank of a tensor-parallel drafter; the fc over the taps is whole."""
    vocab = config.vocab_size // ranks
    return replace(
        config,
        num_heads=config.num_heads // ranks,
        kv_heads=max(1, config.kv_heads // ranks),
        intermediate_size=config.intermediate_size // ranks,
        vocab_size=vocab,
        mask_token_id=vocab - 2,
    )


def k2_rank(name: str, *, resident: int = 0, shared_layers: int = 0) -> Preset:
    rank = rank_config(KIMI_K2, RANKS, name=name, shared_layers=shared_layers)
    rank = replace(rank, bos_token_id=None, eos_token_ids=())  # ids of the whole vocabulary mean nothing here
    assert rank.moe is not None
    stored = (
        f"{resident} of 384 experts per layer"
        if resident
        else f"all experts, {shared_layers} distinct layers"
    )
    return Preset(
        name=name,
        target=replace(rank, moe=replace(rank.moe, resident=resident)),
        drafter=rank_drafter(KIMI_DRAFTER, RANKS),
        summary=f"one TP{RANKS} rank of Kimi K2, random bf16 weights, {stored}",
        real=replace(rank, name=f"kimi-k2 TP{RANKS} rank", shared_layers=0),
        real_expert_bits=4.5,  # int4 with one bf16 scale per 32
        left_out=(
            "all-reduce of [T, 7168] after each attention and each MLP or MoE: 122 per step",
            "all-reduce of the embedding's [T, 7168] (the vocabulary is sharded)",
            "all-gather of the logits [T, 163840]; this rank's argmax is over its own 20480 tokens",
        ),
    )


PRESETS: dict[str, Preset] = {
    "k2-rank": k2_rank("k2-rank", resident=128),
    "k2-rank-shared": k2_rank("k2-rank-shared", shared_layers=4),
    "dsv2-lite": Preset("dsv2-lite", DEEPSEEK_V2_LITE, None, "DeepSeek-V2-Lite, from a checkpoint folder"),
}


def preset(name: str) -> Preset:
    """The preset called `name`. Raises ValueError that lists the known ones."""
    if name not in PRESETS:
        raise ValueError(
            f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}, tiny, or a model folder"
        )
    return PRESETS[name]


def build(
    name: str, *, device: str = "cpu", dtype: str | None = None, seed: int = 0, folder: str | None = None
) -> tuple[Target, Drafter | None]:
    """A target and its drafter, if it has one: `tiny` and folders are read, `k2-rank*` are random.

    A folder is a checkpoint, with `drafter/` beside its weights or without.
    Raises ValueError for an unknown name and for dsv2-lite without a checkpoint folder.
    """
    if name == "tiny" or (Path(name) / "drafter").is_dir():
        return load_pair(name, device=device, dtype=dtype)
    if Path(name).is_dir():
        return load_target(name, device=device, dtype=dtype), None
    chosen = preset(name)
    if name == "dsv2-lite":
        if folder is None:
            raise ValueError(
                "preset 'dsv2-lite' has no weights of its own: give the folder of its checkpoint"
            )
        return load_target(folder, device=device, dtype=dtype), None
    target = random_target(replace(chosen.target, dtype=dtype or "bf16"), seed, torch.device(device))
    if chosen.drafter is None:
        return target, None
    return target, random_drafter(replace(chosen.drafter, dtype=dtype or "bf16"), target, seed + 1)


@dataclass(frozen=True)
class StepReads:
    """Bytes of weights and KV that one step moves, expected under even routing."""

    attention: float
    dense: float  # dense MLP, shared experts, routers
    experts: float
    distinct_experts: float  # expected per layer
    head: float
    kv: float

    @property
    def total(self) -> float:
        return self.attention + self.dense + self.experts + self.head + self.kv


def step_reads(config: TargetConfig, *, tokens: int, kv_tokens: int, expert_bits: float = 16.0) -> StepReads:
    """What a step of `tokens` rows over `kv_tokens` cached tokens reads.

    Distinct experts of E held, T tokens with k picks each: E * (1 - (1 - k / E) ** T).
    """
    experts = distinct = 0.0
    if config.moe:
        held = config.moe.resident_experts
        distinct = held * (1 - (1 - config.moe.per_token / held) ** tokens)
        experts = config.moe_layers * distinct * config.expert_params * expert_bits / 8
    attention = config.num_layers * config.attention_params * 2
    dense = (config.dense_params - config.embedding_params) * 2 - attention
    head = config.vocab_size * config.hidden_size * 2
    return StepReads(attention, dense, experts, distinct, head, kv_tokens * config.kv_bytes_per_token)


def compare_reads(chosen: Preset, *, tokens: int, kv_tokens: int) -> str:
    """One paragraph: what a step of this preset reads beside what a rank of the real model reads."""
    own = step_reads(chosen.target, tokens=tokens, kv_tokens=kv_tokens)
    text = f"{chosen.name}: {describe_reads(own)}"
    if chosen.real is None:
        return text
    real = step_reads(chosen.real, tokens=tokens, kv_tokens=kv_tokens, expert_bits=chosen.real_expert_bits)
    left_out = "; ".join(chosen.left_out)
    return f"{text}. {chosen.real.name}: {describe_reads(real)}. Left out: {left_out}."


def describe_reads(reads: StepReads) -> str:
    return (
        f"{reads.total / 1e9:.1f} GB a step (experts {reads.experts / 1e9:.1f}, about "
        f"{reads.distinct_experts:.0f} distinct per layer; attention {reads.attention / 1e9:.1f}, "
        f"KV {reads.kv / 1e9:.1f}, rest {(reads.dense + reads.head) / 1e9:.1f})"
    )
