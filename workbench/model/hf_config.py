"""Hugging Face `config.json` <-> our configurations: DeepSeek-V2/V3, Kimi-K2 and DFlash drafters."""

import json
from pathlib import Path
from typing import Any, cast

from workbench.model.config import DrafterConfig, MoEConfig, Scoring, Selection, TargetConfig, Yarn

TARGET_MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint folder; its errors name the file."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give a folder with config.json and safetensors")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): download it again") from None


def require(data: dict[str, Any], key: str, path: Path) -> Any:
    if data.get(key) is None:
        raise ValueError(f"{path} has no {key!r}: it is not the config.json of a supported model")
    return data[key]


def text_config(data: dict[str, Any]) -> dict[str, Any]:
    """The language part of a multimodal config (Kimi-K2.5 nests it), else the config itself."""
    inner = data.get("text_config")
    return {**inner, **{k: data[k] for k in ("quantization_config",) if k in data}} if inner else data


def target_config(data: dict[str, Any], folder: Path) -> TargetConfig:
    """The target that config.json describes. Raises ValueError for an architecture that is not supported."""
    path, data = folder / "config.json", text_config(data)
    kind = data.get("model_type")
    if kind not in TARGET_MODEL_TYPES:
        raise ValueError(
            f"{path} has model_type {kind!r} (architectures {data.get('architectures')}): "
            f"supported are {', '.join(TARGET_MODEL_TYPES)}"
        )
    theta, yarn = rope_parameters(data, path)
    layers = require(data, "num_hidden_layers", path)
    moe = moe_config(data, path) if data.get("n_routed_experts") else None
    eos = data.get("eos_token_id")
    return TargetConfig(
        name=folder.name,
        vocab_size=require(data, "vocab_size", path),
        hidden_size=require(data, "hidden_size", path),
        num_layers=layers,
        num_heads=require(data, "num_attention_heads", path),
        q_lora=data.get("q_lora_rank"),
        latent=require(data, "kv_lora_rank", path),
        rope=require(data, "qk_rope_head_dim", path),
        nope=require(data, "qk_nope_head_dim", path),
        v_head_dim=require(data, "v_head_dim", path),
        intermediate_size=require(data, "intermediate_size", path),
        first_dense=data.get("first_k_dense_replace", 0) if moe else layers,
        moe=moe,
        attention_bias=bool(data.get("attention_bias", False)),
        norm_eps=data.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        yarn=yarn,
        rope_interleave=bool(data.get("rope_interleave", True)),
        tie_embeddings=bool(data.get("tie_word_embeddings", False)),
        max_position=data.get("max_position_embeddings", 4096),
        tap_layers=tuple(data.get("tap_layers", ())),
        dtype=checkpoint_dtype(data, path),
        bos_token_id=data.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        mask_token_id=data.get("mask_token_id"),
    )


def moe_config(data: dict[str, Any], path: Path) -> MoEConfig:
    is_v2 = data["model_type"] == "deepseek_v2"
    selection = data.get("topk_method") or ("greedy" if is_v2 else "noaux_tc")
    scoring = data.get("scoring_func") or ("softmax" if is_v2 else "sigmoid")
    scoring, selection = cast(Scoring, scoring), cast(Selection, selection)
    if (scoring, selection) not in (
        ("sigmoid", "noaux_tc"),
        ("softmax", "greedy"),
        ("softmax", "group_limited_greedy"),
    ):
        raise ValueError(
            f"{path} routes with scoring_func={scoring!r}, topk_method={selection!r}: not supported"
        )
    if data.get("moe_layer_freq", 1) != 1:
        raise ValueError(f"{path} has moe_layer_freq={data['moe_layer_freq']}: only 1 is supported")
    normalise = bool(data.get("norm_topk_prob", not is_v2))
    if is_v2 and normalise:
        raise ValueError(f"{path} has norm_topk_prob=true with softmax routing: not supported")
    return MoEConfig(
        routed=data["n_routed_experts"],
        per_token=require(data, "num_experts_per_tok", path),
        width=require(data, "moe_intermediate_size", path),
        shared=data.get("n_shared_experts") or 0,
        groups=data.get("n_group") or 1,
        groups_kept=data.get("topk_group") or 1,
        scoring=scoring,
        selection=selection,
        normalise=normalise,
        scaling=data.get("routed_scaling_factor", 1.0),
    )


