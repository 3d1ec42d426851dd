"""The oracle is transformers: it writes small random checkpoints and computes their logits."""

import json

import pytest
import torch
from dense_attention import TestPool, dense_attend
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from workbench.model.batch import ForwardBatch
from workbench.model.pair import random_pair
from workbench.model.weights import dequantise_fp8, load_drafter, load_pair, load_target, save_pair

BASE = dict(
    vocab_size=97, hidden_size=64, intermediate_size=80, moe_intermediate_size=24, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8,
    num_experts_per_tok=3,
    kv_lora_rank=32, q_lora_rank=24, qk_rope_head_dim=16, v_head_dim=12, qk_nope_head_dim=20,
    first_k_dense_replace=1, initializer_range=0.1, max_position_embeddings=512, use_cache=False,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=64, beta_fast=32.0,
    beta_slow=1.0, mscale=1.0, mscale_all_dim=0.7,
)  # fmt: skip
CASES = {
    "v3-small-ranks": (3, {"n_group": 1, "topk_group": 1}),
    "v3-grouped": (3, {"n_group": 4, "topk_group": 2}),
    "v3-no-q-lora-tied": (3, {
        "q_lora_rank": None, "n_group": 2, "topk_group": 1, "tie_word_embeddings": True,
    }),
    "v3-yarn": (3, {"n_group": 4, "topk_group": 2, "rope_parameters": YARN}),
    "v3-512-64": (3, {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_group": 1, "topk_group": 1}),
    "v3-bias-halves": (3, {"attention_bias": True, "rope_interleave": False, "n_group": 1, "topk_group": 1}),
    "v3-two-dense": (3, {"first_k_dense_replace": 2, "n_shared_experts": 2, "n_group": 1, "topk_group": 1}),
    "v2-greedy": (2, {"topk_method": "greedy", "q_lora_rank": None}),
    "v2-grouped-yarn": (2, {
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0,
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    }),
    "v2-512-64": (2, {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_shared_experts": 2}),
}  # fmt: skip


def write_checkpoint(case, folder):
    version, extra = CASES[case]
    torch.manual_seed(len(case))
    if version == 3:
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**(BASE | extra)))
        for layer in model.model.layers[model.config.first_k_dense_replace :]:
            layer.mlp.gate.e_score_correction_bias.normal_(0, 0.1)
    else:
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**(BASE | extra)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(1, 0.2)
    model.eval().save_pretrained(folder, max_shard_size="100KB" if "small" in case else "1GB")
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path):
    model = write_checkpoint(case, tmp_path)
    target = load_target(tmp_path)
    n, split = 90, 70
    tokens = torch.randint(0, 97, (n,))
    with torch.no_grad():
        wanted = model(tokens[None]).logits[0]

    hidden, _, _ = target.score(tokens[None])
    torch.testing.assert_close(target.head(hidden)[0], wanted, atol=1e-4, rtol=0)

    c = target.config
    pool, slots = TestPool(c.num_layers, 300, c.width), torch.randperm(300)[:n] + 1
    prefix = target.prefill(tokens[:split], pool, slots[:split])
    torch.testing.assert_close(prefix.logits[0], wanted[split - 1], atol=1e-4, rtol=0)
    batch = ForwardBatch(
        token_ids=tokens[split:],
        positions=torch.arange(split, n),
        out_slots=slots[split:],
        qo_indptr=torch.tensor([0, n - split], dtype=torch.int32),
        kv_indptr=torch.tensor([0, split], dtype=torch.int32),
        kv_indices=slots[:split],
        tree_mask=None,
        max_q_len=n - split,
        max_kv_len=n,
    )
    out = target.forward(batch, pool, dense_attend(c.sm_scale, c.latent))
    torch.testing.assert_close(out.logits, wanted[split:], atol=1e-4, rtol=0)


def test_transformers_reads_what_we_write(tmp_path):
    target, drafter = random_pair(7, std=0.05)
    save_pair(target, drafter, tmp_path / "pair")
    stored, stored_drafter = load_pair(tmp_path / "pair", dtype="fp32")
    model = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "pair", dtype=torch.float32).eval()
    tokens = torch.randint(0, 256, (1, 50))
    with torch.no_grad():
        wanted = model(tokens).logits
    torch.testing.assert_close(stored.head(stored.score(tokens)[0]), wanted, atol=1e-4, rtol=0)
    for name, tensor in drafter.named_parameters():
        torch.testing.assert_close(stored_drafter.get_parameter(name), tensor.bfloat16().float(), msg=name)


