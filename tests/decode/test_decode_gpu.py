"""On a GPU: the same tokens from CUDA graphs, a ledger from inside the graph, captures that fail by name."""

import pytest
import torch

from workbench.decode import DecodeHooks, Reason, SpeculativeDecoder
from workbench.decode.capture_watch import CaptureError
from workbench.decode.replay import make_backend
from workbench.model.prompts import load_prompts
from workbench.model.weights import load_pair

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def tiny():
    return load_pair("tiny", dtype="fp32", device="cuda")


@pytest.fixture(scope="module")
def prompts():
    return [[257, *prompt.text.encode()[-100:]] for prompt in load_prompts()]


def decode(tiny, prompts, n=40, **options):
    return SpeculativeDecoder(*tiny, max_batch=4, max_context=512, **options).generate(prompts, n)


@pytest.fixture(scope="module")
def plain(tiny, prompts):
    return decode(tiny, prompts, mode="eager", shape="none").tokens


@pytest.mark.parametrize("shape", ["none", "chain", "chain_tree", "tree"])
@pytest.mark.parametrize("mode", ["eager", "split_graph", "step_graph"])
def test_tokens_equal_plain_decode(tiny, prompts, plain, mode, shape):
    result = decode(tiny, prompts, mode=mode, shape=shape, shadow_steps=(3, 6))
    assert result.tokens == plain
    assert result.replay.share == (0.0 if mode == "eager" else 1.0)
    assert all(report.is_ok for report in result.shadow), [r.sentence() for r in result.shadow]


def test_sampling_is_the_seeds_and_replayed(tiny, prompts):
    first = SpeculativeDecoder(*tiny, max_batch=4, max_context=512, seed=5)
    result = first.generate(prompts[:4], 30, temperature=0.8, top_p=0.9)
    assert result.replay.share == 1.0
    assert result.tokens == first.generate(prompts[:4], 30, temperature=0.8, top_p=0.9).tokens


def test_stages_are_timed_inside_the_graph(tiny, prompts):
    result = decode(tiny, prompts[:4], mode="step_graph")
    summary = result.ledger.summary(skip=3)
    assert summary["verify_us"] > summary["tree_us"] > 0 and summary["draft_us"] > 0
    assert 0 <= summary["unattributed_share"] <= 0.05


BREAKS = {
    "item": (lambda x: x.sum().item(), ".item()"),
    "nonzero": (lambda x: x.nonzero(), "aten::nonzero"),
    "host tensor": (lambda x: x + torch.tensor([1.0, 2.0], device="cuda"), "aten::lift_fresh"),
    "synchronize": (lambda x: torch.cuda.synchronize(), "the operation after"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_capture_names_the_operation_and_leaves_the_process_usable(name):
    body, operation = BREAKS[name]
    x = torch.tensor([1.0, 2.0], device="cuda")
    backend = make_backend("cuda")
    with pytest.raises(CaptureError) as caught:
        backend.capture(lambda: (x.exp(), body(x)))
    assert operation in caught.value.operation
    out = torch.zeros(2, device="cuda")
    graph = backend.capture(lambda: out.copy_(x * 2))
    x.fill_(4.0)
    graph.replay()
    assert out.tolist() == [8.0, 8.0]


def test_a_step_that_reads_on_the_host_runs_eagerly_for_that_reason(tiny, prompts, plain):
    class Reads(DecodeHooks):
        def before_stage(self, stage, buffers):
            if stage == "mask":
                buffers.tree.num_nodes.sum().item()

    result = decode(tiny, prompts, hooks=Reads())
    assert result.tokens == plain and set(result.replay.counts) == {Reason.CAPTURE_FAILED}
