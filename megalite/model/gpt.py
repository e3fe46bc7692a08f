"""The GPT: embedding, blocks, final norm, head. Covers the GPT-2, Llama and Qwen3 families.

Activations are [s, b, h] in the compute dtype; with sequence parallelism each rank of a tensor-parallel group has its
part of the sequence between the layers, [s/t, b, h]. Parameters have the names and shapes of `gpt_parameters`; they are
created without values, which come from start values, an import or a checkpoint. What must stay outside a compiled or
recomputed block (the choice of attention kernel, the seeding of dropout) happens here, at each block's entry.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.config.schema import Config
from megalite.data.batch import Batch
from megalite.kernels.dropout import DropoutKey, DropoutStreams, Stream, hash_dropout
from megalite.kernels.pieces import statistics_dtype
from megalite.layout.stages import StageLayers
from megalite.model.attention import AttentionInputs, attention_backends, document_mask
from megalite.model.block import Block, BlockInputs
from megalite.model.embedding import Embedding
from megalite.model.loss import linear_cross_entropy
from megalite.model.norm import build_norm
from megalite.model.parameters import padded_vocabulary, vocabulary_rows
from megalite.model.rotary import rotary_frequencies, rotary_tables
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.deferred import DeferredWork
from megalite.tensor_parallel.layers import ColumnParallelLinear, Placement, RowParallelLinear, VocabParallelEmbedding
from megalite.tensor_parallel.linear import linear
from megalite.tensor_parallel.mappings import gather_from_sequence_parallel, gather_from_tensor_parallel


class GPT(nn.Module):
    """One stage of the model, by default all of it. `config` is resolved.

    `stage` says which layers are here, maybe none, whether tokens enter here, and whether final norm, head (if tied, a
    copy of the word embedding) and loss are here. With `tp` it holds this rank's shard of every layer.
    """

    embedding: Embedding
    head: VocabParallelEmbedding  # only its weight is used, as the matrix of the logits
    frequencies: Tensor  # [head_size / 2], with rotary positions

    def __init__(
        self,
        config: Config,
        *,
        dtype: torch.dtype,
        device: torch.device,
        stage: StageLayers | None = None,
        tp: TensorGroup | None = None,
    ) -> None:
        super().__init__()
        model, train = config.model, config.train
        assert train.compile is not None, "train.compile is derived before the model is built"
        layers = range(model.num_layers) if stage is None else stage.layers
        place = Placement(dtype, device, tp, bool(config.parallel.sequence_parallel) and tp is not None)
        self.config, self.dtype, self.device, self.place = model, dtype, device, place
        self.recomputed = range(0)  # layers whose blocks backward computes again
        if train.recompute == "full":
            self.recomputed = range(model.num_layers if train.recompute_layers is None else train.recompute_layers)
        modules = train.recompute_modules if train.recompute == "selective" else ()
        self.label_smoothing, self.z_loss, self.compiled = train.label_smoothing, train.z_loss, train.compile
        self.embeds = stage is None or stage.embedding
        self.has_loss = stage is None or stage.loss
        if self.embeds or (self.has_loss and model.tie_embeddings):
            positions = self.embeds and model.position == "learned"
            self.embedding = Embedding(model, place, positions=positions)
        self.blocks = nn.ModuleDict({str(layer): Block(model, place, modules) for layer in layers})
        if self.has_loss:
            self.final_norm = build_norm(model, place)
            if not model.tie_embeddings:
                self.head = VocabParallelEmbedding(padded_vocabulary(model), model.hidden_size, place)
        streams: list[Stream] = [(layer, part) for layer in layers for part in ("attention", "mlp")]
        streams += [("embedding",)] if self.embeds else []
        self.dropout_streams = DropoutStreams(config.seed, streams, device)
        self.attention_streams = DropoutStreams(config.seed, [(layer, "probabilities") for layer in layers], device)
        if model.position == "rope":
            frequencies = rotary_frequencies(model).to(device, statistics_dtype(dtype))
            self.register_buffer("frequencies", frequencies, persistent=False)
        self.before_use: Callable[[str], None] = lambda part: None  # called before parameters of a part are read
        self.deferred = DeferredWork()  # weight gradients of linear layers, of a backward that it collects
        if self.compiled:
            # Reordering for memory, inductor would finish each collective before it starts the next product.
            options = None if tp is None else {"reorder_for_peak_memory": False}
            for block in self.blocks.values():
                block.compile(fullgraph=True, dynamic=False, options=options)
        else:  # a compiled backward cannot put work off
            for layer in self.blocks.modules():
                if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
                    layer.deferred = self.deferred

    @property
    def main_grad_parameters(self) -> list[str]:
        """Parameters whose gradient backward can add straight into a buffer: all matrices and the word embedding."""
        return [name for name, _ in self.named_parameters() if self._main_grad_owner(name) is not None]

    def set_main_grads(self, main_grads: Mapping[str, Tensor]) -> None:
        """From now on add gradients of these parameters to the given fp32 (fp64) tensors of their shape."""
        assert set(main_grads) <= set(self.main_grad_parameters), main_grads.keys()
        for name, main_grad in main_grads.items():  # [outputs, inputs], as the product that is added to it
            self._main_grad_owner(name).main_grad = main_grad.view(-1, main_grad.shape[-1])

    def _main_grad_owner(self, name: str) -> Any:
        """The layer that fills the main gradient of the parameter called `name`, if one does."""
        owner = self.get_submodule(name.rpartition(".")[0])
        return owner if name.endswith(".weight") and hasattr(owner, "main_grad") else None

    def activation_shape(self, batch: Batch) -> tuple[int, int, int]:
        """Of what stages send each other for the microbatch: [s, b, h], with sequence parallelism [s/t, b, h]."""
        b, s = batch.tokens.shape
        return s // (1 if self.place.sequence is None else self.place.sequence.size), b, self.config.hidden_size

    def forward(self, batch: Batch, received: Tensor | None = None) -> Tensor:
        """What the next stage receives or, of a part that has the loss, the hidden states: [s, b, h] (or [s/t, b, h]).

        `received`, of the same shape, is the output of the stage before, None where tokens enter.
        """
        assert (received is None) == self.embeds, "a part takes tokens or what the stage before sent"
        keys = self._dropout_keys(batch)
        x = self._embed(batch, keys) if received is None else received
        if self.blocks:
            x = self._run_blocks(x, batch, keys)
        if not self.has_loss:
            return x
        self.before_use("final_norm")
        normed: Tensor = self.final_norm(x)
        return normed

    def loss(self, batch: Batch, scale: Tensor, received: Tensor | None = None) -> Tensor:
        """scale (0-d) * sum of the losses of the batch's unmasked tokens: 0-d, fp32 (fp64 in fp64), alike on tp ranks.

        Label smoothing and z-loss are part of it while training.
        """
        hidden: Tensor = self(batch, received)
        head = self._head()  # now: its values may have been on their way until here
        return linear_cross_entropy(
            hidden.flatten(0, 1),  # [s * b, h] or [s/t * b, h]
            head.weight,
            batch.labels.t().flatten(),
            batch.loss_mask.t().flatten(),
            scale,
            vocab_size=self._vocab_size,
            chunk_tokens=self.config.loss_chunk_tokens,
            main_grad=head.main_grad,
            group=self.place.tp,
            padded_vocab=padded_vocabulary(self.config),
            sequence_parallel=self.place.sequence_parallel,
            label_smoothing=self.label_smoothing if self.training else 0.0,
            z_loss=self.z_loss if self.training else 0.0,
            compile=self.compiled,
        )

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Logits of final hidden states, the same on all ranks of a model: [..., h] -> [..., vocab_size]."""
        weight, tp = self._head().weight, self.place.tp
        if tp is None:
            return linear(hidden, weight[: self._vocab_size])
        rows = [vocabulary_rows(self.config, tp.size, index) for index in range(tp.size)]
        padded = F.pad(linear(hidden, weight, group=tp), (0, max(rows) - len(weight)))
        parts = gather_from_tensor_parallel(padded, tp).split(max(rows), dim=-1)
        logits = torch.cat([part[..., :count] for part, count in zip(parts, rows, strict=True)], dim=-1)
        return logits[..., : self._vocab_size]

    def logits(self, batch: Batch) -> Tensor:
        """[b, s, vocab_size]"""
        return self.head_logits(self.whole_sequence(self(batch))).transpose(0, 1)

    def whole_sequence(self, x: Tensor) -> Tensor:
        """[s/t, b, h] of every rank -> [s, b, h] on all of them; without sequence parallelism x itself."""
        if not self.place.sequence_parallel:
            return x
        return gather_from_sequence_parallel(x, self.place.tp, partial_gradient=False)  # head_logits has summed it

    def _embed(self, batch: Batch, keys: Mapping[Stream, DropoutKey]) -> Tensor:
        self.before_use("embedding")
        x: Tensor = self.embedding(batch.tokens, batch.positions)
        dropout = self.config.embedding_dropout
        return hash_dropout(x, dropout, keys[("embedding",)]) if self.training and dropout else x

    def _dropout_keys(self, batch: Batch) -> dict[Stream, DropoutKey]:
        """By stream, what dropout needs in this microbatch; empty where nothing is dropped."""
        config, tp, number = self.config, self.place.tp, partial(torch.arange, device=self.device)
        length, b, width = self.activation_shape(batch)
        samples = batch.first_sample + number(b)
        keys: dict[Stream, DropoutKey] = {}
        if self.training and (config.dropout or config.embedding_dropout):
            first = 0 if self.place.sequence is None else self.place.sequence.index * length  # in the sample
            keys = self.dropout_streams.keys(samples, number(length) + first, width)
            keys = {at: key for at, key in keys.items() if config.dropout or at == ("embedding",)}
        if self.training and config.attention_dropout:
            ranks, index = (1, 0) if tp is None else (tp.size, tp.index)
            heads = config.num_attention_heads // ranks  # neighbours, on every rank
            every = number(batch.tokens.shape[1])
            keys |= self.attention_streams.attention_keys(samples, index * heads + number(heads), every)
        return keys

    def _attention_inputs(self, batch: Batch) -> AttentionInputs:
        """Rotary tables and document mask, built once for all layers."""
        rotation = None
        if self.config.position == "rope":
            rotation = rotary_tables(self.frequencies, batch.positions)
        mask = None if batch.documents is None else document_mask(batch.documents, self.dtype)
        return AttentionInputs(rotation, mask)

    def _run_blocks(self, x: Tensor, batch: Batch, keys: Mapping[Stream, DropoutKey]) -> Tensor:
        attention = self._attention_inputs(batch)
        for name, block in self.blocks.items():
            layer = int(name)
            self.before_use(f"blocks.{name}")
            inputs = BlockInputs(
                attention, *(keys.get((layer, part)) for part in ("probabilities", "attention", "mlp"))
            )
            run = partial(self._run_block, block)
            if layer in self.recomputed and torch.is_grad_enabled():
                x = checkpoint(run, x, inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x = run(x, inputs)
        return x

    def _run_block(self, block: nn.Module, x: Tensor, inputs: BlockInputs) -> Tensor:
        """One block and all that must happen anew when backward recomputes it."""
        with attention_backends(self.device):
            out: Tensor = block(x, inputs)
        return out

    def _head(self) -> VocabParallelEmbedding:
        """What holds the head's weight [rows of the padded vocabulary, h]: tied, the word embedding."""
        self.before_use("embedding" if self.config.tie_embeddings else "head")
        return self.embedding.word if self.config.tie_embeddings else self.head

    @property
    def _vocab_size(self) -> int:
        assert self.config.vocab_size is not None
        return self.config.vocab_size
