"""A GPT and its training loop as one writes them with plain PyTorch, the way of nanoGPT: the benchmark's third side.

Weights in fp32 under autocast where the run is in bf16, biases, norms and positions as the shape has them, the model
compiled as a whole, torch's best attention kernels asked for, one fused AdamW. Start values are torch's own.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.config.schema import Config, ModelConfig
from megalite.launch.context import ParallelContext

BEST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.head_size is not None
        assert config.num_key_value_heads is not None
        self.heads, self.groups, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_size
        self.qkv = nn.Linear(config.hidden_size, (self.heads + 2 * self.groups) * self.size, bias=config.bias)
        self.out = nn.Linear(self.heads * self.size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        """x [b, s, h]; rotation [s, head_size / 2, 2]: cosines and sines."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)  # [b, heads + 2 * groups, s, d]
        q, k, v = qkv.split((self.heads, self.groups, self.groups), dim=1)
        if rotation is not None:
            q, k = _turned(q, rotation), _turned(k, rotation)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.groups)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.ffn_hidden_size is not None
        width, self.gated = config.ffn_hidden_size, config.gated
        self.first_norm, self.second_norm = _norm(config), _norm(config)
        self.attention = Attention(config)
        self.up = nn.Linear(config.hidden_size, width * (1 + self.gated), bias=config.bias)
        self.down = nn.Linear(width, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        x = x + self.attention(self.first_norm(x), rotation)
        y = self.up(self.second_norm(x))
        if self.gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        else:
            y = F.gelu(y, approximate="tanh")
        return x + self.down(y)  # type: ignore[no-any-return]


class PlainGPT(nn.Module):
    """Tokens [b, s] -> their mean cross entropy with the next ones."""

    def __init__(self, config: ModelConfig, seq: int) -> None:
        super().__init__()
        assert config.vocab_size is not None
        assert config.head_size is not None
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(seq, config.hidden_size) if config.position == "learned" else None
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        self.norm = _norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.word.weight
        exponents = torch.arange(0, config.head_size, 2) / config.head_size
        angles = torch.arange(seq)[:, None] * config.rope_theta**-exponents
        self.register_buffer("rotation", torch.stack((angles.cos(), angles.sin()), -1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word(tokens)
        if self.position is not None:
            x = x + self.position.weight[: tokens.shape[1]]
        rotation: Any = None if self.position is not None else self.rotation
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class PlainLoop:
    """A step as one writes it by hand: `zero_grad`, autocast, `backward`, `clip_grad_norm_`, AdamW."""

    def __init__(self, config: Config, context: ParallelContext, tokens: Tensor) -> None:
        dtype = torch.float64 if context.dtype == torch.float64 else torch.float32
        self.model = PlainGPT(config.model, config.train.seq_length).to(context.device, dtype)
        self._forward: Any = torch.compile(self.model) if config.train.compile else self.model
        first, second = config.optimizer.betas
        settings = {"betas": (first, second), "weight_decay": config.optimizer.weight_decay, "fused": True}
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **settings)  # type: ignore[arg-type]
        self._autocast = torch.autocast(context.device.type, torch.bfloat16, enabled=context.dtype == torch.bfloat16)
        self._clip, self._tokens = config.optimizer.clip_grad, tokens

    def step(self) -> Tensor:
        """One step; returns its loss, a device tensor."""
        with self._autocast, sdpa_kernel(BEST, set_priority=True):
            loss: Tensor = self._forward(self._tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.bias)


def _turned(x: Tensor, rotation: Tensor) -> Tensor:
    """[b, heads, s, d] with dimension i and i + d/2 turned by the angle of i."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = rotation.to(x.dtype).unbind(-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
