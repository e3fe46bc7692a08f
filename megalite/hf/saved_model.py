"""A saved model in memory, from a run folder or a folder of transformers, as the GPT that training computes with."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megalite.config.derive import derive_model
from megalite.config.model_folder import SETTING, imported_model_settings
from megalite.config.schema import Config, ModelConfig
from megalite.data.tokenizers import TextTokenizer, load_tokenizer
from megalite.errors.problems import Problem, UserError
from megalite.hf.import_model import import_model, imported_context_length
from megalite.hf.saved_run import SavedRun, is_run, open_run
from megalite.model.gpt import GPT
from megalite.model.init import fill

LONGEST = 1024  # tokens in a sequence, where a model of others was made for more


@dataclass(frozen=True)
class SavedModel:
    """What is known of a model before its weights are read. `seq_length` is what to give it at a time."""

    folder: Path
    config: ModelConfig
    seq_length: int
    tokenizer_folder: Path | None
    tokenizer: TextTokenizer | None
    run: SavedRun | None

    def load(self, config: Config, dtype: torch.dtype, device: torch.device) -> GPT:
        """The model with its weights in `dtype`, in evaluation mode; `config` says how it is computed."""
        config = replace(config, model=self.config, train=replace(config.train, compile=False))
        model = GPT(config, dtype=dtype, device=device)
        with _said_of_the_model():
            fill(model, import_model(self.folder, self.config) if self.run is None else self.run.masters())
        return model.eval()


def open_model(folder: Path, report: Callable[[str], None], step: int | None = None) -> SavedModel:
    """The model of a run (its newest checkpoint, or that of `step`) or of transformers (GPT-2, Llama, Qwen3).

    `report` is told of damaged checkpoints that were passed over.
    """
    if is_run(folder):
        run = open_run(folder, report, step)
        config = run.config
        return SavedModel(folder, config.model, config.train.seq_length, run.tokenizer_folder, run.tokenizer(), run)
    if step is not None:
        raise UserError(Problem("step", step, "a model of transformers has no steps", "leave it out"))
    return _of_transformers(folder)


def _of_transformers(folder: Path) -> SavedModel:
    with _said_of_the_model():
        settings = imported_model_settings(folder)
        length = min(imported_context_length(folder), _longest_text(folder), LONGEST)
    config = derive_model(ModelConfig(**settings), length)
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    tokenizer = load_tokenizer(folder) if has_tokenizer else None
    size = config.vocab_size
    if tokenizer is not None and size is not None and tokenizer.vocab_size > size:
        rule = f"its tokenizer has {tokenizer.vocab_size:,} tokens, and its model knows {size:,}"
        raise UserError(Problem("model", str(folder), rule, "put the tokenizer there that the model was trained with"))
    return SavedModel(folder, config, length, folder if has_tokenizer else None, tokenizer, None)


def _longest_text(folder: Path) -> int:
    """What the tokenizer says of that: a table of positions may be longer than the sequences of the training."""
    try:
        said = json.loads((folder / "tokenizer_config.json").read_bytes()).get("model_max_length")
    except (OSError, ValueError, AttributeError):
        return LONGEST
    return said if isinstance(said, int) and said > 0 else LONGEST


@contextmanager
def _said_of_the_model() -> Iterator[None]:
    """What an import says of the setting of a run, said of the folder that was named."""
    try:
        yield
    except UserError as error:
        problems = [replace(one, setting="model") if one.setting == SETTING else one for one in error.problems]
        raise UserError(problems) from error
