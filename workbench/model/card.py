"""One command's worth of training: corpus, pair, quality, and the model card beside the weights."""

import json
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from workbench.model.corpus import LICENCE, Corpus, read_corpus
from workbench.model.evaluation import PairQuality, evaluate_pair
from workbench.model.train import TrainLog, TrainOptions, train_drafter, train_target
from workbench.model.weights import load_pair, save_pair


def train_pair(
    folder: Path,
    options: TrainOptions,
    command: list[str],
    report: Callable[[str], None] = print,
    corpus: Corpus | None = None,
) -> PairQuality:
    """Train, evaluate as stored, write weights, configs, corpus.json, training.json and README.md."""
    torch.manual_seed(options.seed)
    began = time.monotonic()
    corpus = corpus or read_corpus()
    data = corpus.joined(held_out=False).to(options.device)
    held_out = corpus.joined(held_out=True).to(options.device)
    report(f"corpus: {len(corpus.files)} files, {len(data)} bytes to train on, {len(held_out)} held out")
    log = TrainLog()
    target = train_target(data, options, log, report)
    drafter = train_drafter(target, data, options, log, report)
    save_pair(target, drafter, folder)
    stored = load_pair(folder, device=options.device, dtype="fp32")
    quality = evaluate_pair(*stored, held_out, context=options.context)
    write_records(folder, corpus, options, log, quality, command, time.monotonic() - began)
    report(
        f"chain accept length {quality.chain_accept_length:.2f}, {quality.nats_per_byte:.3f} nats per byte"
    )
    return quality


def write_records(
    folder: Path,
    corpus: Corpus,
    options: TrainOptions,
    log: TrainLog,
    quality: PairQuality,
    command: list[str],
    seconds: float,
) -> None:
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    record = {
        "command": shlex.join(command),
        "date": datetime.now(UTC).date().isoformat(),
        "device": device,
        "torch": torch.__version__,
        "seconds": round(seconds, 1),
        "options": {k: v for k, v in asdict(options).items() if k not in ("target", "drafter")},
        "steps": log.steps,
        "phase_seconds": log.seconds,
        "bytes_seen": log.tokens,
        "quality": quality.as_dict(),
        "last_losses": {phase: points[-1][2] for phase, points in log.curve.items()},
        "curve": log.curve,
    }
    (folder / "training.json").write_text(json.dumps(record) + "\n")
    (folder / "corpus.json").write_text(json.dumps(corpus.manifest(), indent=0) + "\n")
    (folder / "README.md").write_text(model_card(folder, corpus, record, options, log, quality))


def model_card(
    folder: Path,
    corpus: Corpus,
    record: dict[str, object],
    options: TrainOptions,
    log: TrainLog,
    quality: PairQuality,
) -> str:
    """Markdown; every number comes from the run."""
    weights = sorted(folder.rglob("*.safetensors"))
    files = "\n".join(f"- `{p.relative_to(folder)}`: {p.stat().st_size:,} bytes, bf16" for p in weights)
    t, d, seconds = options.target, options.drafter, record["seconds"]
    phases = "\n".join(
        f"- {phase}: {log.steps[phase]:,} steps, {log.tokens[phase]:,} bytes seen in {log.seconds[phase]} s, "
        f"last loss {log.curve[phase][-1][2]}."
        for phase in log.steps
    )
    experts = t.moe.routed if t.moe else 0
    rows = zip(range(1, d.block_size), quality.drafter_accuracy, quality.drafter_top4, quality.text_accuracy)
    table = "\n".join(f"| {i} | {a:.1%} | {b:.1%} | {c:.1%} |" for i, a, b, c in rows)
    return f"""# {folder.name}: a byte-level target and its block drafter

Small enough to decode on a CPU, trained so that speculation has something real to accept; not a useful
language model.

- Target: DeepSeek-V3 style, {t.params:,} parameters in matrices: {t.num_layers} layers, hidden
  {t.hidden_size}, {t.num_heads} heads, latent {t.latent} + rope {t.rope}, {experts} routed experts in the
  last layer.
- Drafter: DFlash style, {d.params:,} parameters: {d.num_layers} layers, block {d.block_size}, conditioned on
  the states after target layers {list(d.tap_layers)}.
- Vocabulary: 256 bytes, {d.mask_token_id} = mask, {t.bos_token_id} = end of text,
  before and behind every file.

{files}

## Training
`{record["command"]}`

- Seed {options.seed}, {record["date"]}, {record["device"]}, torch {record["torch"]}, {seconds:.0f} s in all.
{phases}
- Losses step by step are in `training.json`.
- Text: {len(corpus.files)} source files of the standard library of Python {corpus.python};
  {len(corpus.held_out)} of them are held out and never trained on. {LICENCE}.
- SHA-256 of the file list `{corpus.list_sha256}`; each file's is in `corpus.json`.

## Quality on held-out files
The stored bf16 weights, computed in fp32, on {quality.windows} windows of {quality.context} bytes.

- Target: {quality.nats_per_byte:.3f} nats per byte, next byte right {quality.target_accuracy:.1%}.
- Greedy chain, one step from random prefixes: {quality.chain_accept_length:.2f} tokens, bonus included.

| draft position | = target's choice | target's choice in top 4 | = text |
|---|---|---|---|
{table}

Licence of the weights: Apache-2.0.
"""
