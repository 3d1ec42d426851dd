"""`workbench train` and `workbench capacity`."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.app import app


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder for weights and card; made if missing.")] = Path(
        "data/models/tiny"
    ),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    minutes: Annotated[float | None, typer.Option(help="Time for both phases; wins over --steps.")] = None,
    steps: Annotated[int, typer.Option(help="Steps for both phases.")] = 1000,
    batch: Annotated[int | None, typer.Option(help="Sequences per step.")] = None,
    context: Annotated[int | None, typer.Option(help="Bytes per sequence.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate of both phases.")] = None,
    dropout: Annotated[float, typer.Option(help="Of the target's residual branches.")] = 0.0,
    corpus: Annotated[
        Path | None, typer.Option(help="A copy of a standard library; default: this Python's.")
    ] = None,
    corpus_python: Annotated[
        str | None, typer.Option(help="Version of the Python that --corpus is from.")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile the losses.")] = False,
) -> None:
    """Train the byte-level pair on this Python's standard library and write weights, card and corpus hashes.

    Examples:
      workbench train --device cuda --minutes 5
      workbench train --steps 200 --out /tmp/pair
    """
    import torch

    from workbench.model.card import train_pair
    from workbench.model.corpus import read_corpus
    from workbench.model.train import default_options

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this machine has no CUDA device; use --device cpu")
    base = default_options(device)
    options = replace(
        base,
        seed=seed,
        steps=steps,
        minutes=minutes,
        batch=batch or base.batch,
        context=context or base.context,
        peak_lr=lr or base.peak_lr,
        drafter_lr=lr or base.drafter_lr,
        compiled=compiled,
        dropout=dropout,
    )
    if (corpus is None) != (corpus_python is None):
        raise ValueError(
            "--corpus and --corpus-python belong together: name the folder and its Python version"
        )
    text = read_corpus(corpus, corpus_python)
    command = recorded_command(sys.argv)
    quality = train_pair(out, options, command, lambda line: print(line, flush=True), text)
    print(f"wrote {out}: chain accept length {quality.chain_accept_length:.2f} on held-out files")


def recorded_command(argv: list[str]) -> list[str]:
    """The command as the card shows it: without --out and --corpus, which are paths of one machine.

    The card names the corpus by Python version and hash instead.
    """
    command, skip = ["workbench"], False
    for word in argv[1:]:
        if skip or word.startswith(("--out=", "--corpus=", "--corpus-python=")):
            skip = False
        elif word in ("--out", "--corpus", "--corpus-python"):
            skip = True
        else:
            command.append(word)
    return command


@app.command()
def capacity(
    model: Annotated[str, typer.Option(help="kimi-k2.6, or a folder with a config.json.")] = "kimi-k2.6",
    drafter: Annotated[str, typer.Option(help="kimi-dflash, none, or a folder.")] = "kimi-dflash",
    hardware: Annotated[str, typer.Option(help="Hardware target that serves.")] = "rtx-pro-6000",
    quantisation: Annotated[str, typer.Option(help="Of routed experts: bf16, fp8, int4-g32, mxfp4.")] = "",
    ranks: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 8,
    mem_fraction: Annotated[float, typer.Option(help="SGLang's --mem-fraction-static.")] = 0.94,
    context: Annotated[int, typer.Option(help="Tokens per request that should fit.")] = 200_000,
    running: Annotated[int, typer.Option(help="Requests that run at once.")] = 8,
    verify_rows: Annotated[int, typer.Option(help="Verify rows per request: budget + 1.")] = 8,
    observed: Annotated[int, typer.Option(help="Pool a server reported, to be explained; 0 = none.")] = 0,
    fit_context: Annotated[int, typer.Option(help="Context to find the memory fraction for.")] = 256_000,
) -> None:
    """Plan a service's memory: the ledger, the KV pool's bracket, what fits, projected step floors.

    Examples:
      workbench capacity --observed 218000
      workbench capacity --hardware h200 --drafter none --fit-context 262144
      workbench capacity --model path/to/checkpoint --ranks 1 --drafter none --hardware h100
    """
    from workbench.cli.capacity_tables import print_plan
    from workbench.experiments import service_capacity as experiment

    params = experiment.Params(
        target="cpu",
        seed=0,
        quantisation=quantisation,
        model=model,
        drafter=drafter,
        hardware=hardware,
        ranks=ranks,
        mem_fraction=mem_fraction,
        context=context,
        running=running,
        verify_rows=verify_rows,
        observed_tokens=observed,
        larger_context=fit_context,
    )
    rows = experiment.run(params, step=lambda name: None)
    print_plan(rows, experiment.findings(rows))
