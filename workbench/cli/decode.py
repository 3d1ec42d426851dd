"""`workbench decode`: stream a completion and say how it was executed."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.app import app

if TYPE_CHECKING:
    from workbench.decode.result import DecodeResult


@app.command()
def decode(
    prompt: Annotated[str, typer.Option(help="Text to continue; '-' reads standard input.")] = "",
    prompt_name: Annotated[str, typer.Option(help="A prompt of data/prompts instead of --prompt.")] = "",
    model: Annotated[
        str, typer.Option(help="tiny, k2-rank, k2-rank-shared, or a checkpoint folder.")
    ] = "tiny",
    tokenizer: Annotated[
        str, typer.Option(help="auto: the folder's tokenizer.json; bytes: one token per byte.")
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to produce at most.", min=1)] = 128,
    mode: Annotated[str, typer.Option(help="eager, split_graph or step_graph.")] = "step_graph",
    shape: Annotated[
        str, typer.Option(help="none, chain, chain_tree or tree; auto: tree, none without a drafter.")
    ] = "auto",
    budget: Annotated[int, typer.Option(help="Tree nodes besides the root.", min=1)] = 16,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k best only.", min=1)] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the head of this mass only.")] = None,
    variant: Annotated[str, typer.Option(help="Verify-attention variant of the target.")] = "auto",
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16; default: fp32 on cpu, else as stored.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda; cuda where there is one.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    strict: Annotated[bool, typer.Option(help="Fail when a step that should replay does not.")] = False,
    log_interval: Annotated[int, typer.Option(help="Steps per decode log line.", min=1)] = 40,
    log: Annotated[Path | None, typer.Option(help="Write SGLang-format log lines here.")] = None,
) -> None:
    """Continue a prompt, streaming; then accept length, tokens/s, replayed steps and the step ledger.

    Examples:

        workbench decode --model tiny --prompt "def main():"

        workbench decode --prompt-name ring_buffer --shape chain --mode eager

        workbench decode --prompt "import os" --temperature 0.8 --top-p 0.95 --seed 3 --log decode.log

        workbench decode --model checkpoints/DeepSeek-V2-Lite --prompt "The capital of France is"
    """
    text = read_prompt(prompt, prompt_name)
    target, drafter, reader = load(model, device, dtype, tokenizer)
    shape = pick_shape(shape, model, drafter)
    from workbench.decode import SpeculativeDecoder

    token_ids = reader.encode(text)
    require_room(len(token_ids), max_new_tokens, target.config.max_position)
    decoder = SpeculativeDecoder(
        target, drafter if shape != "none" else None, mode=mode, shape=shape, budget=budget, variant=variant,
        max_batch=1, max_context=len(token_ids) + max_new_tokens + 64,
        stop_tokens=target.config.eos_token_ids, seed=seed, strict=strict, log_interval=log_interval,
    )  # fmt: skip
    if mode != "eager":
        capture_with_bar(decoder, temperature, top_k, top_p)
    sys.stdout.write(text)
    result = stream_tokens(decoder, reader, token_ids, max_new_tokens, temperature, top_k, top_p)
    for line in describe(result):
        print(line, file=sys.stderr)
    if log is not None:
        log.write_text("\n".join(result.log_lines) + "\n")


def stream_tokens(
    decoder: Any, reader: Any, token_ids: list[int], max_new_tokens: int, *sampling: Any
) -> "DecodeResult":
    """Decode one prompt, printing text as it comes; `sampling` is temperature, top_k, top_p."""
    from workbench.model.tokenizer import TextStream

    stream, (temperature, top_k, top_p) = TextStream(reader), sampling
    result: DecodeResult = decoder.generate(
        [token_ids],
        max_new_tokens,
        temperature,
        top_k=top_k,
        top_p=top_p,
        on_tokens=lambda _, new: print(stream.push(new), end="", flush=True),
    )
    print()
    return result


def pick_shape(shape: str, model: str, drafter: Any) -> str:
    """The shape as given; auto is a tree, or none, said on stderr, where there is no drafter."""
    if shape != "auto":
        return shape
    if drafter is None:
        print(f"{model} has no drafter: decoding without drafts (shape none)", file=sys.stderr)
    return "none" if drafter is None else "tree"


def require_room(prompt_tokens: int, new_tokens: int, limit: int) -> None:
    """Raise ValueError when prompt and new tokens exceed the positions that the model has."""
    if prompt_tokens >= limit:
        raise ValueError(f"the prompt has {prompt_tokens} tokens, the model's context is {limit}: shorten it")
    if prompt_tokens + new_tokens > limit:
        raise ValueError(
            f"--max-new-tokens {new_tokens} behind a prompt of {prompt_tokens} exceeds the model's context "
            f"of {limit} tokens: give at most {limit - prompt_tokens}"
        )


def read_prompt(prompt: str, name: str) -> str:
    """The prompt's text. Raises ValueError when none or two are given, or the name is unknown."""
    if bool(prompt) == bool(name):
        raise ValueError("give one of --prompt TEXT (or '-') and --prompt-name NAME")
    if not name:
        return sys.stdin.read() if prompt == "-" else prompt
    from workbench.model.prompts import load_prompts

    known = {entry.name: entry.text for entry in load_prompts()}
    if name not in known:
        raise ValueError(f"unknown prompt {name!r}: choose one of {', '.join(sorted(known))}")
    return known[name]


def load(model: str, device: str, dtype: str, tokenizer: str = "auto") -> tuple[Any, Any, Any]:
    """(target, drafter or None, tokenizer) of a preset or a checkpoint folder."""
    import torch

    from workbench.model.presets import build
    from workbench.model.tokenizer import ByteTokenizer, load_tokenizer
    from workbench.model.weights import MODELS_DIR

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(place)
    if place == "cpu" and model == "tiny":
        torch.set_num_threads(1)  # its matrices are smaller than what waking a thread costs
    folder = next((path for path in (Path(model), MODELS_DIR / model) if path.is_dir()), None)
    if folder is None:
        target, drafter = build(model, device=place, dtype=dtype or None)
        return target, drafter, ByteTokenizer()
    target, drafter = build(str(folder), device=place, dtype=dtype or ("fp32" if place == "cpu" else None))
    return target, drafter, load_tokenizer(folder, target.config, tokenizer)


def require_device(device: str) -> None:
    """Raise ValueError for a device that is neither cpu nor cuda, or that is not here."""
    import torch

    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ValueError(f"--device {device}: choose cpu or cuda")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device {device}: {torch.cuda.device_count()} CUDA devices are here: use --device cpu"
        )


def capture_with_bar(decoder: Any, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Capture every bucket; a bar shows how far it is when someone is looking."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    decoder.use_sampling(temperature, top_k, top_p)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("capture", total=len(decoder.batch_sizes))
        decoder.capture(lambda bucket, done, total: bar.update(task, completed=done, total=total))


def describe(result: "DecodeResult") -> list[str]:
    """What is printed below the text."""
    from workbench.measure.ledger import format_summary

    summary = result.ledger.summary()
    backend = result.replay.backend or "no graphs"
    lines = [
        f"{len(result.tokens[0])} tokens, accept length {result.mean_accept_length:.2f}, "
        f"{result.tokens_per_s:.1f} tokens/s, prefill {result.prefill_s * 1e3:.0f} ms",
        f"steps: {result.replay.sentence()} (mode {result.replay.mode}, {backend})",
    ]
    return [*lines, format_summary(summary, int(summary["steps"]))] if summary else lines
