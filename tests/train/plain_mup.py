"""A GPT with the multipliers of muP and CompleteP in its forward pass, and how each weight is trained there: written
from the papers' tables (Yang et al. 2022, arXiv 2203.03466, table 8; Dey et al. 2025, arXiv 2505.01618, table 1)."""

from math import sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.schema import Config, ModelConfig

Weights = dict[str, Tensor]


class Recipe(NamedTuple):
    """How a weight starts (the deviation of its normal numbers, or the one number) and is trained."""

    start: float
    rate: float
    eps: float
    decay: float


def growth(model: ModelConfig) -> tuple[float, float]:
    assert model.mup_base_width
    assert model.mup_base_layers
    return model.hidden_size / model.mup_base_width, model.num_layers / model.mup_base_layers


def recipe(name: str, config: Config) -> Recipe:
    (width, depth), model, optimizer = growth(config.model), config.model, config.optimizer
    lr, eps, decay, std = optimizer.lr, optimizer.eps, optimizer.weight_decay, model.init_std
    if name.startswith(("embedding.", "head.")):
        return Recipe(std, lr, eps / width, decay)
    if name.endswith("bias") or "norm" in name:
        once = name.startswith("final_norm")  # else in a branch; norms of queries and keys add up over all heads
        eps = eps / (1 if "query_norm" in name or "key_norm" in name else width) / (1 if once else depth)
        return Recipe(0.0 if name.endswith("bias") else 1.0, lr, eps, 0.0)
    eps = eps / width / depth
    if "router" in name:  # a head of as many outputs as there are experts
        return Recipe(std, lr, eps, decay)
    if adds(name):
        std /= sqrt(2 * (model.mup_base_layers or 0))
    return Recipe(std / sqrt(width), lr / width, eps, decay * width)


def adds(name: str) -> bool:
    """Whether the layer adds to the residual stream."""
    return name.split(".")[-2] in ("out", "down")


def multiplier(name: str, model: ModelConfig) -> float:
    """What the model without multipliers has in the weight itself."""
    width, depth = growth(model)
    last = "final_norm." if model.tie_embeddings else "head."
    return 1 / width if name.startswith(last) or "router" in name else 1 / depth if adds(name) else 1.0


def loss_of(weights: Weights, model: ModelConfig, tokens: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of all labels; tokens and labels [b, s]."""
    width, depth = growth(model)
    x = weights["embedding.word.weight"][tokens]  # [b, s, h]
    if model.position == "learned":
        x = x + weights["embedding.position.weight"][: tokens.shape[1]]
    for layer in range(model.num_layers):
        block = {
            name.removeprefix(at): weight
            for name, weight in weights.items()
            if name.startswith(at := f"blocks.{layer}.")
        }
        x = x + attention(norm(x, block, "attention_norm", model), block, model) / depth
        normed = norm(x, block, "mlp_norm", model)
        y = mlp(normed, block, "mlp", model) if "mlp.down.weight" in block else experts(normed, block, model, width)
        x = x + y / depth
    head = weights["embedding.word.weight" if model.tie_embeddings else "head.weight"][: model.vocab_size]
    logits = norm(x, weights, "final_norm", model) @ head.t() / width
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def norm(x: Tensor, weights: Weights, name: str, model: ModelConfig) -> Tensor:
    weight = weights[f"{name}.weight"]
    if model.norm == "rmsnorm" or "query" in name or "key" in name:
        return F.rms_norm(x, weight.shape, weight, model.norm_eps)
    return F.layer_norm(x, weight.shape, weight, weights.get(f"{name}.bias"), model.norm_eps)


def attention(x: Tensor, block: Weights, model: ModelConfig) -> Tensor:
    """Causal, of heads in groups that share a key and a value."""
    weight, s, d = block["attention.qkv.weight"], x.shape[1], model.head_size
    qkv = torch.einsum("bsh,gndh->bgnsd", x, weight)  # of each group its queries, its key, its value
    if model.bias:
        qkv = qkv + block["attention.qkv.bias"][None, :, :, None]
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1:]
    if model.qk_norm:
        q, k = norm(q, block, "attention.query_norm", model), norm(k, block, "attention.key_norm", model)
    if model.position == "rope":
        angles = torch.outer(torch.arange(s), model.rope_theta ** (-torch.arange(0, d, 2, dtype=x.dtype) / d))
        q, k = (turned(each, angles.cos(), angles.sin()) for each in (q, k))
    scores = q @ k.transpose(-1, -2) / sqrt(d) + torch.full((s, s), -torch.inf, dtype=x.dtype).triu(1)
    mixed = (scores.softmax(-1) @ v).flatten(1, 2).transpose(1, 2).flatten(2)  # [b, s, heads * d]
    return F.linear(mixed, block["attention.out.weight"], block.get("attention.out.bias"))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def mlp(x: Tensor, block: Weights, name: str, model: ModelConfig) -> Tensor:
    down, bias = block[f"{name}.down.weight"], block.get(f"{name}.down.bias")
    if model.activation == "swiglu":
        both = torch.einsum("bsh,nfh->nbsf", x, block[f"{name}.gate_up.weight"])
        if f"{name}.gate_up.bias" in block:
            both = both + block[f"{name}.gate_up.bias"][:, None, None]
        return F.linear(F.silu(both[0]) * both[1], down, bias)
    inner = F.linear(x, block[f"{name}.up.weight"], block.get(f"{name}.up.bias"))
    return F.linear(F.gelu(inner, approximate="tanh"), down, bias)


def experts(x: Tensor, block: Weights, model: ModelConfig, width: float) -> Tensor:
    """Each token's `top_k` experts by a softmax over their logits, beside the one that all tokens share."""
    logits = x @ block["moe.router.weight"].t() / width
    chosen = logits.topk(model.moe.top_k, -1)
    shares = torch.zeros_like(logits).scatter(-1, chosen.indices, chosen.values.softmax(-1))
    y = mlp(x, block, "shared", model)
    for expert in range(model.moe.num_experts):
        own = {f"own.{of}.weight": block[f"moe.experts.{of}.weight"][expert] for of in ("gate_up", "down")}
        y = y + shares[..., expert, None] * mlp(x, own, "own", model)
    return y
