"""Is the output the target's own? Greedy: token by token; sampled: by the surprise of the tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.rows import Scalar

if TYPE_CHECKING:
    from torch import Tensor

MAX_Z = 4.0  # a lossless arm exceeds it once in 16,000 runs


@dataclass(frozen=True)
class Check:
    """A verdict in words, with the numbers behind it."""

    passed: bool
    words: str
    metrics: dict[str, Scalar] = field(default_factory=dict)


def check_greedy(
    results: Sequence[Any],
    plain: Sequence[Any],
    model: Any,
    prompts: list[list[int]],
    dtype: str,
    gap_bound: float,
) -> Check:
    """Token identity with plain greedy decode; outside fp32 a first divergence may be a near tie."""
    from workbench.decode.divergence import find_divergence

    found = [
        divergence
        for result, reference in zip(results, plain, strict=True)
        for prompt, ours, theirs in zip(prompts, result.tokens, reference.tokens, strict=True)
        if (divergence := find_divergence(model, prompt, theirs, ours, gap_bound))
    ]
    outputs, largest = len(results) * len(prompts), max((d.gap for d in found), default=0.0)
    metrics: dict[str, Scalar] = {"divergences": len(found), "largest_gap": largest}
    if not found:
        return Check(True, f"{outputs} outputs identical to plain decode", metrics)
    words = f"{len(found)} of {outputs} outputs diverge, at logit gaps of at most {largest:.3g}"
    return Check(dtype != "fp32" and all(d.is_rounding for d in found), words, metrics)


def check_sampled(results: Sequence[Any], model: Any, prompts: list[list[int]], temperature: float) -> Check:
    """Compare the emitted tokens' surprise with the entropy the target expected at each position.

    Given its prefix, a token drawn from p has mean -log p equal to the entropy of p and a known variance, so
    the standardised sum over all tokens is close to normal. A sampler that prefers drafts is too unsurprised.
    """
    excess = variance = 0.0
    count = 0
    for result in results:
        for prompt, tokens in zip(prompts, result.tokens):
            log_p = next_log_probs(model, prompt, tokens, temperature)  # [n, V]
            p, n = log_p.exp(), len(tokens)
            surprise = -log_p[range(n), tokens]
            terms = (p * log_p).nan_to_num()
            entropy = -terms.sum(-1)
            excess += float((surprise - entropy).sum())
            variance += float(((terms * log_p).nan_to_num().sum(-1) - entropy**2).sum())
            count += n
    z = excess / math.sqrt(variance) if variance > 0 else 0.0
    words = f"surprise of {count} tokens {z:+.1f} standard errors from the target's entropy"
    return Check(abs(z) <= MAX_Z, words, {"surprise_z": z})


def next_log_probs(model: Any, prompt: list[int], tokens: list[int], temperature: float) -> "Tensor":
    """[len(tokens), V] fp64: the target's distribution before each of `tokens`, in one dense pass."""
    import torch

    with torch.no_grad():
        ids = torch.tensor([prompt + tokens[:-1]], device=model.device)
        hidden = model.score(ids)[0][0, len(prompt) - 1 :]
        logits = model.head(hidden).double().cpu()
    return torch.log_softmax(logits / temperature, -1)
