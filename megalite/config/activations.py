"""The non-linearities of an MLP by name. A new one is a row here: schema, docs, sizes and mathematics follow.

Functions get torch.nn.functional and x: torch is imported when they are called, as settings are checked without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """x [..., width] -> [..., width]; if gated, x [..., 2 * width] holds the gate and the factor of its function."""

    meaning: str
    function: Callable[[Any, "Tensor"], "Tensor"]
    gated: bool = False

    def __call__(self, x: "Tensor") -> "Tensor":
        import torch.nn.functional as functional

        if not self.gated:
            return self.function(functional, x)
        gate, up = x.chunk(2, dim=-1)
        return self.function(functional, gate) * up


ACTIVATIONS = {
    "gelu": Activation("gelu", lambda f, x: f.gelu(x)),
    "gelu_tanh": Activation("its tanh form (GPT-2)", lambda f, x: f.gelu(x, approximate="tanh")),
    "swiglu": Activation("swiglu (gated; Llama, Qwen)", lambda f, x: f.silu(x), gated=True),  # Shazeer 2020
}
