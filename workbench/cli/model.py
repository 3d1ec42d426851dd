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
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile the losses.")] = False,
) -> None:
    """Train the byte-level pair on this Python's standard library and write weights, card and corpus hashes.

    Examples:
      workbench train --device cuda --minutes 5
      workbench train --steps 200 --out /tmp/pair
    """
    import torch

    from workbench.model.card import train_pair
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
    )
    quality = train_pair(out, options, recorded_command(sys.argv), lambda line: print(line, flush=True))
    print(f"wrote {out}: chain accept length {quality.chain_accept_length:.2f} on held-out files")


def recorded_command(argv: list[str]) -> list[str]:
    """The command as the card shows it: without --out, which is a path of one machine."""
    command, skip = ["workbench"], False
    for word in argv[1:]:
        if skip or word.startswith("--out="):
            skip = False
        elif word == "--out":
            skip = True
        else:
            command.append(word)
    return command
