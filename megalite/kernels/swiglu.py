"""SwiGLU (Shazeer 2020) without a copy that joins the gradients of gate and up."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [..., 2 * ffn] -> [..., ffn]."""
    if torch.compiler.is_compiling():  # a compiler makes one kernel of the chain
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    return _SwiGLU.apply(gate_up)  # type: ignore[no-any-return]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grads[0], activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return grad_gate_up