def rope_parameters(data: dict[str, Any], path: Path) -> tuple[float, Yarn | None]:
    """(theta, YaRN) from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (earlier)."""
    scaling = data.get("rope_parameters") or data.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", data.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ValueError(f"{path} scales positions by {kind!r}: supported are default and yarn")
    original = require(scaling, "original_max_position_embeddings", path)
    factor = scaling.get("factor") or data["max_position_embeddings"] / original
    return theta, Yarn(
        factor=factor,
        original_max_position=original,
        beta_fast=scaling.get("beta_fast") or 32.0,
        beta_slow=scaling.get("beta_slow") or 1.0,
        mscale=scaling.get("mscale"),
        mscale_all_dim=scaling.get("mscale_all_dim"),
        attention_factor=scaling.get("attention_factor"),
        truncate=scaling.get("truncate", True),
    )


def checkpoint_dtype(data: dict[str, Any], path: Path) -> str:
    name = data.get("dtype") or data.get("torch_dtype") or "bfloat16"
    if name not in DTYPE_NAMES:
        raise ValueError(f"{path} has dtype {name!r}: supported are {', '.join(DTYPE_NAMES)}")
    return DTYPE_NAMES[name]


def expert_quantisation(data: dict[str, Any], folder: Path) -> str:
    """How a checkpoint stores its routed experts, as a name of `capacity.QUANTISATIONS`."""
    quantisation = text_config(data).get("quantization_config")
    if not quantisation:
        return "bf16"
    method = quantisation.get("quant_method")
    if method == "fp8":
        return "fp8"
    groups = quantisation.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    if method == "compressed-tensors" and weights and weights[0].get("num_bits") == 4:
        return "int4-g32" if weights[0].get("group_size") == 32 else refuse_quantisation(folder, method)
    return refuse_quantisation(folder, method)


def refuse_quantisation(folder: Path, method: object) -> str:
    raise ValueError(
        f"{folder / 'config.json'}: quantisation {method!r} is not known: name one with --quantisation"
    )


def drafter_config(data: dict[str, Any], folder: Path) -> DrafterConfig:
    """A published DFlash drafter; `block_size` and the rest may stand in `dflash_config` or beside it."""
    path = folder / "config.json"
    own = {**data, **data.get("dflash_config", {})}
    architectures = data.get("architectures") or []
    if "target_layer_ids" not in own or "selector_rank" in own:
        raise ValueError(
            f"{path} ({architectures}) is no DFlash drafter: want dflash_config.target_layer_ids"
        )
    theta, yarn = rope_parameters(data, path)
    layers = require(data, "num_hidden_layers", path)
    heads, hidden = require(data, "num_attention_heads", path), require(data, "hidden_size", path)
    return DrafterConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        kv_heads=require(data, "num_key_value_heads", path),
        head_dim=data.get("head_dim") or hidden // heads,
        intermediate_size=require(data, "intermediate_size", path),
        block_size=int(own.get("block_size", 16)),
        mask_token_id=require(own, "mask_token_id", path),
        tap_layers=tuple(own["target_layer_ids"]),
        vocab_size=require(data, "vocab_size", path),
        norm_eps=data.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        yarn=yarn,
        sliding_window=data.get("sliding_window"),
        layer_types=tuple(data.get("layer_types") or ()),
        is_causal=data.get("is_causal"),
        embedding_scale=float(own.get("input_embedding_scale", 1.0)),
        logit_scale=float(own.get("output_multiplier", 1.0)),
        logit_cap=float(own.get("final_logit_softcapping") or 0.0),
        dtype=checkpoint_dtype(data, path),
    )


def to_hf_target(config: TargetConfig) -> dict[str, Any]:
    """config.json of a target as transformers' DeepseekV3ForCausalLM reads it (sigmoid routing only)."""
    moe = config.moe
    if moe is None or moe.selection != "noaux_tc" or config.yarn:
        raise ValueError(
            f"target {config.name!r} cannot be written as DeepSeek-V3: want noaux_tc experts and no YaRN"
        )
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.q_lora,
        "kv_lora_rank": config.latent,
        "qk_rope_head_dim": config.rope,
        "qk_nope_head_dim": config.nope,
        "v_head_dim": config.v_head_dim,
        "intermediate_size": config.intermediate_size,
        "first_k_dense_replace": config.first_dense,
        "n_routed_experts": moe.routed,
        "num_experts_per_tok": moe.per_token,
        "moe_intermediate_size": moe.width,
        "n_shared_experts": moe.shared,
        "n_group": moe.groups,
        "topk_group": moe.groups_kept,
        "norm_topk_prob": moe.normalise,
        "routed_scaling_factor": moe.scaling,
        "attention_bias": config.attention_bias,
        "rms_norm_eps": config.norm_eps,
        "rope_interleave": config.rope_interleave,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_position,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "tap_layers": list(config.tap_layers),
        "mask_token_id": config.mask_token_id,
    }


def to_hf_drafter(config: DrafterConfig) -> dict[str, Any]:
    """config.json of a drafter in the published layout."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "block_size": config.block_size,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.tap_layers)},
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "is_causal": False,
    }
