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
    return [[257, *prompt.text.encode()[-60:]] for prompt in load_prompts()[:3]]


def decode(tiny, prompts, n=20, **options):
    """Three prompts in two buckets: every combination of sizes costs kernels to compile."""
    return SpeculativeDecoder(*tiny, max_batch=2, max_context=256, **options).generate(prompts, n)


@pytest.fixture(scope="module")
def plain(tiny, prompts):
    return decode(tiny, prompts, mode="eager", shape="none").tokens


@pytest.mark.parametrize(
    ("mode", "shape"),
    [("eager", "tree"), ("split_graph", "tree"), ("split_graph", "chain_tree")]
    + [("step_graph", shape) for shape in ("none", "chain", "chain_tree", "tree")],
)
def test_tokens_equal_plain_decode(tiny, prompts, plain, mode, shape):
    result = decode(tiny, prompts, mode=mode, shape=shape, shadow_steps=(3,))
    assert result.tokens == plain
    assert result.replay.share == (0.0 if mode == "eager" else 1.0)
    assert result.shadow and all(r.is_ok for r in result.shadow), [r.sentence() for r in result.shadow]


def test_sampling_is_the_seeds_and_replayed(tiny, prompts):
    decoder = SpeculativeDecoder(*tiny, max_batch=1, max_context=256, seed=5)
    first, second = (decoder.generate(prompts[:1], 16, temperature=0.8, top_p=0.9) for _ in range(2))
    assert first.replay.share == 1.0
    assert first.tokens == second.tokens


def test_stages_are_timed_inside_the_graph_and_the_host_apart(tiny, prompts):
    result = decode(tiny, prompts[:1], 40, mode="step_graph")
    summary = result.ledger.summary(skip=3)
    assert summary["verify_us"] > summary["tree_us"] > 0 and summary["draft_us"] > 0
    assert 0 <= summary["unattributed_share"] <= 0.05
    assert 0 < summary["host_launch_us"] < summary["host_us"] < 1000 and summary["host_tree_us"] == 0
    assert summary["wait_us"] > 0


def test_a_host_tree_waits_for_the_draft_and_says_so(tiny, prompts):
    summary = decode(tiny, prompts[:1], 40, mode="split_graph").ledger.summary(skip=3)
    assert summary["host_tree_us"] > 0 and summary["wait_us"] > summary["draft_us"] / 2


BREAKS = {
    "item": (lambda x: x.sum().item(), ".item()"),
    "host data": (lambda x: x + torch.tensor([1.0, 2.0], device="cuda"), "torch.tensor"),
    "nonzero": (lambda x: x.nonzero(), "aten::nonzero"),
    "synchronize": (lambda x: torch.cuda.synchronize(), "the operation after"),
}


def check_usable():
    """A capture and its replay work."""
    x, out = torch.tensor([1.0, 2.0], device="cuda"), torch.zeros(2, device="cuda")
    graph = make_backend("cuda").capture(lambda: out.copy_(x * 2))
    x.fill_(4.0)
    graph.replay()
    assert out.tolist() == [8.0, 8.0]


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_capture_names_the_operation_and_leaves_the_process_usable(name):
    body, operation = BREAKS[name]
    x = torch.tensor([1.0, 2.0], device="cuda")
    with pytest.raises(CaptureError) as caught:
        make_backend("cuda").capture(lambda: (x.exp(), body(x)))
    assert operation in caught.value.operation
    check_usable()


def test_a_step_that_reads_on_the_host_runs_eagerly_for_that_reason(tiny, prompts, plain):
    class Reads(DecodeHooks):
        def before_stage(self, stage, buffers):
            if stage == "mask":
                buffers.tree.num_nodes.sum().item()

    result = decode(tiny, prompts, hooks=Reads())
    assert result.tokens == plain and set(result.replay.counts) == {Reason.CAPTURE_FAILED}
