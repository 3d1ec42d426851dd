"""The tape behaves as a CUDA graph does: no Python on replay, fixed storages, a named reason on failure."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.decode.capture_watch import CaptureError
from workbench.decode.replay import TapeBackend, is_recording, make_backend


class Step:
    def __init__(self):
        self.x = torch.zeros(4)
        self.out = torch.full((4,), float("nan"))
        self.count = 0

    def __call__(self):
        self.count += 1
        y = (self.x * 2 + 1).reshape(2, 2)
        y = y.t().contiguous().view(-1)
        self.out.copy_(y.cumsum(0) + self.count * 100)


def oracle(x, count):
    return (x * 2 + 1).reshape(2, 2).t().reshape(-1).cumsum(0) + count * 100


def test_replay_runs_operations_not_python():
    step = Step()
    tape = TapeBackend().capture(step)
    for _ in range(3):
        step.x.copy_(torch.randn(4))
        step.out.fill_(float("nan"))
        tape.replay()
        torch.testing.assert_close(step.out, oracle(step.x, 1))
    assert step.count == 1


def test_rebinding_an_input_has_no_effect():
    step = Step()
    tape = TapeBackend().capture(step)
    held = step.x
    step.x = torch.full((4,), 7.0)
    tape.replay()
    torch.testing.assert_close(step.out, oracle(held, 1))


def test_outputs_stay_at_their_address():
    made = {}

    def step():
        made["y"] = made["x"].exp()

    made["x"] = torch.zeros(3)
    tape = TapeBackend().capture(step)
    pointer = made["y"].data_ptr()
    made["x"].fill_(1.0)
    tape.replay()
    assert made["y"].data_ptr() == pointer
    torch.testing.assert_close(made["y"], torch.full((3,), 1.0).exp())


def test_fresh_zeros_are_fresh_on_every_replay():
    x, out = torch.ones(2), torch.empty(2)

    def step():
        accumulator = torch.zeros(2)
        accumulator += x
        accumulator.add_(x)
        out.copy_(accumulator)

    tape = TapeBackend().capture(step)
    for _ in range(2):
        tape.replay()
    assert out.tolist() == [2.0, 2.0]


def test_random_draws_are_new_and_follow_the_generator():
    generator = torch.Generator().manual_seed(3)
    noise = torch.empty(5)
    tape = TapeBackend().capture(lambda: noise.uniform_(generator=generator))
    generator.manual_seed(8)
    tape.replay()
    first = noise.clone()
    tape.replay()
    assert not torch.equal(first, noise)
    torch.testing.assert_close(first, torch.rand(5, generator=torch.Generator().manual_seed(8)))


def test_multiple_outputs_and_index_put():
    x, values, where = torch.randn(3, 6), torch.empty(3, 2), torch.empty(3, 2, dtype=torch.int64)
    table = torch.zeros(3, 6)

    def step():
        top = x.topk(2, dim=1)
        values.copy_(top.values)
        where.copy_(top.indices)
        table.zero_()
        table[torch.arange(3)[:, None], top.indices] = top.values

    tape = TapeBackend().capture(step)
    x.copy_(torch.randn(3, 6))
    tape.replay()
    expected = x.topk(2, dim=1)
    assert torch.equal(values, expected.values) and torch.equal(where, expected.indices)
    assert torch.equal(table, torch.zeros(3, 6).scatter(1, expected.indices, expected.values))


def test_custom_operation_is_one_node():
    library = torch.library.Library("workbench_tape_test", "DEF")
    library.define("double(Tensor x, Tensor(a!) out) -> ()")
    seen = []

    def double(x, out):
        seen.append(int(x[0]))
        out.copy_(x * 2)

    library.impl("double", double, "CPU")
    x, out = torch.tensor([1.0]), torch.tensor([0.0])
    tape = TapeBackend().capture(lambda: torch.ops.workbench_tape_test.double(x, out))
    x.fill_(5.0)
    tape.replay()
    assert tape.ops == ["workbench_tape_test::double"] and out.item() == 10.0 and seen == [1, 5]


BREAKS = {
    "item": (lambda x: x.sum().item(), ".item()"),
    "branch": (lambda x: 1 if x.sum() > 0 else 0, "a branch on a tensor's value"),
    "tolist": (lambda x: x.tolist(), ".tolist()"),
    "numpy": (lambda x: x.numpy(), ".numpy()"),
    "nonzero": (lambda x: torch.nonzero(x), "aten::nonzero"),
    "mask index": (lambda x: x[x > 0], "aten::index.Tensor"),
    "mask write": (lambda x: x.index_put_((x > 0,), x[:2] * 0), "aten::index_put_"),
    "masked_select": (lambda x: x.masked_select(x > 0), "aten::masked_select"),
    "unique": (lambda x: x.unique(), "aten::_unique2"),
    "repeat": (lambda x: torch.repeat_interleave(x, (x > 0).long()), "aten::repeat_interleave.Tensor"),
    "host tensor": (lambda x: x + torch.tensor([1.0, 2.0]), "torch.tensor"),
    "cpu": (lambda x: x.cpu(), ".cpu()"),
    "equal": (lambda x: torch.equal(x, x), "aten::equal"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_capture_names_the_operation_and_leaves_the_process_usable(name):
    body, operation = BREAKS[name]
    x = torch.tensor([1.0, 2.0])
    backend = TapeBackend()
    with pytest.raises(CaptureError, match=r"test_replay\.py:\d+") as caught:
        backend.capture(lambda: body(x))
    assert caught.value.operation == operation
    assert not is_recording()
    assert x.sum().item() == 3.0
    step = Step()
    backend.capture(step).replay()
    torch.testing.assert_close(step.out, oracle(step.x, 1))


def test_allowed_neighbours_of_what_is_refused():
    x, out = torch.tensor([1.0, -2.0]), torch.zeros(3)

    def step():
        x[x < 0] = 0.0
        out.copy_(torch.repeat_interleave(x, torch.arange(1, 3), output_size=3))

    tape = TapeBackend().capture(step)
    x.copy_(torch.tensor([-3.0, 4.0]))
    tape.replay()
    assert out.tolist() == [0.0, 4.0, 4.0]


def test_an_exception_in_the_step_is_reported_with_the_operation_before_it():
    def step():
        torch.ones(2).exp()
        raise RuntimeError("boom")

    with pytest.raises(CaptureError, match=r"aten::exp.*RuntimeError: boom"):
        TapeBackend().capture(step)


def test_nested_capture_is_refused():
    backend = TapeBackend()
    with pytest.raises(CaptureError, match="finish it first"):
        backend.capture(lambda: backend.capture(lambda: None))


def test_device_without_graphs():
    with pytest.raises(ValueError, match="'meta' has no graphs"):
        make_backend("meta")


OPS = {
    "matmul": lambda a, b: a @ b,
    "softmax": lambda a, b: (a + b).softmax(-1),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "sort": lambda a, b: a.sort(dim=1).values - b.argsort(dim=1),
    "gather": lambda a, b: a.gather(1, b.argmax(1, keepdim=True).expand(3, 3)),
    "norm": lambda a, b: a * torch.rsqrt(b.pow(2).mean(-1, keepdim=True) + 1e-6),
    "cat": lambda a, b: torch.cat([a, b])[1:4].roll(1, 0),
    "scatter": lambda a, b: a.scatter_add(1, (b > 0).long(), b),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b).triu(),
    "linear": lambda a, b: torch.nn.functional.linear(a, b).half().float(),
    "view chain": lambda a, b: a.t().reshape(-1).view(3, 3).unsqueeze(0).expand(2, 3, 3).sum(0) + b,
}


@settings(max_examples=40, deadline=None)
@given(names=st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=6), seed=st.integers(0, 2**16))
def test_replay_equals_eager_for_random_programs(names, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b, out = (
        torch.randn(3, 3, generator=generator),
        torch.randn(3, 3, generator=generator),
        torch.empty(3, 3),
    )

    def program():
        left, right = a, b
        for name in names:
            left, right = OPS[name](left, right), left
        return left

    tape = TapeBackend().capture(lambda: out.copy_(program()))
    a.copy_(torch.randn(3, 3, generator=generator))
    b.copy_(torch.randn(3, 3, generator=generator))
    expected = program()
    out.fill_(float("nan"))
    tape.replay()
    assert torch.equal(out.nan_to_num(1e9), expected.nan_to_num(1e9))
