"""The committed pair: small, as its card says, equal to transformers, drafting through real attention."""

import json

import pytest
import torch
from transformers import DeepseekV3ForCausalLM

from workbench.attention import verify_attention
from workbench.model.batch import ForwardBatch
from workbench.model.prompts import load_prompts
from workbench.model.tokenizer import load_tokenizer
from workbench.model.weights import MODELS_DIR, load_pair

FOLDER = MODELS_DIR / "tiny"


@pytest.fixture(scope="module")
def pair():
    return load_pair("tiny", dtype="fp32")


def attend_with(config, variant):
    def attend(q, kv_layer, batch, layer_index):
        out, _ = verify_attention(
            q,
            kv_layer,
            batch.qo_indptr,
            batch.kv_indptr,
            batch.kv_indices[: int(batch.kv_indptr[-1])],
            batch.tree_mask,
            draft_slots=batch.out_slots,
            sm_scale=config.sm_scale,
            latent=config.latent,
            variant=variant,
        )
        return out

    return attend


def test_weights_are_small_and_the_card_matches():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*.safetensors")) < 10_000_000
    record = json.loads((FOLDER / "training.json").read_text())
    corpus = json.loads((FOLDER / "corpus.json").read_text())
    card = (FOLDER / "README.md").read_text()
    assert record["command"] in card and corpus["list_sha256"] in card and corpus["python"] in card
    assert set(corpus["held_out"]) < set(corpus["files"])
    for share in record["quality"]["drafter_accuracy"]:
        assert f"{share:.1%}" in card


def test_trained_target_equals_transformers(pair):
    target, _ = pair
    model = DeepseekV3ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokens = torch.tensor([load_tokenizer(FOLDER, target.config).encode(load_prompts("code")[0].text)])
    with torch.no_grad():
        wanted = model(tokens).logits
    torch.testing.assert_close(target.head(target.score(tokens)[0]), wanted, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("variant", ["reference", "torch_split"])
def test_one_chain_step_through_verify_attention(pair, variant):
    """Prefill, draft, verify, with paged pools: the accepted tokens are the target's own greedy ones."""
    target, drafter = pair
    prompt = torch.tensor(load_tokenizer(FOLDER, target.config).encode(load_prompts("code")[3].text))
    n, block = len(prompt), drafter.config.block_size
    pool, drafts_pool = target.make_pool(600), drafter.make_pool(600, 1)
    slots = torch.randperm(500)[: n + block] + 1
    out = target.prefill(prompt, pool, slots[:n])
    drafter.write_context(out.taps, torch.arange(n), slots[:n], drafts_pool)
    bonus, indptr = out.logits.argmax(-1), torch.tensor([0, n], dtype=torch.int32)
    logits = drafter.draft(
        bonus, torch.tensor([n]), indptr, slots[:n], drafts_pool, attend_with(drafter.config, variant)
    )
    chain = torch.cat((bonus, logits[0].argmax(-1)))
    batch = ForwardBatch(
        token_ids=chain,
        positions=torch.arange(n, n + block),
        out_slots=slots[n:],
        qo_indptr=torch.tensor([0, block], dtype=torch.int32),
        kv_indptr=indptr,
        kv_indices=slots[:n],
        tree_mask=None,
        max_q_len=block,
        max_kv_len=n + block,
    )
    verified = target.forward(batch, pool, attend_with(target.config, variant)).logits
    whole = target.head(target.score(torch.cat((prompt, chain))[None])[0])[0, n:]
    torch.testing.assert_close(verified, whole, atol=1e-3, rtol=1e-4)
    accepted = int((chain[1:] == verified.argmax(-1)[:-1]).long().cumprod(0).sum())
    assert accepted >= 2  # this prompt ends where the next bytes are all but certain
