"""The GPT: embedding, blocks, final norm, head. Covers the GPT-2, Llama and Qwen3 families.

Activations are [s, b, h] in the compute dtype. Parameters have the names and shapes of `gpt_parameters`; they are
created without values, which come from start values, an import or a checkpoint. What must stay outside a compiled or
recomputed block (the choice of attention kernel, the seeding of dropout) happens here, at each block's entry.
"""

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.config.schema import ModelConfig
from megalite.data.batch import Batch
from megalite.model.attention import AttentionInputs, attention_backends, document_mask
from megalite.model.block import Block
from megalite.model.dropout import EMBEDDING, derive_dropout
from megalite.model.embedding import Embedding, Table
from megalite.model.linear import linear
from megalite.model.loss import linear_cross_entropy
from megalite.model.norm import build_norm, statistics_dtype
from megalite.model.parameters import padded_vocabulary
from megalite.model.rotary import rotary_frequencies, rotary_tables


class GPT(nn.Module):
    """Layers `layers` of the model; the part with the first embeds, the part with the last has final norm and head."""

    embedding: Embedding
    head: Table
    frequencies: Tensor  # [head_size / 2], with rotary positions

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        recompute: str = "none",
        compile: bool = False,
        layers: range | None = None,
    ) -> None:
        super().__init__()
        layers = range(config.num_layers) if layers is None else layers
        self.config, self.dtype, self.device = config, dtype, device
        self.seed, self.recompute = seed, recompute
        self.is_first, self.is_last = layers.start == 0, layers.stop == config.num_layers
        if self.is_first or (self.is_last and config.tie_embeddings):
            positions = self.is_first and config.position == "learned"
            self.embedding = Embedding(config, dtype, device, positions=positions)
        self.blocks = nn.ModuleDict({str(layer): Block(config, dtype, device) for layer in layers})
        if self.is_last:
            self.final_norm = build_norm(config, dtype, device)
            if not config.tie_embeddings:
                self.head = Table(padded_vocabulary(config), config.hidden_size, dtype, device)
        if config.position == "rope":
            frequencies = rotary_frequencies(config).to(device, statistics_dtype(dtype))
            self.register_buffer("frequencies", frequencies, persistent=False)
        self._sinks: dict[str, Tensor] = {}
        if compile:
            for block in self.blocks.values():
                block.compile(fullgraph=True, dynamic=False)

    @property
    def sunk_parameters(self) -> list[str]:
        """Parameters whose gradient backward can add straight into a buffer: the word embedding and the head."""
        return [name for name, _ in self.named_parameters() if name in ("embedding.word.weight", "head.weight")]

    def gradient_sinks(self, sinks: Mapping[str, Tensor]) -> None:
        """From now on add gradients of these parameters to the given fp32 (fp64) tensors of their shape."""
        assert set(sinks) <= set(self.sunk_parameters), sinks.keys()
        self._sinks = dict(sinks)

    def forward(self, batch: Batch, received: Tensor | None = None) -> Tensor:
        """Hidden states after the last layer held here (after the final norm where it is held): [s, b, h].

        `received` [s, b, h] is the output of the layers before, None where the first layer is held.
        """
        x = self._embed(batch) if received is None else received
        inputs = self._attention_inputs(batch)
        for layer, block in self.blocks.items():
            run = partial(self._run_block, block, int(layer), batch.number)
            if self.recompute == "full" and torch.is_grad_enabled():
                x = checkpoint(run, x, inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x = run(x, inputs)
        return self.final_norm(x) if self.is_last else x

    def loss(self, batch: Batch, scale: Tensor, received: Tensor | None = None) -> Tensor:
        """scale (0-d) * sum of the losses of the batch's unmasked tokens: 0-d, fp32 (fp64 in fp64)."""
        name, weight = self._head_weight()
        return linear_cross_entropy(
            self(batch, received).flatten(0, 1),  # [s * b, h]
            weight,
            batch.labels.t().flatten(),
            batch.loss_mask.t().flatten(),
            scale,
            vocab_size=self._vocab_size,
            chunk_tokens=self.config.loss_chunk_tokens,
            grad_sink=self._sinks.get(name),
        )

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states that passed the final norm: [..., h] -> [..., vocab_size]."""
        return linear(hidden, self._head_weight()[1][: self._vocab_size])

    def logits(self, batch: Batch) -> Tensor:
        """[b, s, vocab_size]"""
        return self.head_logits(self(batch)).transpose(0, 1)

    def _embed(self, batch: Batch) -> Tensor:
        x: Tensor = self.embedding(batch.tokens, batch.positions, self._sinks.get("embedding.word.weight"))
        dropout = self.config.embedding_dropout
        if not (self.training and dropout):
            return x
        derive_dropout(self.seed, batch.number, EMBEDDING, self.device)
        return F.dropout(x, dropout)

    def _attention_inputs(self, batch: Batch) -> AttentionInputs:
        """Rotary tables and document mask, built once for all layers."""
        rotation = None
        if self.config.position == "rope":
            assert self.config.num_key_value_heads is not None
            q_per_kv = self.config.num_attention_heads // self.config.num_key_value_heads
            rotation = rotary_tables(self.frequencies, batch.positions, q_per_kv)
        mask = None if batch.documents is None else document_mask(batch.documents, self.dtype)
        return AttentionInputs(rotation, mask)

    def _run_block(self, block: nn.Module, layer: int, number: int, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """One block and all that must happen anew when backward recomputes it."""
        if self.training and (self.config.dropout or self.config.attention_dropout):
            derive_dropout(self.seed, number, layer, self.device)
        with attention_backends(self.device):
            out: Tensor = block(x, inputs)
        return out

    def _head_weight(self) -> tuple[str, Tensor]:
        """Name and weight [padded vocabulary, h] of the head."""
        if self.config.tie_embeddings:
            return "embedding.word.weight", self.embedding.word.weight
        return "head.weight", self.head.weight

    @property
    def _vocab_size(self) -> int:
        assert self.config.vocab_size is not None
        return self.config.vocab_size