def test_block_scaled_fp8_is_dequantised(tmp_path):
    write_checkpoint("v3-512-64", tmp_path)
    path, block = tmp_path / "model.safetensors", (32, 16)
    tensors, expected = load_file(path), {}
    for name, weight in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = (-(-size // b) for size, b in zip(weight.shape, block))
        scale = torch.rand(rows, columns) * 0.01 + 1e-3
        spread = scale.repeat_interleave(block[0], 0)[: len(weight)].repeat_interleave(block[1], 1)
        quantised = (weight / spread[:, : weight.shape[1]]).clamp(-400, 400).to(torch.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale_inv"] = quantised, scale
        expected[name] = quantised.float() * spread[:, : weight.shape[1]]
    save_file(tensors, path, metadata={"format": "pt"})
    edit_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": list(block)})
    target = load_target(tmp_path)
    for name, weight in expected.items():
        if ".experts." not in name:
            own = target.get_parameter(name.removeprefix("model."))
            torch.testing.assert_close(own, weight, msg=name)
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    torch.testing.assert_close(target.layers[1].mlp.experts.gate_up_proj[5][24:], expected[name])


def test_dequantise_by_hand():
    weight = torch.tensor([[1.0, 2.0, 3.0], [4.0, -5.0, 6.0]]).to(torch.float8_e4m3fn)
    got = dequantise_fp8(weight, torch.tensor([[2.0, 10.0]]), (2, 2))
    assert got.tolist() == [[2, 4, 30], [8, -10, 60]]


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda d: edit_config(d, model_type="llama"), ValueError, r"config.json has model_type 'llama'"),
        (lambda d: (d / "config.json").unlink(), FileNotFoundError, r"config.json does not exist"),
        (lambda d: (d / "config.json").write_text("{"), ValueError, r"config.json is not valid JSON"),
        (lambda d: edit_config(d, kv_lora_rank=None), ValueError, r"config.json has no 'kv_lora_rank'"),
        (
            lambda d: edit_config(d, quantization_config={"quant_method": "gptq"}),
            ValueError,
            r"config.json: quant_method 'gptq' is not supported",
        ),
        (
            lambda d: edit_config(d, intermediate_size=88),
            ValueError,
            r"model-0.*safetensors: tensor 'model.layers.0.mlp.gate_proj.weight' has shape \[80, 64\]",
        ),
        (
            lambda d: sorted(d.glob("model-0*"))[1].unlink(),
            FileNotFoundError,
            r"shard .*model-00002-of-.*safetensors is missing \(holds tensor 'model",
        ),
        (
            lambda d: sorted(d.glob("model-0*"))[1].write_bytes(b"\x10\0\0"),
            ValueError,
            r"model-00002-of-.*is not readable safetensors \(holds tensor",
        ),
        (lambda d: edit_config(d, num_hidden_layers=4), ValueError, r"no tensor 'model.layers.3"),
    ],
)
def test_bad_checkpoints_name_file_and_tensor(damage, error, message, tmp_path):
    write_checkpoint("v3-small-ranks", tmp_path)
    damage(tmp_path)
    with pytest.raises(error, match=message) as caught:
        load_target(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_weights_and_foreign_drafters(tmp_path):
    write_checkpoint("v3-grouped", tmp_path)
    target, drafter = random_pair(1)
    save_pair(target, drafter, tmp_path / "pair")
    with pytest.raises(ValueError, match="do not fit target"):
        load_drafter(tmp_path / "pair" / "drafter", load_target(tmp_path))
    with pytest.raises(ValueError, match="is no DFlash drafter"):
        load_drafter(tmp_path, target)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor"):
        load_target(tmp_path)
