"""Uniform noise of a step. On a GPU its state is a tensor that the step advances, so a graph needs no help.

A torch generator that a graph draws from is prepared by the host before every replay: two launches a step.
Every row of a bucket draws, padding too: tokens follow from the seed and from the sizes that ran.
"""

import torch
from torch import Tensor

KEY_FACTOR, KEY_BITS = 0x9E3779B97F4A7C15, 63  # of the step's own Philox key: torch's takes the seed as it is


class NoiseSource:
    """Numbers in [0, 1) that follow from the seed and from how many were drawn since."""

    def __init__(self, device: torch.device) -> None:
        self.generator = torch.Generator(device)  # on CPU the source itself; on a GPU for what no graph holds
        self.state = torch.zeros(2, dtype=torch.int64, device=device)  # key, numbers drawn so far

    def seed(self, seed: int) -> None:
        """Start over. Both sources are Philox on a GPU: with one key they would draw the same numbers."""
        self.generator.manual_seed(seed)
        self.state.copy_(torch.tensor([(seed + 1) * KEY_FACTOR % (1 << KEY_BITS), 0]))

    def fill(self, out: Tensor) -> Tensor:
        """Overwrite out [n] fp32 with new numbers; safe to capture, new ones at every replay."""
        if not out.is_cuda:
            return out.uniform_(generator=self.generator)
        from workbench.decode.noise_kernel import fill_noise

        fill_noise(out, self.state)
        self.state[1].add_(out.numel())
        return out

    def snapshot(self) -> tuple[Tensor, Tensor]:
        """For `restore`."""
        return self.generator.get_state(), self.state.clone()

    def restore(self, saved: tuple[Tensor, Tensor]) -> None:
        """Go back to where the snapshot was taken."""
        self.generator.set_state(saved[0])
        self.state.copy_(saved[1])
