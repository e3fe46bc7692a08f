"""A trained model on disk, opened for reading: a checkpoint of a run, in any layout, or a folder of transformers.

Reading takes no lock and renames nothing, so it may be done while the run goes on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.commit import CHECKPOINTS
from megalite.checkpoint.manifest import Piece
from megalite.checkpoint.reading import Found, newest
from megalite.checkpoint.run_folder import TOKENIZER, check_tokenizer
from megalite.config.derive import derive_model
from megalite.config.files import RUN, read_object
from megalite.config.model_folder import holds_tokenizer, imported_model, read_model_file
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, leaves, with_values
from megalite.data.tokenizers import TextTokenizer, load_tokenizer
from megalite.errors.problems import Problem, UserError, to_stderr
from megalite.hf.import_model import import_model
from megalite.launch.context import ParallelContext
from megalite.launch.device import DTYPES, choose_device, choose_precision
from megalite.launch.environment import ProcessEnvironment
from megalite.model.gpt import GPT
from megalite.model.init import fill
from megalite.model.parameters import gpt_parameters
from megalite.model.routers import Routers
from megalite.train.saving import SavedState

LONGEST = 1024  # tokens in a sequence, where a model of others was made for more


@dataclass(frozen=True)
class SavedModel:
    """What is known of a model before its weights are read. `config` is that of the run; of a model of transformers it
    has the model, its precision (auto: unknown) and the length of a sequence to give it."""

    folder: Path
    config: Config
    tokenizer_folder: Path | None  # what its token ids mean, if that is known
    found: Found | None = None  # the verified checkpoint of a run
    state: SavedState | None = None

    @cached_property
    def tokenizer(self) -> TextTokenizer | None:
        return load_tokenizer(self.tokenizer_folder) if self.tokenizer_folder else None

    def known_tokenizer(self) -> TextTokenizer:
        """UserError where it is not known."""
        if self.tokenizer is None:
            rule = "the folder holds no tokenizer, so there is nothing to read text with"
            raise UserError(Problem("model", str(self.folder), rule, "put the tokenizer of its tokens there"))
        return self.tokenizer

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """(logical name, tensor of the logical shape) of all parameters, in the order of `gpt_parameters`: of a run the
        masters. Names and shapes are checked now; a tensor is read when its turn comes, so that one is in memory."""
        if self.found is None:
            return import_model(self.folder, self.config.model)
        records = gpt_parameters(self.config.model)
        return ((record.name, self.read(f"master.{record.name}", record.shape)) for record in records)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of the run's checkpoint, in the precision of the masters."""
        assert self.found is not None
        dtype = torch.float64 if DTYPES[self.config.precision] == torch.float64 else torch.float32
        value = torch.empty(shape, dtype=dtype)
        self.found.read_into([Piece(name, shape, (0,) * value.dim(), value)], unread=name.__ne__)
        return value

    def load(self, asked: Config) -> GPT:
        """The model with its weights, in evaluation mode, on the device that is asked for, and in its precision (auto:
        its own)."""
        values = self.values()  # refuses before there is memory for a model of any size that a file may tell
        device = choose_device(asked.device, ProcessEnvironment())
        dtype = choose_precision(self.config.precision if asked.precision == "auto" else asked.precision, device)
        train = replace(asked.train, compile=False, fp8=None)
        model = GPT(replace(asked, model=self.config.model, train=train), dtype=dtype, device=device)
        fill(model, values)
        for name, value in Routers([model]).state() if self.found else ():
            value.copy_(self.read(name, tuple(value.shape)))
        return model.eval()


def open_model(folder: Path, step: int | None = None) -> SavedModel:
    """The model of a run (its newest undamaged checkpoint, or that of `step`) or of transformers. UserError for what is
    neither, or does not fit."""
    if (folder / CHECKPOINTS).is_dir() or (folder / RUN).is_file():
        return _open_run(folder, step)
    if not (folder / "config.json").is_file():
        rule = "must be the folder of a run or of a transformers model (config.json); models are not downloaded"
        remedy = "name a run folder, or one that save_pretrained has written"
        raise UserError(Problem("model", str(folder), rule, remedy))
    if step is not None:
        raise UserError(Problem("step", step, "a model of transformers has no steps", "leave it out"))
    about = read_model_file(folder)
    lengths = [LONGEST, about.get("n_positions"), about.get("max_position_embeddings")]
    if (path := folder / "tokenizer_config.json").is_file():  # a table of positions may be longer than what was trained
        lengths.append(read_object(path).get("model_max_length"))
    length = min(length for length in lengths if isinstance(length, int) and length > 0)
    saved_in = f"torch.{about.get('dtype') or about.get('torch_dtype')}"
    precision = next((name for name, dtype in DTYPES.items() if str(dtype) == saved_in), "auto")
    config = with_values(Config(), {"precision": precision, "train.seq_length": length})
    config = replace(config, model=derive_model(imported_model(folder), length))
    return SavedModel(folder, config, folder if holds_tokenizer(folder) else None)


def _open_run(folder: Path, step: int | None) -> SavedModel:
    """Settings that the run's megalite did not have are at their defaults. Damaged checkpoints that are passed over are
    named on stderr."""
    found = newest(folder / CHECKPOINTS, ParallelContext(), to_stderr, step=step, look_only=True)
    if found is None:
        remedy = "name the folder of a training that has saved a checkpoint"
        raise UserError(Problem("model", str(folder), "it holds no checkpoint", remedy))
    state = SavedState.of(found)
    settings = leaves(state.config)
    if strange := sorted(name for name in settings.keys() - SETTINGS.keys() if name.startswith("model.")):
        rule = f"its model has settings that are not known here: {', '.join(strange)}"
        raise UserError(Problem("model", str(found.path), rule, "use the megalite that wrote it"))
    config = with_values(Config(), {name: value for name, value in settings.items() if name in SETTINGS})
    check_tokenizer(folder, state.tokenizer)
    return SavedModel(folder, config, folder / TOKENIZER if (folder / TOKENIZER).is_dir() else None, found, state)
