"""A run's newest checkpoint as a folder that transformers loads.

Exported are the masters, rounded to the precision that the run trains in: to the bit the parameters that it computes
with. One process reads them by logical name, a few at a time, so the layout that wrote them does not matter.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.pieces import Piece
from megalite.checkpoint.reading import read_pieces
from megalite.checkpoint.run_folder import CHECKPOINTS
from megalite.checkpoint.store import Found, newest
from megalite.config.problems import Problem, UserError
from megalite.config.schema import ModelConfig
from megalite.hf.export_model import export_model
from megalite.model.parameters import gpt_parameters
from megalite.parallel.context import ParallelContext
from megalite.parallel.device import DTYPES

READ_AHEAD_BYTES = 2**30  # each read goes through the checkpoint's whole index: 0.1 s for 24 layers, 0.4 s for 96


def export_checkpoint(run_dir: Path, folder: Path, report: Callable[[str], None]) -> int:
    """Write `folder` from the newest undamaged checkpoint of the run and return its step; see `export_model`.

    `report` is told of damaged checkpoints that were passed over, as in `newest`.
    """
    found = newest(run_dir / CHECKPOINTS, ParallelContext(), report)
    if found is None:
        remedy = "name the run folder of a training that has saved a checkpoint"
        raise UserError(Problem("run_dir", str(run_dir), "it holds no checkpoint", remedy))
    config = found.state["config"]
    model, dtype = ModelConfig(**config["model"]), DTYPES[config["precision"]]
    export_model(masters(found, model, dtype), model, folder, dtype=dtype, context_length=config["train"]["seq_length"])
    return found.step


def masters(
    found: Found, config: ModelConfig, dtype: torch.dtype, read_ahead: int = READ_AHEAD_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """(logical name, master of the logical shape) of every parameter of a model that is trained in `dtype`.

    At most `read_ahead` bytes of them, or one, are in memory.
    """
    master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    ahead: list[tuple[str, Tensor]] = []
    filled = 0
    for record in gpt_parameters(config):
        size = record.numel * master_dtype.itemsize
        if ahead and filled + size > read_ahead:
            yield from _read(found, ahead)
            ahead, filled = [], 0
        ahead.append((record.name, torch.empty(record.shape, dtype=master_dtype)))
        filled += size
    yield from _read(found, ahead)


def _read(found: Found, values: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Fill the tensors from the checkpoint, and hand them over one after another."""
    pieces = [Piece(f"master.{name}", tuple(value.shape), (0,) * value.dim(), value) for name, value in values]
    wanted = {piece.name for piece in pieces}
    read_pieces(found.path, found.manifest, pieces, found.context, passed_over=lambda saved: saved not in wanted)
    yield from values
