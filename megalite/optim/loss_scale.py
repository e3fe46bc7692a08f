"""The dynamic loss scale of fp16 training, as device tensors: nothing waits for the device.

The rule is that of Megatron-LM's dynamic gradient scaler. An overflow costs one of a few chances (the hysteresis) and
ends the run of good steps; once no chance is left, it halves the scale too, as does every overflow after it. A window
of good steps in a row doubles the scale and restores the chances; halving does not restore them.
"""

import torch
from torch import Tensor

from megalite.config.schema import OptimizerConfig


class LossScale:
    """The factor of an fp16 loss, so that small gradients do not vanish.

    The settings give where it starts, how low it falls, the window in steps and the hysteresis in overflows. `state`
    ([3] fp32: scale, good steps in a row, chances left) is what a checkpoint holds; loading copies into it.
    """

    def __init__(self, settings: OptimizerConfig, device: torch.device) -> None:
        start = [settings.initial_loss_scale, 0.0, float(settings.hysteresis)]
        self.state = torch.tensor(start, dtype=torch.float32, device=device)
        self._window, self._hysteresis = settings.loss_scale_window, settings.hysteresis
        self._minimum = settings.min_loss_scale

    @torch.no_grad()
    def update(self, overflow: Tensor) -> None:
        """Take note of a step that overflowed (`overflow` 0-d, 1.0) or did not (0.0)."""
        scale, good_steps, chances = self.state.unbind()
        bad = overflow > 0
        chances = torch.where(bad, (chances - 1).clamp(min=0), chances)
        scale = torch.where(bad & (chances == 0), (scale * 0.5).clamp(min=self._minimum), scale)
        good_steps = (good_steps + 1).masked_fill(bad, 0.0)
        # >=: a resumed run may have a shorter window than the one that counted
        grown = good_steps >= self._window
        scale = torch.where(grown, scale * 2.0, scale)
        chances = chances.masked_fill(grown, float(self._hysteresis))
        good_steps = good_steps.masked_fill(grown, 0.0)
        torch.stack([scale, good_steps, chances], out=self.state)
