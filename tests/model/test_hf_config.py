from dataclasses import replace
from pathlib import Path

import pytest

from workbench.model.hf_config import drafter_config, target_config, to_hf_drafter, to_hf_target
from workbench.model.pair import TINY_DRAFTER, TINY_TARGET
from workbench.model.presets import DEEPSEEK_V2_LITE, KIMI_DRAFTER, KIMI_K2

FOLDER = Path("somewhere/model")
KIMI_JSON = {
    "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "intermediate_size": 18432,
    "first_k_dense_replace": 1, "n_routed_experts": 384, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 262144, "bos_token_id": 163584, "eos_token_id": 163586,
    "torch_dtype": "bfloat16",
}  # fmt: skip
V2_LITE_JSON = {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "num_hidden_layers": 27,
    "num_attention_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "intermediate_size": 10944, "first_k_dense_replace": 1,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2,
    "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707, "mscale_all_dim": 0.707,
    },
    "max_position_embeddings": 163840, "bos_token_id": 100000, "eos_token_id": 100001,
    "torch_dtype": "bfloat16",
}  # fmt: skip
DFLASH_JSON = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 7168, "num_hidden_layers": 6,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 18432,
    "block_size": 8, "vocab_size": 163840, "rms_norm_eps": 1e-5, "dtype": "bfloat16",
    "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
}  # fmt: skip


def test_presets_equal_their_config_files():
    kimi = target_config(KIMI_JSON, FOLDER)
    assert replace(kimi, name=KIMI_K2.name, tap_layers=KIMI_K2.tap_layers) == KIMI_K2
    assert replace(target_config(V2_LITE_JSON, FOLDER), name=DEEPSEEK_V2_LITE.name) == DEEPSEEK_V2_LITE
    assert drafter_config(DFLASH_JSON, FOLDER) == KIMI_DRAFTER


def test_a_nested_text_config_is_found():
    nested = {"model_type": "kimi_k25", "text_config": KIMI_JSON}
    assert target_config(nested, FOLDER) == target_config(KIMI_JSON, FOLDER)


def test_our_own_configs_come_back():
    assert replace(target_config(to_hf_target(TINY_TARGET), FOLDER), name="tiny") == TINY_TARGET
    assert replace(drafter_config(to_hf_drafter(TINY_DRAFTER), FOLDER), is_causal=None) == TINY_DRAFTER


def test_drafter_fields_may_stand_in_either_place():
    inner = DFLASH_JSON["dflash_config"] | {"block_size": 16, "final_logit_softcapping": 20.0}
    moved = {k: v for k, v in DFLASH_JSON.items() if k != "block_size"} | {"dflash_config": inner}
    moved |= {"sliding_window": 2048, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
    config = drafter_config(moved, FOLDER)
    assert (config.block_size, config.logit_cap) == (16, 20.0)
    assert [config.is_sliding(i) for i in range(6)] == [True] * 5 + [False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layer_freq": 2}, r"moe_layer_freq=2"),
        ({"scoring_func": "softmax"}, r"scoring_func='softmax', topk_method='noaux_tc'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, r"scales positions by 'linear'"),
        ({"torch_dtype": "int8"}, r"dtype 'int8'"),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        target_config(KIMI_JSON | changes, FOLDER)


def test_a_second_generation_drafter_is_refused():
    inner = DFLASH_JSON["dflash_config"] | {"selector_rank": 256}
    with pytest.raises(ValueError, match="is no DFlash drafter"):
        drafter_config(DFLASH_JSON | {"dflash_config": inner}, FOLDER)
