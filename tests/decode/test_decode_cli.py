"""`workbench decode` streams text and says how it ran; bad input is one line that names the value."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from workbench.cli import decode as command
from workbench.cli.app import app
from workbench.model.tokenizer import ByteTokenizer, TextStream


def run(*arguments):
    return CliRunner().invoke(app, ["decode", *arguments])


def test_text_streams_and_the_summary_follows(tmp_path):
    log = tmp_path / "decode.log"
    options = (
        "--prompt-name",
        "ring_buffer",
        "--max-new-tokens",
        "12",
        "--log",
        str(log),
        "--log-interval",
        "1",
    )
    result = run(*options)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith('"""A fixed-size ring buffer')
    assert "12 tokens, accept length" in result.stderr and "replayed" in result.stderr
    assert "unattributed" in result.stderr
    assert "cpu graph: True" in log.read_text()
    plain = run(*options, "--shape", "none", "--mode", "eager")
    assert plain.stdout == result.stdout and "graph_disabled" in plain.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of --prompt TEXT"),
        (("--prompt", "x", "--prompt-name", "y"), "give one of --prompt TEXT"),
        (("--prompt-name", "nope"), "unknown prompt 'nope': choose one of"),
        (("--prompt", "x", "--model", "nope"), "unknown preset 'nope': choose one of"),
        (("--prompt", "x", "--model", "dsv2-lite"), "give the folder of its checkpoint"),
        (("--prompt", "x", "--mode", "fast"), "mode='fast': choose one of eager"),
        (("--prompt", "x", "--shape", "bush"), "shape='bush': choose one of none"),
        (("--prompt", "x", "--max-new-tokens", "1000000"), "context of 2048 tokens: give at most 2046"),
        (("--prompt", "x", "--device", "cuda:64"), "CUDA devices are here: use --device cpu"),
        (("--prompt", "x", "--device", "tpu"), "--device tpu: choose cpu or cuda"),
        (("--prompt", "x" * 2048), "the prompt has 2049 tokens, the model's context is 2048"),
        (("--prompt", "x", "--tokenizer", "words"), "tokenizer 'words': choose auto or bytes"),
    ],
)
def test_bad_input_is_named(arguments, message):
    result = run(*arguments)
    assert isinstance(result.exception, ValueError | OSError)
    assert message in str(result.exception) and "\n" not in str(result.exception)


def test_the_whole_context_can_be_used():
    command.require_room(48, 2000, 2048)
    with pytest.raises(ValueError, match="at most 2000"):
        command.require_room(48, 2001, 2048)


def test_standard_input_is_a_prompt(monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("import os\n"))
    assert command.read_prompt("-", "") == "import os\n"


def write_checkpoint(folder, vocab_size=300):
    """A small random DeepSeek-V3 checkpoint, written by transformers; returns the model."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(4)
    config = DeepseekV3Config(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=80, moe_intermediate_size=24,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1,
        n_routed_experts=8, num_experts_per_tok=3, kv_lora_rank=32, q_lora_rank=24, qk_rope_head_dim=16,
        v_head_dim=12, qk_nope_head_dim=20, first_k_dense_replace=1, initializer_range=0.2,
        max_position_embeddings=512, n_group=1, topk_group=1, eos_token_id=299, bos_token_id=None,
        use_cache=False,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, write_checkpoint(folder)


def transformers_tokens(model, prompt, n):
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(n):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == 299:
                break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("mode", ["eager", "step_graph"])
def test_a_folder_of_transformers_decodes_as_transformers_does(checkpoint, mode):
    folder, model = checkpoint
    stream = TextStream(ByteTokenizer())
    tokens = transformers_tokens(model, b"import os", 14)
    text = "import os" + "".join(stream.push([token]) for token in tokens)
    result = run(
        "--model", str(folder), "--tokenizer", "bytes", "--prompt", "import os", "--max-new-tokens", "14",
        "--mode", mode,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout == text + "\n" and len(set(tokens)) > 3
    assert "has no drafter: decoding without drafts (shape none)" in result.stderr
    assert f"{len(tokens)} tokens, accept length 1.00" in result.stderr and "tokens/s" in result.stderr
    assert ("replayed 0 /" in result.stderr) == (mode == "eager")


def test_a_folder_with_a_tokenizer_uses_it(checkpoint, tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = shutil.copytree(checkpoint[0], tmp_path / "with_tokenizer")
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    result = run("--model", str(folder), "--prompt", "import os", "--max-new-tokens", "6")
    assert result.exit_code == 0, result.output
    expected = transformers_tokens(checkpoint[1], tokenizer.encode("import os").ids, 6)
    stream = TextStream(tokenizer)
    assert result.stdout == "import os" + "".join(stream.push([token]) for token in expected) + "\n"


def test_what_a_folder_lacks_is_named(checkpoint, tmp_path):
    folder = checkpoint[0]

    def fails(*arguments, path=folder):
        result = run("--model", str(path), "--prompt", "x", "--max-new-tokens", "4", *arguments)
        assert isinstance(result.exception, ValueError | OSError)
        assert "\n" not in str(result.exception)
        return str(result.exception)

    assert "has no tokenizer.json" in fails() and "--tokenizer bytes" in fails()
    assert "shape='tree' needs a drafter" in fails("--shape", "tree", "--tokenizer", "bytes")
    small = tmp_path / "small"
    write_checkpoint(small, vocab_size=97)
    assert "vocabulary of 97: bytes need at least 256" in fails("--tokenizer", "bytes", path=small)
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    assert "no weights to load" in fails("--tokenizer", "bytes", path=broken)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    assert "llama" in fails("--tokenizer", "bytes", path=broken).lower()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json does not exist" in fails(path=empty)
