"""CUDA's operations beside the same in fp64: rungs of gpu_campaign.py.

Each is a function of the device whose figures are errors by name; one above its bound raises. On a CPU the same code
runs small shapes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from megalite.kernels import attention as attention_kernels
from megalite.kernels.attention_mask import AttentionMask, block_mask, dense_mask
from megalite.kernels.embed import add_rows
from megalite.kernels.fp8 import E4M3, E5M2, OF_GRADIENTS, fp8_input_gradient, fp8_linear, fp8_weight_gradient, rounded
from megalite.kernels.products import add_transposed_product
from megalite.launch.device import KERNELS, use_attention
from megalite.model.loss import TokenLoss, linear_cross_entropy
from megalite.model.rotary import rotary_tables, rotate

Errors = dict[str, float]


def products(device: torch.device) -> Errors:
    """bf16 products added into fp32 sums, beside fp64."""
    n, out, inner = (8192, 3072, 768) if device.type == "cuda" else (64, 48, 32)
    left, right = _normal(device, n, out).bfloat16(), _normal(device, n, inner).bfloat16()
    total = _normal(device, out, inner)
    wanted = total.double() + left.double().t() @ right.double()
    add_transposed_product(total, left, right)
    return {"error": _near(total, wanted, 1e-5 if device.type == "cuda" else 1e-2)}


def fp8_products(device: torch.device) -> Errors:
    """fp8 products beside fp64 products of the same rounded numbers."""
    n, out, inner = (8192, 6144, 2048) if device.type == "cuda" else (64, 48, 32)
    x, weight, grad = (_normal(device, *shape).bfloat16() for shape in ((n, inner), (out, inner), (n, out)))
    found = {}
    for recipe, of_gradients in OF_GRADIENTS.items():
        output, x_grad = fp8_linear(x, weight, None, recipe), fp8_input_gradient(grad, weight, recipe)
        cases = (("output", output, x, E4M3, weight), ("gradient", x_grad, grad, of_gradients, weight.t()))
        for name, given, left, dtype, right in cases:
            (rows, row_scale), (columns, column_scale) = rounded(left, dtype, recipe), rounded(right, E4M3, recipe)
            wanted = (rows.double() * row_scale) @ (columns.double() * column_scale).t()
            found[f"{recipe} {name}"] = _near(given, wanted, 1e-2)
        bits, scale = rounded(x, E4M3, recipe)  # the scales of rows go into the other factor
        columns, column_scale = rounded(grad.double() * scale, E5M2, "tensorwise")
        wanted = (columns.double() * column_scale).t() @ bits.double()
        found[f"{recipe} weight"] = _near(fp8_weight_gradient(grad, x, recipe), wanted, 1e-2)
    return found


def attention(device: torch.device, *, fa4: bool = False) -> Errors:
    """Output and gradients by kernel and shape, grouped queries and masks among them, beside fp64 products.

    With `fa4` the kernels of flash-attn-4 are in place of flash's."""
    if fa4:
        use_attention("fa4", device, torch.bfloat16, (12, 12, 64))
    on_cuda = device.type == "cuda"
    found = {}
    for s, groups, d in ((1024, 12, 64), (4096, 8, 128), (2112, 12, 64)) if on_cuda else ((64, 4, 8), (96, 2, 8)):
        heads = 12 if d == 64 else 32 if on_cuda else 4
        qkv = [_normal(device, 2, count, s, d).bfloat16().requires_grad_() for count in (heads, groups, groups)]
        documents = (torch.arange(s, device=device) // (s // 3)).int().expand(2, s).contiguous()
        grad = _normal(device, 2, heads, s, d).bfloat16()
        for name in ("cudnn", "flash", "auto", "masked", "flex") if on_cuda else ("auto", "masked"):
            mask = dense_mask(documents, torch.bfloat16) if name in ("masked", "flex") else None
            wanted = _gradients(partial(_plain_attention, mask=mask), [x.detach().double() for x in qkv], grad.double())
            if name == "flex":
                table = AttentionMask(block_mask(documents))
                run = partial(_flex, torch.compile(attention_kernels.attention, fullgraph=True, dynamic=False), table)
            else:
                run = partial(_fused_attention, mask)
            with sdpa_kernel(KERNELS["flex" if name in ("masked", "flex") else name], set_priority=True):
                given = _gradients(run, qkv, grad)
            errors = [_near(ours, theirs, 5e-2) for ours, theirs in zip(given, wanted, strict=True)]
            found[f"{name} {s}x{heads}/{groups}x{d}"] = max(errors)
    return found


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    s, repeat = q.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    hidden = torch.full((s, s), float("-inf"), dtype=q.dtype, device=q.device).triu(1) if mask is None else mask
    return torch.softmax(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + hidden.to(q.dtype), -1) @ v


def _fused_attention(mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    run = torch.nn.functional.scaled_dot_product_attention
    return run(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)


def _flex(run: Callable[..., Tensor], mask: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups, (b, heads, s, d) = k.shape[1], q.shape
    split = [x.permute(2, 0, 1, 3).unflatten(2, (groups, -1)) for x in (q, k, v)]  # [s, b, groups, q_per_kv, d]
    return run(*split, mask).view(s, b, heads, d).permute(1, 2, 0, 3)


def _gradients(run: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def rotary(device: torch.device) -> Errors:
    """Queries turned in bf16, compiled on CUDA, and their gradient, beside complex numbers in fp64."""
    s, d = (4096, 128) if device.type == "cuda" else (64, 8)
    frequencies = 1e4 ** -(torch.arange(0, d, 2, device=device) / d)
    positions = torch.arange(s, device=device).expand(2, s)
    tables = rotary_tables(frequencies, positions)
    turn = torch.compile(rotate, fullgraph=True) if device.type == "cuda" else rotate
    x, grad = (_normal(device, s, 2, 2, 4, d + more)[..., :d].bfloat16() for more in (0, 1))
    found = _gradients(lambda queries: turn(queries, *tables), [x], grad)
    angles = (positions.t().double()[..., None] * frequencies.double())[:, :, None, None]  # [s, b, 1, 1, d / 2]
    errors = {}
    for name, given, start, sign in (("output", found[0], x, 1), ("gradient", found[1], grad, -1)):
        turned = torch.complex(*start.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), sign * angles)
        errors[name] = _near(given, torch.cat((turned.real, turned.imag), dim=-1), 1e-2)
    return errors


def head_and_loss(device: torch.device) -> Errors:
    """Compiled on CUDA; loss and both gradients beside fp64."""
    n, v, h = (4096, 50304, 768) if device.type == "cuda" else (64, 300, 32)
    hidden, weight = _normal(device, n, h).bfloat16(), (_normal(device, v, h) * 0.02).bfloat16()
    labels, kept = torch.randint(0, v, (n,), device=device), torch.ones(n, dtype=torch.bool, device=device)
    scale, main_grad = torch.full((), 1 / n, device=device), torch.zeros(v, h, device=device)
    hidden.requires_grad_(), weight.requires_grad_()
    token_loss, compiled = TokenLoss(v, None, v, 0.0, 0.0), device.type == "cuda"
    loss = linear_cross_entropy(hidden, weight, labels, kept, scale, token_loss, main_grad=main_grad, compile=compiled)
    loss.backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), labels)
    wanted.backward()
    assert hidden.grad is not None
    pairs = ((loss, wanted, 1e-4), (hidden.grad, exact[0].grad, 2e-2), (main_grad, exact[1].grad, 2e-2))
    errors = [_near(ours, theirs, bound) for ours, theirs, bound in pairs if theirs is not None]
    return dict(zip(("loss", "hidden", "weight"), errors, strict=True))


def embedding(device: torch.device) -> Errors:
    """Gradients of a long and a short table; twice, to the same bits."""
    rows, values = torch.randint(0, 5000, (8192,), device=device), _normal(device, 8192, 64)
    found = {}
    for length in (6000, 100_000):
        totals = [torch.zeros(length, 64, device=device) for _ in range(2)]
        for total in totals:
            add_rows(total, rows, values)
        wanted = torch.zeros(length, 64, dtype=torch.float64, device=device).index_add_(0, rows, values.double())
        assert torch.equal(*totals), "the order of additions changes"
        found[str(length)] = _near(totals[0], wanted, 1e-5)
    return found


def _normal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device=device).manual_seed(sum(shape)), device=device)


def _near(found: Tensor, wanted: Tensor, bound: float) -> float:
    """The largest difference by the largest number; an error where it is above the bound, or no number."""
    error = ((found.detach().double() - wanted.detach()).abs().max() / wanted.detach().abs().max()).item()
    assert error <= bound, f"differs by {error:.3g} of the largest, more than {bound:g}"  # NaN is not <= either
    return error
