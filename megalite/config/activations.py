"""The non-linearities of an MLP by name. A new one is a row here: schema, docs, sizes and mathematics follow.

A gated one multiplies the function of a gate by a second product of the same width. The functions import torch when
they are called: settings are checked without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def gelu(x: "Tensor") -> "Tensor":
    import torch.nn.functional as F

    return F.gelu(x)


def gelu_tanh(x: "Tensor") -> "Tensor":
    import torch.nn.functional as F

    return F.gelu(x, approximate="tanh")


def silu(x: "Tensor") -> "Tensor":
    import torch.nn.functional as F

    return F.silu(x)


@dataclass(frozen=True)
class Activation:
    """x [..., width], if gated [..., 2 * width] with the gate first -> [..., width]."""

    meaning: str
    function: Callable[["Tensor"], "Tensor"]
    gated: bool = False

    def __call__(self, x: "Tensor") -> "Tensor":
        if not self.gated:
            return self.function(x)
        gate, up = x.chunk(2, dim=-1)
        return self.function(gate) * up


ACTIVATIONS = {
    "gelu": Activation("gelu", gelu),
    "gelu_tanh": Activation("its tanh form (GPT-2)", gelu_tanh),
    "swiglu": Activation("swiglu (gated; Llama, Qwen)", silu, gated=True),  # Shazeer 2020
}
