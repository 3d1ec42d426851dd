"""The target's verify attention alone, as a decode step calls it, on a pool with a context in place."""

from typing import Any

import torch

from workbench.decode.decision import Bucket
from workbench.decode.loop import SpeculativeDecoder
from workbench.measure.timing import measure, pools_needed
from workbench.rows import Timing
from workbench.targets import HardwareTarget


def time_attention(decoder: SpeculativeDecoder, bs: int, context: int, target: HardwareTarget) -> Timing:
    """One layer's call, the layers taking turns on their own pools; a step makes one call per layer."""
    b, attend, queries = load_buffers(decoder, bs, context)
    batch = decoder.step.forward_batch(b)
    layers = [
        lambda layer=layer: attend(queries, decoder.pool.layer(layer), batch, layer)
        for layer in range(decoder.pool.layers)
    ]
    bytes_per_call = bs * context * decoder.pool.row_bytes
    on_gpu = target.backend == "cuda"
    is_cold = on_gpu and len(layers) >= pools_needed(bytes_per_call, target)
    return measure(
        layers,
        target=target,
        mode="graph" if on_gpu else "eager",
        l2="cold" if is_cold else "warm",
        n=8,
        bytes_per_call=bytes_per_call if is_cold else 0,
        budget_s=3.0,
    )


def load_buffers(decoder: SpeculativeDecoder, bs: int, context: int) -> tuple[Any, Any, torch.Tensor]:
    """(buffers, attention, queries) of the bucket, its inputs pointing at `context` slots per request."""
    bucket = Bucket(bs, decoder.width)
    b = decoder.runner.make_buffers(bucket)
    slots = decoder.allocator.alloc(bs * (context + decoder.width))
    assert slots is not None
    decoder.allocator.free(slots)
    slots = slots.to(decoder.device)
    prefix = slots[: bs * context].view(bs, -1)
    for row in range(bs):
        decoder.table.set_row(row + 1, prefix[row], 0, 1, 0.0)
    b.req_index.copy_(torch.arange(1, bs + 1))
    b.out_slots.copy_(slots[bs * context :])
    with torch.no_grad():
        decoder.step.read_state(b)
    config, rows = decoder.target.config, bs * decoder.width
    queries = torch.randn(rows, config.num_heads, config.width, device=decoder.device)
    return b, decoder.step.attends[bucket.bs, bucket.width][0], queries.to(decoder.pool.dtype)
