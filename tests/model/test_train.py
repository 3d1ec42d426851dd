import json
from dataclasses import replace

import pytest
import torch

from workbench.model import corpus as corpus_module
from workbench.model.card import train_pair
from workbench.model.config import MoEConfig
from workbench.model.corpus import read_corpus, sample_windows
from workbench.model.evaluation import chain_accept_lengths
from workbench.model.pair import END, TINY_DRAFTER, TINY_TARGET, random_pair
from workbench.model.train import TrainOptions, draft_blocks, schedule
from workbench.model.weights import load_pair

SMALL_TARGET = replace(
    TINY_TARGET, hidden_size=32, num_layers=3, num_heads=2, latent=16, rope=8, nope=8, v_head_dim=16,
    intermediate_size=48, first_dense=2, tap_layers=(0, 2), moe=MoEConfig(routed=4, per_token=2, width=16),
)  # fmt: skip
SMALL_DRAFTER = replace(
    TINY_DRAFTER, hidden_size=32, num_heads=4, kv_heads=2, head_dim=8, intermediate_size=48, num_layers=1,
    tap_layers=(0, 2),
)  # fmt: skip
OPTIONS = TrainOptions(
    steps=90,
    batch=4,
    context=64,
    blocks=8,
    target=SMALL_TARGET,
    drafter=SMALL_DRAFTER,
    peak_lr=1e-2,
    drafter_lr=1e-2,
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("lib")
    for i in range(60):
        body = "".join(f"def f{j}(x):\n    return x + {j % 3}\n\n\n" for j in range(20))
        (root / f"m{i}.py").write_text(body)
    (root / "latin.py").write_bytes(b"# \xe9\n")
    (root / "site-packages").mkdir()
    (root / "site-packages" / "foreign.py").write_text("x = 1\n")
    return root


def test_corpus_holds_out_files_and_records_hashes(library):
    corpus = read_corpus(library)
    assert "latin.py" not in corpus.files and not any("foreign" in path for path in corpus.files)
    assert 0 < len(corpus.held_out) < 12
    train, held_out = corpus.joined(held_out=False), corpus.joined(held_out=True)
    assert len(train) + len(held_out) == sum(map(len, corpus.texts.values())) + len(corpus.files) + 2
    assert corpus.manifest()["list_sha256"] == read_corpus(library).list_sha256
    windows = sample_windows(train, 500, 40, torch.Generator().manual_seed(0))
    assert windows.max() == END and (windows != 0).all()


def test_a_held_out_file_is_not_trained_on(library):
    corpus = read_corpus(library)
    marked = replace(corpus, texts={p: (b"@" if p in corpus.held_out else b"#") * 5 for p in corpus.texts})
    assert ord("@") not in marked.joined(held_out=False) and ord("#") not in marked.joined(held_out=True)


def test_schedule_warms_up_and_ends_low():
    assert (
        schedule(0.0) < 0.1 and schedule(0.02) == pytest.approx(1.0) and schedule(1.0) == pytest.approx(0.02)
    )


def test_one_pass_over_many_blocks_equals_block_by_block():
    target, drafter = random_pair(2, target_config=SMALL_TARGET, drafter_config=SMALL_DRAFTER)
    tokens = torch.randint(0, 256, (2, 40))
    _, taps, _ = target.score(tokens)
    anchors = torch.tensor([[3, 9, 31], [1, 20, 21]])
    together = draft_blocks(drafter, tokens, taps, anchors)
    for b in range(2):
        for i, anchor in enumerate(anchors[b].tolist()):
            # nothing at or behind the anchor but the bonus token may matter
            cut = tokens[b : b + 1].clone()
            cut[:, anchor + 1 :] = 7
            alone = draft_blocks(drafter, cut, taps[b : b + 1, :anchor], torch.tensor([[anchor]]))
            torch.testing.assert_close(together[b, i], alone[0, 0], atol=1e-4, rtol=0)


def test_training_learns_and_writes_a_loadable_pair(library, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module.sysconfig, "get_path", lambda name: str(library))
    lines = []
    quality = train_pair(tmp_path / "pair", OPTIONS, ["workbench", "train", "--steps", "90"], lines.append)
    record = json.loads((tmp_path / "pair" / "training.json").read_text())
    first, last = record["curve"]["target"][0][2], record["curve"]["target"][-1][2]
    assert first > 5 and last < 0.6 * first and quality.nats_per_byte < 0.7 * first
    drafts = record["curve"]["drafter"]
    assert drafts[-1][2] < 0.8 * drafts[0][2]
    card = (tmp_path / "pair" / "README.md").read_text()
    assert "`workbench train --steps 90`" in card and f"{quality.drafter_accuracy[6]:.1%}" in card
    target, drafter = load_pair(tmp_path / "pair", dtype="fp32")
    assert target.config.tap_layers == (0, 2) and drafter.config.block_size == 8
    held_out = read_corpus(library).joined(held_out=True)
    lengths = chain_accept_lengths(target, drafter, held_out, 16, 64, torch.Generator().manual_seed(1))
    assert lengths.min() >= 1 and lengths.max() <= 8


def test_load_pair_names_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no model 'nonesuch'.*workbench train"):
        load_pair("nonesuch")
    with pytest.raises(FileNotFoundError, match="target without a drafter"):
        load_pair(tmp_path)
