"""Trains a few steps on any layout and records everything that must not depend on the layout."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.manifest import Piece
from megalite.checkpoint.reading import newest
from megalite.checkpoint.store import save
from megalite.config.derive import derive, derive_vocabulary
from megalite.config.schema import Config, MoEConfig, MuonConfig
from megalite.config.settings import as_plain
from megalite.config.step_plan import planned_steps
from megalite.data.batches import train_batches, validation_batches
from megalite.data.open import open_data
from megalite.launch.context import ParallelContext
from megalite.model.gpt import Routers
from megalite.optim.buffers import TrainingBuffers
from megalite.optim.layer_norms import norms_of
from megalite.optim.optimizer import slices_of
from megalite.optim.schedule import decay_factor, learning_rate
from megalite.optim.update_sizes import elements_of, sizes_of
from megalite.prepare.prepare import prepare
from megalite.train.build import build_training, data_share, derive_device, fill_with_start_values
from megalite.train.evaluate import ValidationMetrics, evaluate
from megalite.train.saving import owned_pieces, training_pieces
from megalite.train.step import TrainStep
from tests.checkpoint.samples import index_of

STEPS, GLOBAL_BATCH = 5, 12
RELATIVE, ABSOLUTE = 1e-10, 1e-12  # the design's bound on every layout against one process, in fp64

Overrides = dict[str, dict[str, Any]]  # settings by section
FAMILIES: Overrides = {
    "gpt2": {"norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "bias": True},
    "llama": {"num_key_value_heads": 2, "tie_embeddings": False},
    "qwen3": {"num_key_value_heads": 1, "qk_norm": True, "head_size": 8},
}


@dataclass(frozen=True)
class Trace:
    """What one rank of a run computed, of each tensor the boxes that it holds."""

    losses: list[float]
    grad_norms: list[float]
    tokens: list[int]
    validation: ValidationMetrics  # after the last step, as is all that follows but the gradients
    averaged: ValidationMetrics | None  # with the averages of the weights, where there are some
    gradients: list[list[Piece]]  # of each step, after all sums over ranks and before clipping
    parameters: list[Piece]
    state: dict[str, list[Piece]]  # of the optimizer, masters and their averages
    routers: dict[str, Tensor]  # of each layer here with experts what balances them without a gradient
    routing: list[Tensor]  # of each step, what all routers counted; empty without experts
    logits: list[list[float]]  # of each step, the largest of each layer, with QK-clip
    sizes: list[dict[str, dict[str, float]]]  # of each step, of its update and of the weights
    layers: list[dict[str, dict[str, float]]]  # of each step, of outputs and gradients
    sources: list[Tensor]  # of each step, losses and tokens by part of a blend


def merged(*changes: Overrides) -> Overrides:
    """All of them: of each section, the later settings over the earlier."""
    together: Overrides = {}
    for overrides in changes:
        for section, values in overrides.items():
            together[section] = {**together.get(section, {}), **values}
    return together


def small_config(
    text: Path, cache: Path, family: str = "llama", world_size: int = 1, **overrides: dict[str, Any]
) -> Config:
    """A config that trains in milliseconds; `overrides` are per section (train={...})."""
    config = Config(precision="fp64", device="cpu", tokenizer="byte", seed=7)
    config.data = replace(config.data, source="text", path=str(text), cache_dir=str(cache), workers=1)
    config.model = replace(
        config.model, num_layers=2, hidden_size=32, num_attention_heads=4, init_std=0.2, **FAMILIES[family]
    )
    config.train = replace(config.train, steps=STEPS, global_batch_size=GLOBAL_BATCH, seq_length=16, eval_batches=1)
    config.optimizer = replace(config.optimizer, lr=1e-2, clip_grad=0.05)
    config.lr = replace(config.lr, warmup_steps=2)
    config.log = replace(config.log, update_sizes=True, layer_norms_interval=1)
    for section, values in overrides.items():
        inner = {"moe": MoEConfig, "muon": MuonConfig}
        values = {name: inner[name](**value) if name in inner else value for name, value in values.items()}
        setattr(config, section, replace(getattr(config, section), **values))
    if isinstance(config.data.path, list):  # names beside the text
        config.data.path = [str(text.parent / name) for name in config.data.path]
    return derive(config, world_size)


def train(
    context: ParallelContext,
    config: Config,
    steps: int = STEPS,
    *,
    continued: Path | None = None,
    saved: Path | None = None,
) -> Trace:
    """A few steps of the real training step on this rank's share of the real batches.

    They start after those of the checkpoint in the folder `continued`, and end in one in `saved`.
    """
    data = open_data(config, prepare(config))
    config = derive_device(derive_vocabulary(config, data.train.vocab_size), context)
    training = build_training(config, context)
    buffers = training.buffers
    done = 0
    if continued is None:
        fill_with_start_values(buffers, config, context)
    else:
        found = newest(continued, context, print)
        assert found is not None
        found.read_into(training_pieces(training))
        training.cast_and_gather_params()
        done = found.manifest.step
    step = TrainStep(training, config.optimizer, context)
    plan, share = islice(planned_steps(config.train, done=0, samples=0), done, None), data_share(context)
    figures, gradients = [], []
    with train_batches(data.train, config, plan, context.device, share) as batches:
        for batch in islice(batches, steps):
            if batch.planned.skipped:
                continue
            at, peak, all_steps = batch.planned.step - 1, config.optimizer.lr, config.train.steps
            lr = learning_rate(at, config.lr, peak=peak, steps=all_steps)
            decay = decay_factor(at, config.optimizer.weight_decay_schedule, lr=lr, peak=peak, steps=all_steps)
            layers = training.layer_norms
            assert layers is not None
            more: dict[str, Any] = {"decay_factor": decay, "measures": True, "layers": layers}
            with layers.watching():
                figures.append(step(batch.microbatches, batch.local_tokens, lr, **more).read())
            gradients.append(_owned(buffers, buffers.gradients))
    training.gather.finish()
    assert data.validation is not None

    def validate() -> ValidationMetrics | None:
        held_out = validation_batches(data.validation, config, context.device, share)
        return evaluate(training, context, held_out, data.bytes_of_ids)

    validation, averaged = validate(), None
    if buffers.averages:
        with training.averaged():
            averaged = validate()
    if saved is not None:
        about = {"description": "the layouts' text", "fingerprint": "of that text"}
        state = {"config": as_plain(config), "progress": {"tokens": 0}, "data": about}
        saved.parent.mkdir(parents=True, exist_ok=True)  # the run folder
        save(saved, done + steps, training_pieces(training), state, context, keep=1)
    state = {**buffers.kept, **slices_of(training.optimizer.state())}
    return Trace(
        losses=[f.loss for f in figures],
        grad_norms=[f.grad_norm for f in figures],
        tokens=[f.batch_tokens for f in figures],
        validation=validation,
        averaged=averaged,
        gradients=gradients,
        parameters=_copies(held_pieces(buffers)),
        state={name: _owned(buffers, slices) for name, slices in state.items()},
        routing=[f.routing for f in figures if f.routing is not None],
        logits=[[*f.largest_logits] for f in figures if f.largest_logits],
        sizes=[sizes_of(f.squares, elements_of(config)) for f in figures if f.squares is not None],
        layers=[norms_of(f.layers, config, GLOBAL_BATCH * 16, 1.0) for f in figures if f.layers is not None],
        sources=[f.sources for f in figures if f.sources is not None],
        routers={name: value.clone() for name, value in Routers(training.chunks).state()},
    )


def _owned(buffers: TrainingBuffers, slices: Sequence[Tensor]) -> list[Piece]:
    return _copies(owned_pieces("", buffers.owned, slices))


def held_pieces(buffers: TrainingBuffers) -> Iterator[Piece]:
    """What the model on this rank computes with, as boxes of the logical tensors."""
    for slot in (slot for bucket in buffers.layout.buckets for slot in bucket.slots):
        held = buffers.parameter(slot.record.name)
        for box in slot.shard.boxes:
            yield Piece(slot.record.name, slot.record.shape, box.offsets, held[box.local])


def _copies(pieces: Iterable[Piece]) -> list[Piece]:
    return [replace(piece, tensor=piece.tensor.clone()) for piece in pieces]


def assert_same_training(found: Sequence[Trace], reference: Trace) -> None:
    """Every number of every rank within the design's bound of `reference`, and nothing of it on no rank."""
    close = {"rtol": RELATIVE, "atol": ABSOLUTE}
    for trace in found:
        assert trace.tokens == reference.tokens
        torch.testing.assert_close(trace.losses, reference.losses, **close)
        torch.testing.assert_close(trace.grad_norms, reference.grad_norms, **close)
        torch.testing.assert_close(vars(trace.validation), vars(reference.validation), **close)
        torch.testing.assert_close(trace.routing, reference.routing, **close)
        torch.testing.assert_close(trace.layers, reference.layers, **close)
        assert (trace.averaged is None) == (reference.averaged is None)
        if trace.averaged is not None and reference.averaged is not None:
            torch.testing.assert_close(vars(trace.averaged), vars(reference.averaged), **close)
        torch.testing.assert_close(trace.logits, reference.logits, **close)
        torch.testing.assert_close(trace.sizes, reference.sizes, **close)
        torch.testing.assert_close(trace.sources, reference.sources, **close)
    for step, expected in enumerate(reference.gradients):
        _assert_same_tensors("gradients", [trace.gradients[step] for trace in found], expected)
    _assert_same_tensors("parameters", [trace.parameters for trace in found], reference.parameters)
    for kind, kept in reference.state.items():
        _assert_same_tensors(kind, [trace.state[kind] for trace in found], kept)
    assert {name for trace in found for name in trace.routers} == reference.routers.keys()
    for name, value in (each for trace in found for each in trace.routers.items()):
        torch.testing.assert_close(
            value, reference.routers[name], **close, msg=lambda text, name=name: f"{name}: {text}"
        )


def _assert_same_tensors(kind: str, found: Sequence[Sequence[Piece]], reference: Sequence[Piece]) -> None:
    """Every box that a rank holds is that box of the reference's logical tensor, measured by that tensor's largest
    element: one bound for all would let small parameters be wrong, an absolute one small moments."""
    absolute = 0.0 if kind.endswith("moments") else ABSOLUTE
    logical = assembled(reference)
    covered = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in logical.items()}
    for piece in (piece for pieces in found for piece in pieces):
        box = index_of(piece)
        largest = float(logical[piece.name].abs().max())
        difference = float((piece.tensor - logical[piece.name][box]).abs().max())
        assert difference <= RELATIVE * largest + absolute, f"{kind} of {piece.name}: {difference} of {largest}"
        covered[piece.name][box] = True
    assert all(bool(cover.all()) for cover in covered.values()), f"some {kind} are on no rank"


def assembled(pieces: Sequence[Piece]) -> dict[str, Tensor]:
    """The logical tensors, by name; what no piece covers is not a number."""
    whole: dict[str, Tensor] = {}
    for piece in pieces:
        logical = whole.setdefault(piece.name, piece.tensor.new_full(piece.logical_shape, torch.nan))
        logical[index_of(piece)] = piece.tensor
    return whole
