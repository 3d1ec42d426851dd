"""The conventional split's middle: top-k leaves the device, the host runs the heap, the tree goes back."""

import math

import numpy as np
import torch
from torch import Tensor

from workbench.decode.buffers import StepBuffers
from workbench.decode.step import StepSettings
from workbench.measure.ledger import HostWatch
from workbench.tree.batch import write_tree
from workbench.tree.buffers import TreeBuffers
from workbench.tree.ddtree import Ranked, best_first, draft_depth

UPLOADED = ("token_ids", "depths", "parents", "log_probs", "num_nodes", "mask", "next_token", "next_sibling")


def build_on_host(b: StepBuffers, settings: StepSettings, watch: HostWatch) -> None:
    """Build this batch's trees on the host from b.draft_logits [bs, L, V]; waits for the draft.

    Raises ValueError that names the slot of a NaN or +inf logit.
    """
    assert b.draft_logits is not None
    logits, ranks, budget = b.draft_logits, settings.budget, settings.budget
    if settings.shape == "chain_tree":
        logits, ranks, budget = logits[:, : b.width - 1], 1, b.width - 1
    log_probs, tokens, state = rank_on_device(logits, min(ranks, logits.shape[-1]), b, watch)
    floor = -math.inf if settings.min_log_prob is None else settings.min_log_prob
    host = b.host_tree = b.host_tree or make_host_tree(b)
    arrays = [tensor.numpy() for tensor in host.tensors()]
    for request in range(b.bs):
        bonus, remaining = state[request].tolist()
        depth = draft_depth(logits.shape[1], remaining if settings.cut_to_remaining else None)
        ranked = rank_slots(log_probs[request, :depth], tokens[request, :depth], request)
        write_tree(best_first(ranked, budget, floor), request, arrays)
        arrays[0][request, 0] = bonus
    for name in UPLOADED:
        getattr(b.tree, name).copy_(getattr(host, name), non_blocking=True)


def make_host_tree(b: StepBuffers) -> TreeBuffers:
    """The host's side of the tree; pinned for a GPU. The next draft is awaited before it is written again."""
    host = TreeBuffers(b.bs, b.width)
    if b.device.type == "cuda":
        for name, tensor in vars(host).items():
            if isinstance(tensor, Tensor):
                setattr(host, name, tensor.pin_memory())
    return host


def rank_on_device(
    logits: Tensor, k: int, b: StepBuffers, watch: HostWatch
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """On the host: the k best log-probabilities and tokens [bs, L, k], and [bs, 2]: bonus, remaining.

    Everything is queued first, then the host waits once.
    """
    x = logits.float()
    values, tokens = torch.topk(x, k, dim=-1)
    lse = torch.logsumexp(x, -1, keepdim=True).double()
    log_probs = values.double() - torch.where(lse == -math.inf, 0.0, lse)
    sources = (log_probs, tokens, torch.stack([b.bonus, b.remaining.long()], 1))
    if not logits.is_cuda:
        return sources[0].numpy(), sources[1].numpy(), sources[2].numpy()
    copies = [source.to("cpu", non_blocking=True) for source in sources]
    watch.lap("tree")
    torch.cuda.current_stream().synchronize()
    watch.lap("wait")
    return copies[0].numpy(), copies[1].numpy(), copies[2].numpy()


def rank_slots(log_probs: np.ndarray, tokens: np.ndarray, request: int) -> Ranked:
    """What the heap takes, of log_probs and tokens [L, k]: equal weights by token id, as everywhere else."""
    bad = np.flatnonzero(~(log_probs < math.inf).all(1))  # NaN compares false
    if len(bad):
        raise ValueError(
            f"NaN or +inf draft logit in slot {bad[0]} of request {request}: check the drafter's output"
        )
    order = np.lexsort((tokens, -log_probs), axis=-1)
    ordered = (np.take_along_axis(array, order, -1).tolist() for array in (log_probs, tokens))
    return list(zip(*ordered))
