"""A run folder opened for reading: what one of its checkpoints holds, whatever layout wrote it.

Reading takes no lock and renames nothing, so it may be done while the run goes on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.pieces import Piece
from megalite.checkpoint.resume_rules import flatten
from megalite.checkpoint.run_folder import CHECKPOINTS
from megalite.checkpoint.store import CheckpointError, Found, newest, of_step
from megalite.checkpoint.tokenizer_folder import TOKENIZER, check_tokenizer
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, with_values
from megalite.data.tokenizers import TextTokenizer, load_tokenizer
from megalite.errors.problems import Problem, UserError
from megalite.launch.context import ParallelContext
from megalite.launch.device import DTYPES
from megalite.model.parameters import gpt_parameters
from megalite.train.state import SavedState


@dataclass(frozen=True)
class SavedRun:
    """One checkpoint of a run. `config` is the resolved one that it was trained with."""

    path: Path
    found: Found
    config: Config

    @property
    def step(self) -> int:
        return self.found.step

    @property
    def tokenizer_folder(self) -> Path | None:
        """Where the meaning of its token ids is kept, if it is known; UserError where it was changed."""
        check_tokenizer(self.path, SavedState.of(self.found).tokenizer)
        folder = self.path / TOKENIZER
        return folder if folder.is_dir() else None

    def tokenizer(self) -> TextTokenizer | None:
        """UserError where it is damaged, or has tokens that the model does not know."""
        if (folder := self.tokenizer_folder) is None:
            return None
        tokenizer, size = load_tokenizer(folder), self.config.model.vocab_size
        assert size is not None, "a checkpoint's config is resolved"
        if tokenizer.vocab_size > size:
            rule = f"has {tokenizer.vocab_size:,} tokens, and the model of the checkpoint knows {size:,}"
            remedy = "put the tokenizer back that the run was trained with"
            raise UserError(Problem("tokenizer", str(folder), rule, remedy))
        return tokenizer

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """(logical name, master of the logical shape) of every parameter, in the order of `gpt_parameters`.

        Each is read when its turn comes, so that one of them at a time is in memory.
        """
        dtype = torch.float64 if DTYPES[self.config.precision] == torch.float64 else torch.float32
        for record in gpt_parameters(self.config.model):
            value = torch.empty(record.shape, dtype=dtype)
            self._read(Piece(f"master.{record.name}", record.shape, (0,) * value.dim(), value))
            yield record.name, value

    def _read(self, piece: Piece) -> None:
        try:
            self.found.read_into([piece], unread=lambda name: name != piece.name)
        except CheckpointError as error:
            remedy = "try again: a run that goes on deletes its old checkpoints (checkpoint.keep)"
            raise UserError(Problem("run_dir", str(self.path), str(error), remedy)) from error


def is_run(folder: Path) -> bool:
    """Whether `folder` is a run's (else it is a model of transformers); UserError where it is neither."""
    if (folder / CHECKPOINTS).is_dir() or (folder / "run.json").is_file():
        return True
    if (folder / "config.json").is_file():
        return False
    rule = "it is neither the folder of a run nor one of a transformers model (config.json)"
    if not folder.exists():
        rule = "there is no such folder; models are not downloaded"
    raise UserError(Problem("model", str(folder), rule, "name a run folder, or one that save_pretrained has written"))


def open_run(run_dir: Path, report: Callable[[str], None], step: int | None = None) -> SavedRun:
    """The run's newest undamaged checkpoint, or that of `step`, verified. `report` is told of damaged newer ones."""
    folder, alone = run_dir / CHECKPOINTS, ParallelContext()
    found = newest(folder, alone, report, look_only=True) if step is None else of_step(folder, step, alone)
    if found is None:
        rule = "it holds no checkpoint" if run_dir.is_dir() else "there is no such folder"
        remedy = "name the run folder of a training that has saved a checkpoint"
        raise UserError(Problem("run_dir", str(run_dir), rule, remedy))
    return SavedRun(run_dir, found, _config(found))


def _config(found: Found) -> Config:
    """The config in the checkpoint; settings that its megalite did not have are at their defaults."""
    said: dict[str, Any] = flatten(SavedState.of(found).config)
    strange = sorted(name for name in said.keys() - SETTINGS.keys() if name.startswith("model."))
    if strange:
        rule = f"its model has settings that are not known here: {', '.join(strange)}"
        raise UserError(Problem("run_dir", str(found.path), rule, "use the megalite that wrote it"))
    return with_values(Config(), {name: value for name, value in said.items() if name in SETTINGS})
