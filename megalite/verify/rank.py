"""Does what one process of verify_layout.py does: a few steps of real training on its share of synthetic batches.

Everything but the text is the launcher's own: start-up, model, buffers, optimizer, sampling, learning rate.
"""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megalite.checkpoint.pieces import Piece
from megalite.config.schema import Config
from megalite.config.step_plan import planned_steps
from megalite.data.batches import TrainBatches
from megalite.data.samples import Part, SampleSource
from megalite.data.token_file import TokenFile
from megalite.launch.context import ParallelContext
from megalite.launch.environment import ProcessEnvironment
from megalite.model.routers import Routers
from megalite.optim.schedule import learning_rate
from megalite.train.build import build_training, data_share, fill_with_start_values, open_context
from megalite.train.state import held_pieces, owned_pieces
from megalite.train.step import TrainStep
from megalite.verify.compare import TensorBox, Trace

LOSSES = 4  # numbers of moe/balance.py's Figures after those that count choices
DOCUMENT = 6  # tokens on average: several documents in each sample
END_OF_DOCUMENT = 0


def enter(config: Config, rank: int, world_size: int, rendezvous: Path) -> ParallelContext:
    """This rank's context. The reference, a world of one, never initialises torch.distributed."""
    store = None
    if world_size > 1:
        store = dist.FileStore(str(rendezvous), world_size)  # type: ignore[attr-defined] # torch's stub forgets it
    context = open_context(
        config, ProcessEnvironment(rank, world_size, local_rank=rank, local_world_size=world_size), store
    )
    torch.set_num_threads(1)
    context.barrier()  # a rank that fails at once must not break connections that others still make
    return context


def train(config: Config, context: ParallelContext) -> Trace:
    """All steps of `config` on this process's share of each batch."""
    assert dist.is_initialized() == (context.world_size > 1)
    training = build_training(config, context)
    buffers = training.buffers
    fill_with_start_values(buffers, config, context)
    step = TrainStep(training, config.optimizer, context)
    figures, gradients = [], []
    with TrainBatches(
        synthetic_samples(config),
        config,
        planned_steps(config.train, done=0, samples=0),
        **data_share(config, context),
        device=context.device,
    ) as batches:
        for batch in islice(batches, config.train.steps):
            if batch.planned.skipped:
                continue
            lr = learning_rate(batch.planned.step - 1, config.lr, peak=config.optimizer.lr, steps=config.train.steps)
            figures.append(step(batch.microbatches, batch.local_tokens, lr).read())
            gradients.append(_parts(owned_pieces("", buffers.owned, buffers.gradients)))
    training.gather.finish()
    tables = [figure.routing.numpy() for figure in figures if figure.routing is not None]
    return Trace(
        losses=[figure.loss for figure in figures],
        grad_norms=[figure.grad_norm for figure in figures],
        tokens=[figure.batch_tokens for figure in figures],
        gradients=gradients,
        parameters=_parts(held_pieces(buffers)) + [_whole(*named) for named in Routers(training.chunks).state()],
        routing=[(its[:, :-LOSSES], its[:, -LOSSES:]) for its in tables],
    )


def synthetic_samples(config: Config) -> SampleSource:
    """Random tokens in documents of random length, never the same twice: enough for all steps."""
    size, length = config.model.vocab_size, config.train.seq_length
    dice = np.random.default_rng(config.seed)
    needed = (config.train.steps + 1) * config.train.global_batch_size * length + 1
    tokens = dice.integers(END_OF_DOCUMENT + 1, size, size=needed, dtype=np.int32)
    tokens[dice.random(needed) < 1 / DOCUMENT] = tokens[-1] = END_OF_DOCUMENT
    ends = np.flatnonzero(tokens == END_OF_DOCUMENT) + 1
    lengths = np.diff(ends, prepend=0).astype("<i4")
    file = TokenFile(
        prefix=Path("synthetic"),
        tokens=tokens,
        lengths=lengths,
        pointers=(ends - lengths) * tokens.itemsize,
        boundaries=np.arange(len(lengths) + 1, dtype=np.int64),
    )
    return SampleSource([Part(file, 0, len(tokens))], (1,), length, size, config.seed, END_OF_DOCUMENT)


def _parts(pieces: Iterable[Piece]) -> list[TensorBox]:
    return [TensorBox(piece.name, piece.logical_shape, piece.offsets, piece.tensor.numpy().copy()) for piece in pieces]


def _whole(name: str, tensor: torch.Tensor) -> TensorBox:
    return TensorBox(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.numpy())
