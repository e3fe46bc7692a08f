"""Finds spikes of the loss and of the gradient norm, as device tensors: nothing waits for the device.

A spike lies more than so many standard deviations (of a sample) above the mean of the newest applied steps. Only what
is above counts: while a loss falls, its fall widens sigma, and the limit is generous; later it is tight. A step that is
skipped does not enter the window, or a row of spikes would raise the limit until one of them passes.
"""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from megalite.config.schema import TrainConfig


class SpikeWindow:
    """The losses and gradient norms of the newest applied steps: `values` [2, window], fp64, the newest last, NaN where
    there was no step yet. All ranks hold it alike, since they judge numbers that an all-reduce has given them all."""

    def __init__(self, settings: TrainConfig, device: torch.device) -> None:
        self._sigmas, size = settings.skip_spikes or inf, settings.spike_window
        self._least = (size + 1) // 2  # steps to judge by
        self.values = torch.full((2, size), torch.nan, dtype=torch.float64, device=device)

    @torch.no_grad()
    def skips(self, loss: Tensor, norm: Tensor, skipped: Tensor) -> Tensor:
        """Whether a step is skipped (0-d): it was before, or it is a spike. If not, it enters the window."""
        step, known = torch.stack([loss, norm]).double(), (~self.values[0].isnan()).sum()
        mean = self.values.nanmean(dim=1)
        squares = (self.values - mean.unsqueeze(1)).square().nansum(dim=1)
        limit = mean + self._sigmas * (squares / (known - 1)).sqrt()
        skipped = skipped | ((known >= self._least) & (step > limit).any())
        moved = torch.cat([self.values[:, 1:], step.unsqueeze(1)], dim=1)
        self.values.copy_(torch.where(skipped, self.values, moved))
        return skipped

    def known(self) -> list[list[float]]:
        """Loss and norm of each step in the window, for a checkpoint."""
        found: list[list[float]] = self.values[:, ~self.values[0].isnan()].T.tolist()
        return found

    def fill(self, steps: Sequence[Sequence[float]]) -> None:
        """The window holds these steps, or the newest of them where it was larger when they were saved."""
        newest = torch.tensor(steps[-self.values.shape[1] :], dtype=torch.float64).view(-1, 2)
        self.values.fill_(torch.nan)
        self.values[:, self.values.shape[1] - len(newest) :] = newest.T
