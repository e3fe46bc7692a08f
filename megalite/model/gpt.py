"""The GPT: embedding, blocks, final norm, head. Covers the GPT-2, Llama and Qwen3 families, and experts in their MLPs'
place.

Activations are [s, b, h] in the compute dtype; with sequence parallelism each rank of a tensor-parallel group has its
part of the sequence between the layers, [s/t, b, h]. Parameters have the names and shapes of `gpt_parameters`; they are
created without values, which come from start values, an import or a checkpoint. What must stay outside a compiled or
recomputed block (the choice of attention kernel, the seeding of dropout) happens here, at each block's entry.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.config.schema import Config, TrainConfig
from megalite.context_parallel.attention import whole_sequence
from megalite.context_parallel.exchange import CpGroups
from megalite.data.batch import Batch
from megalite.data.open import source_names
from megalite.kernels.dropout import DropoutKey, DropoutStreams, Stream, hash_dropout
from megalite.kernels.embed import main_grad_of
from megalite.kernels.fp8 import Recipe
from megalite.kernels.products import statistics_dtype
from megalite.layout.stages import StageLayers
from megalite.model.attention import BlockInputs, attention_mask
from megalite.model.block import Block
from megalite.model.embedding import Embedding
from megalite.model.loss import TokenLoss, linear_cross_entropy
from megalite.model.norm import build_norm
from megalite.model.parameters import padded_vocabulary
from megalite.model.rotary import rotary_frequencies, rotary_magnitude, rotary_tables
from megalite.moe.balance import AFTER_COUNTS, TokenMasks, counts_of, update_router
from megalite.moe.dispatch import ExpertRanks
from megalite.moe.router import Router
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.deferred import DeferredWork
from megalite.tensor_parallel.layers import TpContext, VocabParallelEmbedding
from megalite.tensor_parallel.linear import linear
from megalite.tensor_parallel.mappings import gather_from_sequence_parallel, reduce_from_tensor_parallel

OVERLAPPED = {  # inductor's options that start collectives early and finish them late
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits"],
}


def compile_options(tp: TensorGroup | None, *, async_tp: bool) -> dict[str, Any] | None:
    """Options of inductor, which else finishes each collective of backward before it starts the products that could
    hide it."""
    if tp is None:
        return None
    return OVERLAPPED | ({"_micro_pipeline_tp": True} if async_tp else {})


def unseen(part: str, x: Tensor) -> None:
    """Nobody looks at what a part has computed."""


class GPT(nn.Module):
    """One stage of the model, by default all of it. `config` is resolved.

    `stage` says which layers are here, maybe none, whether tokens enter here, and whether final norm, head (if tied, a
    copy of the word embedding) and loss are here. With `tp` it holds this rank's shard of every layer, and of experts
    those that are its own among `expert_ranks`; with `context` it computes this rank's part of each sequence.
    `router_metrics` [layers of the model with experts, 2 E + 5] (balance.py) are summed up over the microbatches of
    training until someone sets them to 0; rows of layers on other stages stay 0. So is `source_sums` [parts of a blend,
    2]: sums of losses and numbers of unmasked tokens, on the first rank of tp of a stage with the loss.
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
        context: CpGroups | None = None,
        expert_ranks: ExpertRanks = ExpertRanks(),  # noqa: B008 - it cannot change
    ) -> None:
        super().__init__()
        model, train = config.model, config.train
        self.config, self.dtype, self.device, self.context = model, dtype, device, context
        self.vocab_size, self.compiled, self.kernels = model.vocab_size, train.compile, train.attention
        self.label_smoothing, self.z_loss = train.label_smoothing, train.z_loss
        self.deferred = DeferredWork()  # weight gradients of linear layers, of a backward that it collects
        sequence = tp if config.parallel.sequence_parallel else None
        # A compiled backward cannot defer work.
        self.place = TpContext(dtype, device, tp, sequence, None if train.compile else self.deferred)
        self.sharing = self.place.sequence if context is None else context.sharing  # ranks with parts of one sequence
        self.recomputed = range(0)  # layers whose blocks backward computes again
        if train.recompute == "full":
            self.recomputed = range(model.num_layers if train.recompute_layers is None else train.recompute_layers)
        layers = range(model.num_layers) if stage is None else stage.layers
        self.embeds = stage is None or stage.embedding
        self.has_loss = stage is None or stage.loss
        if self.embeds or (self.has_loss and model.tie_embeddings):
            positions = self.embeds and model.position == "learned"
            self.embedding = Embedding(model, self.place, positions=positions)
        self.blocks = nn.ModuleDict({str(layer): self._block(layer, train, expert_ranks) for layer in layers})
        self.largest_logits = dict[int, Tensor]()  # by layer, [groups of heads here]: training raises what is there
        width = 2 * model.moe.num_experts + AFTER_COUNTS
        self.router_metrics = torch.zeros(len(model.expert_layers), width, dtype=torch.float64, device=device)
        first = sum(layer < layers.start for layer in model.expert_layers)
        self._own_metrics = self.router_metrics[first:][: len(self.routers)]
        self.source_sums = torch.zeros(len(source_names(config.data)), 2, dtype=torch.float64, device=device)
        if self.has_loss:
            self.final_norm = build_norm(model, self.place)
            if not model.tie_embeddings:
                self.head = VocabParallelEmbedding(padded_vocabulary(model), model.hidden_size, self.place)
        streams: list[Stream] = [("embedding",), *((layer, part) for layer in layers for part in ("attention", "mlp"))]
        self.dropout_streams = DropoutStreams(config.seed, streams, device)
        self.attention_streams = DropoutStreams(config.seed, [(layer, "probabilities") for layer in layers], device)
        if model.position == "rope":
            frequencies = rotary_frequencies(model).to(device, statistics_dtype(dtype))
            self.register_buffer("frequencies", frequencies, persistent=False)
        self.before_use: Callable[[str], None] = lambda part: None  # called before parameters of a part are read
        self.after_part: Callable[[str, Tensor], None] = unseen  # called with what a part of forward has computed
        for block in self._blocks() if self.compiled else ():
            block.compile_parts(compile_options(tp, async_tp=bool(config.parallel.async_tp)))

    def _block(self, layer: int, train: TrainConfig, expert_ranks: ExpertRanks) -> Block:
        # No fp8 in the first and the last layer, nor in the head: these lose most by rounding.
        place = self.place
        if train.fp8 is not None and 0 < layer < self.config.num_layers - 1:
            place = replace(place, fp8=Recipe(train.fp8, train.fp8_weight_gradients))
        modules = train.recompute_modules if train.recompute == "selective" else ()
        experts = expert_ranks if self.config.has_experts(layer) else None
        return Block(self.config, place, modules, self.context, experts)

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks.values() if isinstance(block, Block)]

    @property
    def routers(self) -> dict[int, Router]:
        """The routers of the layers with experts, by layer."""
        pairs = zip(self.blocks, self._blocks(), strict=True)
        return {int(name): block.moe.router for name, block in pairs if block.moe is not None}

    def activation_shape(self, batch: Batch) -> tuple[int, int, int]:
        """The shape that stages send each other for a microbatch: [s, b, h], with sequence parallelism [s/t, b, h]."""
        b, s = batch.tokens.shape
        return s // (1 if self.place.sequence is None else self.place.sequence.size), b, self.config.hidden_size

    def forward(self, batch: Batch, received: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        """What the next stage receives or, of a stage with the loss, the hidden states: [s, b, h] (or [s/t, b, h]).

        `received`, of the same shape, is the output of the stage before, None where tokens enter. Given the `scale` of
        the loss, routers add their losses and ignore sequences without a counted label.
        """
        assert (received is None) == self.embeds, "a stage takes tokens or what the stage before sent"
        keys = self._dropout_keys(batch)
        x = self._embed(batch, keys) if received is None else received
        self.after_part("embedding" if received is None else "received", x)
        if self.blocks:
            x = self._run_blocks(x, batch, keys, scale)
        if self.has_loss:
            self.before_use("final_norm")
            x = self.final_norm(x)
            self.after_part("final_norm", x)
        return x

    def loss(self, batch: Batch, scale: Tensor, received: Tensor | None = None) -> Tensor:
        """scale (0-d) * sum of the losses of the batch's unmasked tokens: 0-d, fp32 (fp64 in fp64), alike on tp ranks.

        Label smoothing and z-loss are part of it while training. A stage without the loss returns what `forward` does.
        A head with a main gradient adds to it in this very call, so backward must begin here, with a gradient of one.
        Losses of routers enter in backward alone: they are in the gradients, and in `router_metrics`.
        """
        hidden: Tensor = self(batch, received, scale)
        if not self.has_loss:
            return hidden
        head = self._head()  # only now: it waits for the all-gather of its weight
        extras = (self.label_smoothing, self.z_loss) if self.training else (0.0, 0.0)
        loss = linear_cross_entropy(
            hidden.flatten(0, 1),  # [s * b, h] or [s/t * b, h]
            head.weight,
            batch.labels.t().flatten(),
            batch.loss_mask.t().flatten(),
            scale,
            TokenLoss(padded_vocabulary(self.config), self.place.tp, self.vocab_size, *extras),
            chunk_tokens=self.config.loss_chunk_tokens,
            main_grad=main_grad_of(head.weight),
            sequence_parallel=self.place.sequence is not None,
            compile=self.compiled,
            note=partial(self._add_by_source, batch),
        )
        self.after_part("loss", loss)
        return loss

    def _add_by_source(self, batch: Batch, losses: Tensor) -> None:
        """Count the losses [s * b] of a microbatch of a blend, and its unmasked tokens."""
        tp = self.place.tp
        if batch.sources is None or not self.training or (tp is not None and tp.index > 0):  # ranks of tp know the same
            return
        sums = losses.view(-1, len(batch.sources)).sum(0, dtype=torch.float64), batch.loss_mask.sum(1)  # [b] each
        numbers = torch.arange(len(self.source_sums), device=self.device)
        is_from = batch.sources == numbers[:, None]  # [parts, b]; in one order always, as an index_add_ would not be
        self.source_sums += torch.where(is_from[..., None], torch.stack(sums, 1), 0.0).sum(1)

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Logits of final hidden states, alike on the ranks of tp: [..., h] -> [..., vocab_size]."""
        head, tp = self._head(), self.place.tp
        if tp is None:
            return linear(hidden, head.weight[: self.vocab_size])
        own, columns = linear(hidden, head.weight, group=tp), padded_vocabulary(self.config) - head.first_row
        in_place = F.pad(own, (head.first_row, columns - own.shape[-1]))  # zero where other ranks have the columns
        return reduce_from_tensor_parallel(in_place, tp)[..., : self.vocab_size]

    def logits(self, batch: Batch) -> Tensor:
        """[b, s, vocab_size]"""
        return self.head_logits(self.whole_sequence(self(batch))).transpose(0, 1)

    def whole_sequence(self, x: Tensor) -> Tensor:
        """This rank's part of the final hidden states of sequences without documents -> [s, b, h]."""
        x = gather_from_sequence_parallel(x, self.place.sequence)
        return x if self.context is None else whole_sequence(x, self.context)

    def _embed(self, batch: Batch, keys: Mapping[Stream, DropoutKey]) -> Tensor:
        self.before_use("embedding")
        x: Tensor = self.embedding(batch.tokens, batch.positions)
        key, dropout = keys.get(("embedding",)), self.config.embedding_dropout
        return hash_dropout(x, dropout, key) if key is not None and dropout else x

    def _dropout_keys(self, batch: Batch) -> dict[Stream, DropoutKey]:
        """Dropout keys of this microbatch by stream; streams with probability 0 have none."""
        config, split, arange = self.config, self.place.sequence, partial(torch.arange, device=self.device)
        keys: dict[Stream, DropoutKey] = {}
        if self.training and (config.dropout or config.embedding_dropout):
            places = batch.places if split is None else batch.places.chunk(split.size)[split.index]
            keys = self.dropout_streams.keys(batch.samples, places, config.hidden_size)
            dropped = {True: config.embedding_dropout, False: config.dropout}
            keys = {stream: key for stream, key in keys.items() if dropped[stream == ("embedding",)]}
        if self.training and config.attention_dropout:
            heads = range(config.num_attention_heads)  # neighbours, on every rank
            for group in (self.place.tp, None if self.context is None else self.context.alltoall):
                if group is not None:
                    heads = heads[group.index * len(heads) // group.size :][: len(heads) // group.size]
            own = heads.start + arange(len(heads))
            keys |= self.attention_streams.attention_keys(batch.samples, own, arange(batch.length))
        return keys

    def _run_blocks(self, x: Tensor, batch: Batch, keys: Mapping[Stream, DropoutKey], scale: Tensor | None) -> Tensor:
        ordered = self.config.moe.capacity_factor is not None and self.training
        rope, split = self.config.position == "rope", self.place.sequence
        shared = BlockInputs(  # rotary tables and masks are built once for all layers
            rotation=rotary_tables(self.frequencies, batch.positions, rotary_magnitude(self.config)) if rope else None,
            mask=attention_mask(batch, x, self.config, self.kernels, compiled=self.compiled),
            tokens=TokenMasks.of(batch, scale, self.sharing, split, ordered=ordered) if self.routers else None,
        )
        noted = self.largest_logits if self.training else {}
        for name, block in self.blocks.items():
            layer = int(name)
            self.before_use(f"blocks.{name}")
            inputs = replace(
                shared,
                probability_dropout=keys.get((layer, "probabilities")),
                attention_dropout=keys.get((layer, "attention")),
                mlp_dropout=keys.get((layer, "mlp")),
                logits=(noted[layer], batch.places, batch.documents) if layer in noted else None,
            )
            if layer in self.recomputed and torch.is_grad_enabled():
                x = checkpoint(block, x, inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, inputs)
            self.after_part(f"blocks.{name}", x)
        if shared.routing and self.training and torch.is_grad_enabled():
            self._own_metrics += torch.stack(shared.routing)
        return x

    def _head(self) -> VocabParallelEmbedding:
        """What holds the head's weight [rows of the padded vocabulary, h]: tied, the word embedding."""
        self.before_use("embedding" if self.config.tie_embeddings else "head")
        return self.embedding.word if self.config.tie_embeddings else self.head


class Routers:
    """The routers of all `chunks` on this rank, as a step meets them: metrics and state. A dense model has none."""

    def __init__(self, chunks: Sequence[GPT]) -> None:
        self._chunks = chunks
        self._layers = chunks[0].config.expert_layers  # of the whole model

    def start_step(self) -> None:
        """Forget the counts of the step before."""
        for chunk in self._chunks:
            chunk.router_metrics.zero_()

    def figures(self) -> Tensor:
        """What this rank counted in the step, [layers of the model with experts, 2 E + 5] fp64 (balance.py): 0 where a
        layer is elsewhere, so that the sum over all ranks is the whole model's."""
        return torch.stack([chunk.router_metrics for chunk in self._chunks]).sum(0)

    def update(self, table: Tensor, skip: Tensor) -> None:
        """After a step, with the sum over all ranks; nothing changes where `skip` (0-d) is 1."""
        counts, balanced = counts_of(table)
        for name, router in self._named():
            at = self._layers.index(name)
            update_router(router, counts[at], balanced[at], skip)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """What steps change beside the parameters, by name: the same on all ranks that hold the layer."""
        for layer, router in self._named():
            yield f"blocks.{layer}.moe.router.expert_bias", router.expert_bias
            yield f"blocks.{layer}.moe.router.share", router.share

    def _named(self) -> Iterator[tuple[int, Router]]:
        for chunk in self._chunks:
            yield from chunk.routers.items()
