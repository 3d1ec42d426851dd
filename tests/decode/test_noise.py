"""Noise of a step: uniform, the seed's, new at every draw, also where a graph draws it."""

import pytest
import torch

from workbench.decode.noise import NoiseSource


def draws(source: NoiseSource, device: str, n: int = 400) -> list[torch.Tensor]:
    return [source.fill(torch.full((n,), float("nan"), device=device)).clone() for _ in range(3)]


def check_source(device: str) -> None:
    source = NoiseSource(torch.device(device))
    source.seed(3)
    first = draws(source, device)
    everything = torch.cat(first)
    assert everything.min() >= 0 and everything.max() < 1 and abs(everything.mean() - 0.5) < 0.05
    assert len(everything.unique()) > 1190
    source.seed(3)
    assert all(torch.equal(a, b) for a, b in zip(first, draws(source, device)))
    saved = source.snapshot()
    then = draws(source, device)
    source.restore(saved)
    assert all(torch.equal(a, b) for a, b in zip(then, draws(source, device)))
    assert not torch.equal(then[0], first[0])
    source.seed(4)
    assert not torch.equal(first[0], draws(source, device)[0])


def test_on_the_host() -> None:
    check_source("cpu")


@pytest.mark.gpu
def test_on_the_device() -> None:
    check_source("cuda")


@pytest.mark.gpu
def test_a_replay_draws_new_numbers_without_help() -> None:
    from workbench.decode.replay import make_backend

    source, out = NoiseSource(torch.device("cuda")), torch.zeros(300, device="cuda")
    source.seed(1)
    eager = draws(source, "cuda", 300)
    source.fill(out)
    graph = make_backend("cuda").capture(lambda: source.fill(out))
    source.seed(1)
    for right in eager:
        graph.replay()
        assert torch.equal(out, right)


def test_the_kernel_counts_on_from_what_was_drawn() -> None:
    """Under the interpreter: two draws of 100 are one of 200."""
    kernel = pytest.importorskip("workbench.decode.noise_kernel")
    if torch.cuda.is_available():
        pytest.skip("compiled here: the tests on the device check it")
    whole, parts = torch.empty(200), torch.empty(2, 100)
    kernel.fill_noise(whole, torch.tensor([7, 0]))
    for i, part in enumerate(parts):
        kernel.fill_noise(part, torch.tensor([7, 100 * i]))
    assert torch.equal(whole, parts.flatten()) and whole.unique().numel() == 200


@pytest.mark.parametrize("seed", [0, 1, 7, 2**63, 2**64 - 1])
def test_the_steps_own_key_is_not_the_generators(seed: int) -> None:
    """Philox with one key and one counter would give the first token and the first step the same numbers."""
    source = NoiseSource(torch.device("cpu"))
    source.seed(seed)
    key, drawn = source.state.tolist()
    assert drawn == 0 and key != seed and abs(key - seed) > 2**32
