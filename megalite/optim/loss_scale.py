"""The dynamic loss scale of fp16 training, as device tensors: nothing waits for the device.

The rule is that of Megatron-LM's dynamic gradient scaler. An overflow costs one of a few chances (the hysteresis) and
ends the run of good steps; once no chance is left, it halves the scale too, as does every overflow after it. A window
of good steps in a row doubles the scale and restores the chances; halving does not restore them.
"""

import torch
from torch import Tensor

GROWTH = 2.0
BACKOFF = 0.5


class LossScale:
    """What an fp16 loss is multiplied by so that small gradients do not vanish.

    The scale starts at `initial` and never falls below `minimum`; powers of two keep it exact. `window` is in steps,
    `hysteresis` (at least 1) in overflows. `value` (0-d fp32) is the scale of the next step. `state` ([3] fp32: scale,
    good steps in a row, chances left) is what a checkpoint holds; loading copies into it in place.
    """

    def __init__(
        self, *, initial: float, window: int, hysteresis: int, minimum: float, device: torch.device | str
    ) -> None:
        assert 0 < minimum <= initial
        assert window >= 1
        assert hysteresis >= 1
        self.state = torch.tensor([initial, 0.0, float(hysteresis)], dtype=torch.float32, device=device)
        self._window = window
        self._hysteresis = hysteresis
        self._minimum = minimum

    @property
    def value(self) -> Tensor:
        return self.state[0]

    @torch.no_grad()
    def update(self, overflow: Tensor) -> None:
        """Take note of a step that overflowed (`overflow` 0-d, 1.0) or did not (0.0)."""
        scale, good_steps, chances = self.state.unbind()
        bad = overflow > 0
        chances = torch.where(bad, (chances - 1).clamp(min=0), chances)
        halved = (scale * BACKOFF).clamp(min=self._minimum)
        scale = torch.where(bad & (chances == 0), halved, scale)
        good_steps = (good_steps + 1).masked_fill(bad, 0.0)
        # >=: a resumed run may have a shorter window than the one that counted
        grown = good_steps >= self._window
        scale = torch.where(grown, scale * GROWTH, scale)
        chances = chances.masked_fill(grown, float(self._hysteresis))
        good_steps = good_steps.masked_fill(grown, 0.0)
        torch.stack([scale, good_steps, chances], out=self.state)
