"""A trained model on disk, opened for reading: a checkpoint of a run, in any layout, or a folder of transformers.

Reading takes no lock and renames nothing, so it may be done while the run goes on.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.commit import CHECKPOINTS
from megalite.checkpoint.pieces import Piece
from megalite.checkpoint.reading import Found, newest
from megalite.checkpoint.run_folder import TOKENIZER, check_tokenizer
from megalite.config.derive import derive_model
from megalite.config.model_folder import holds_tokenizer, imported_model, read_model_file
from megalite.config.schema import Config, ModelConfig
from megalite.config.settings import SETTINGS, leaves, with_values
from megalite.config.user_files import read_object
from megalite.data.tokenizer_folder import load_tokenizer
from megalite.data.tokenizers import TextTokenizer
from megalite.errors.problems import Problem, UserError
from megalite.hf.import_model import import_model
from megalite.launch.agreement import StorageFailure
from megalite.launch.context import ParallelContext
from megalite.launch.device import DTYPES
from megalite.model.gpt import GPT
from megalite.model.init import fill
from megalite.model.parameters import gpt_parameters
from megalite.model.routers import Routers
from megalite.train.saving import SavedState

LONGEST = 1024  # tokens in a sequence, where a model of others was made for more


@dataclass(frozen=True)
class RunCheckpoint:
    """One verified checkpoint of a run. `config` is the resolved one that it was trained with."""

    found: Found
    state: SavedState
    config: Config

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """(logical name, master of the logical shape) of every parameter, in the order of `gpt_parameters`.

        Each is read when its turn comes, so that one of them at a time is in memory.
        """
        for record in gpt_parameters(self.config.model):
            yield record.name, self.read(f"master.{record.name}", record.shape)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor of the checkpoint, in the masters' precision."""
        dtype = torch.float64 if DTYPES[self.config.precision] == torch.float64 else torch.float32
        value = torch.empty(shape, dtype=dtype)
        piece = Piece(name, shape, (0,) * value.dim(), value)
        try:
            self.found.read_into([piece], unread=piece.name.__ne__)
        except StorageFailure as error:
            remedy = "try again: a run that goes on deletes its old checkpoints (checkpoint.keep)"
            raise UserError(Problem("checkpoint", str(self.found.path), str(error), remedy)) from error
        return value


@dataclass(frozen=True)
class SavedModel:
    """What is known of a model before its weights are read. `seq_length` is what to give it at a time, `trained_length`
    the longest text that it was made for."""

    folder: Path
    config: ModelConfig
    seq_length: int
    trained_length: int
    tokenizer_folder: Path | None  # where the meaning of its token ids is kept, if it is known
    tokenizer: TextTokenizer | None
    run: RunCheckpoint | None  # None: a model of transformers

    def load(self, config: Config, dtype: torch.dtype, device: torch.device) -> GPT:
        """The model with its weights in `dtype`, in evaluation mode; `config` says how it is computed."""
        # Here names and shapes are checked: before there is memory for a model of any size that a file may tell.
        values = import_model(self.folder, self.config) if self.run is None else self.run.masters()
        config = replace(config, model=self.config, train=replace(config.train, compile=False, fp8=None))
        model = GPT(config, dtype=dtype, device=device)
        fill(model, values)
        if self.run is not None:
            for name, value in Routers([model]).state():
                value.copy_(self.run.read(name, tuple(value.shape)))
        return model.eval()


def open_model(folder: Path, report: Callable[[str], None], step: int | None = None) -> SavedModel:
    """The model of a run (its newest undamaged checkpoint, or that of `step`) or of transformers.

    `report` is told of damaged checkpoints that were passed over. UserError for what is neither, or does not fit.
    """
    if is_run(folder, step):
        run = open_run(folder, report, step)
        check_tokenizer(folder, run.state.tokenizer)
        model, trained_length, place = run.config.model, run.config.train.seq_length, folder / TOKENIZER
        seq_length, has_tokenizer = trained_length, place.is_dir()
    else:
        run, trained_length, place, has_tokenizer = None, _longest_sequence(folder), folder, holds_tokenizer(folder)
        seq_length = min(LONGEST, trained_length)
        model = derive_model(imported_model(folder), seq_length)
    tokenizer = load_tokenizer(place) if has_tokenizer else None
    return SavedModel(folder, model, seq_length, trained_length, place if has_tokenizer else None, tokenizer, run)


def is_run(folder: Path, step: int | None = None) -> bool:
    """Whether `folder` is a run's or a transformers model's, which has no steps; UserError where it is neither."""
    if (folder / CHECKPOINTS).is_dir() or (folder / "run.json").is_file():
        return True
    if not (folder / "config.json").is_file():
        rule = "must be the folder of a run or of a transformers model (config.json); models are not downloaded"
        remedy = "name a run folder, or one that save_pretrained has written"
        raise UserError(Problem("model", str(folder), rule, remedy))
    if step is not None:
        raise UserError(Problem("step", step, "a model of transformers has no steps", "leave it out"))
    return False


def open_run(run_dir: Path, report: Callable[[str], None], step: int | None = None) -> RunCheckpoint:
    """The run's newest undamaged checkpoint, or that of `step`; settings that its megalite did not have are at their
    defaults."""
    found = newest(run_dir / CHECKPOINTS, ParallelContext(), report, step=step, look_only=True)
    if found is None:
        remedy = "name the folder of a training that has saved a checkpoint"
        raise UserError(Problem("model", str(run_dir), "it holds no checkpoint", remedy))
    state = SavedState.of(found)
    said: dict[str, Any] = leaves(state.config)
    if strange := sorted(name for name in said.keys() - SETTINGS.keys() if name.startswith("model.")):
        rule = f"its model has settings that are not known here: {', '.join(strange)}"
        raise UserError(Problem("model", str(found.path), rule, "use the megalite that wrote it"))
    config = with_values(Config(), {name: value for name, value in said.items() if name in SETTINGS})
    return RunCheckpoint(found, state, config)


def _longest_sequence(folder: Path) -> int:
    """The longest sequence of a transformers model: a table of positions may be longer than the sequences of the
    training, which the tokenizer tells."""
    about = read_model_file(folder)
    said = [about.get("n_positions"), about.get("max_position_embeddings")]
    if (path := folder / "tokenizer_config.json").is_file():
        said.append(read_object(path).get("model_max_length"))
    return min([sys.maxsize, *(length for length in said if isinstance(length, int) and length > 0)])
