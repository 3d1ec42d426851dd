"""How good a pair is on held-out text: nats per byte, draft accuracy per position, accept length."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.model.corpus import sample_windows
from workbench.model.drafter import Drafter
from workbench.model.target import Target
from workbench.model.train import draft_blocks


@dataclass(frozen=True)
class PairQuality:
    """Held-out numbers; per-position lists start with the token behind the bonus token."""

    windows: int
    context: int
    nats_per_byte: float
    target_accuracy: float
    drafter_accuracy: tuple[float, ...]  # draft argmax = the target's argmax, target fed with the text
    drafter_top4: tuple[float, ...]
    text_accuracy: tuple[float, ...]  # draft argmax = the text's own byte
    chain_accept_length: float  # one greedy step from random prefixes, bonus included
    chain_accept_histogram: tuple[float, ...]  # share of steps that emit 1, 2, ... tokens

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@torch.no_grad()
def evaluate_pair(
    target: Target,
    drafter: Drafter,
    held_out: Tensor,
    *,
    windows: int = 64,
    context: int = 1024,
    seed: int = 0,
) -> PairQuality:
    """Quality on random windows of `held_out`, in the models' own precision."""
    context = min(context, len(held_out) - drafter.config.block_size - 2)
    generator = torch.Generator(held_out.device).manual_seed(seed)
    batches = [sample_windows(held_out, 8, context + 1, generator) for _ in range(max(1, windows // 8))]
    loss, right = 0.0, 0.0
    hits = torch.zeros(3, drafter.config.drafts, dtype=torch.float64)
    for tokens in batches:
        hidden, taps, _ = target.score(tokens[:, :-1])
        logits = target.head(hidden)
        loss += float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        right += float((logits.argmax(-1) == tokens[:, 1:]).double().mean())
        hits += draft_hits(drafter, tokens, taps, logits, generator)
    lengths = chain_accept_lengths(target, drafter, held_out, windows, context, generator)
    histogram = torch.bincount(lengths - 1, minlength=drafter.config.block_size).double() / len(lengths)
    accuracy, top4, text = ((row / len(batches)).tolist() for row in hits)
    return PairQuality(
        windows=len(batches) * 8,
        context=context,
        nats_per_byte=loss / len(batches),
        target_accuracy=right / len(batches),
        drafter_accuracy=tuple(round(x, 4) for x in accuracy),
        drafter_top4=tuple(round(x, 4) for x in top4),
        text_accuracy=tuple(round(x, 4) for x in text),
        chain_accept_length=float(lengths.double().mean()),
        chain_accept_histogram=tuple(round(x, 4) for x in histogram.tolist()),
    )


def draft_hits(
    drafter: Drafter, tokens: Tensor, taps: Tensor, logits: Tensor, generator: torch.Generator
) -> Tensor:
    """[3, L] shares: argmax = the target's, the target's argmax in the top 4, argmax = the text."""
    block, inputs = drafter.config.block_size, tokens[:, :-1]
    anchors = torch.randint(
        1, inputs.shape[1] - block, (len(tokens), 32), device=tokens.device, generator=generator
    )
    drafts = draft_blocks(drafter, inputs, taps, anchors)  # [B, 32, L, V]
    rows = anchors[..., None] + torch.arange(block - 1, device=tokens.device)
    index = torch.arange(len(tokens), device=tokens.device)[:, None, None]
    wanted, text = logits[index, rows].argmax(-1), inputs[index, rows + 1]
    best = drafts.argmax(-1)
    in_top4 = (drafts.topk(4, dim=-1).indices == wanted[..., None]).any(-1)
    return torch.stack([hit.double().mean((0, 1)) for hit in (best == wanted, in_top4, best == text)]).cpu()


def chain_accept_lengths(
    target: Target, drafter: Drafter, held_out: Tensor, count: int, context: int, generator: torch.Generator
) -> Tensor:
    """Tokens emitted by one greedy chain step from `count` random prefixes, by scoring their drafts."""
    block = drafter.config.block_size
    prefix_len = max(2, context // 2)
    lengths = []
    for _ in range(max(1, count // 8)):
        prefix = sample_windows(held_out, 8, prefix_len, generator)
        hidden, taps, _ = target.score(prefix)
        bonus = target.head(hidden[:, -1]).argmax(-1)
        extended = F.pad(torch.cat((prefix, bonus[:, None]), dim=1), (0, block - 1))
        anchors = torch.full((8, 1), prefix_len, device=prefix.device)
        drafts = draft_blocks(drafter, extended, taps, anchors)[:, 0].argmax(-1)  # [8, L]
        extended[:, prefix_len + 1 :] = drafts
        wanted = target.head(target.score(extended)[0][:, prefix_len:]).argmax(-1)  # [8, block]
        lengths.append(1 + (drafts == wanted[:, :-1]).long().cumprod(-1).sum(-1))
    return torch.cat(lengths).cpu()
