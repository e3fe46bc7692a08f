"""Settings that a command leaves to a folder: to the run that it continues, or to the weights that it starts from.

They come as overrides in front of the command's own, which have the last word. A group that the command chooses
(`model=gpt2`) is all its own, and a recipe (`experiment=NAME`) chooses every group. Of a run, what was derived when it
began is derived again.
"""

import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from megalite.config.derive import BUILT_IN_TOKENIZERS, absolute
from megalite.config.model_folder import imported_model_settings
from megalite.config.settings import flat, yaml_value
from megalite.config.user_files import read_yaml, refusing

DERIVED = "derived"  # key of a run's config.yaml: the settings in it that nobody gave
OF_ONE_START = ("run_dir", "resume")


def of_run(composed: DictConfig, named: Set[str]) -> list[str]:
    """What the run was asked for whose folder the command names; empty where that folder holds no run."""
    folder = OmegaConf.select(composed, "run_dir", throw_on_resolution_failure=False)
    if folder is None and (name := OmegaConf.select(composed, "run_name", throw_on_resolution_failure=False)):
        folder = os.path.join("runs", str(name))
    if named.isdisjoint(("run_dir", "run_name")) or not isinstance(folder, str):
        return []
    path = Path(absolute(folder)) / "config.yaml"
    if not (os.path.lexists(path) and os.path.isfile(path.with_name("run.json"))):
        return []
    remedy = "restore it from a copy, or give all settings and another run_dir"
    saved = read_yaml(path, remedy)
    with refusing(path, remedy):
        if not isinstance(saved, dict) or not isinstance(saved.get(DERIVED, []), list):
            raise ValueError("holds no settings of a run")
    mine = {*named, *OF_ONE_START, *map(str, saved.get(DERIVED, []))}
    return [*_overrides({name: value for name, value in flat(saved).items() if name not in mine}, composed)]


def of_weights(composed: DictConfig, named: Set[str]) -> list[str]:
    """The shape of the model in the folder of checkpoint.init_from.

    Its vocabulary only where the tokenizer is not of this run's making: ids of another mean other words.
    """
    folder, tokenizer = (
        OmegaConf.select(composed, name, throw_on_resolution_failure=False)
        for name in ("checkpoint.init_from", "tokenizer")
    )
    if not isinstance(folder, str) or not os.path.lexists(Path(absolute(folder)) / "config.json"):
        return []  # a rule says what is missing
    shape = {f"model.{name}": value for name, value in imported_model_settings(absolute(folder)).items()}
    if tokenizer in BUILT_IN_TOKENIZERS:
        del shape["model.vocab_size"]
    return [*_overrides({name: value for name, value in shape.items() if name not in named}, composed)]


def _overrides(values: Mapping[str, Any], composed: DictConfig) -> Iterator[str]:
    """Those that the command alone, with conf/ as it is today, would not give."""
    for name, value in values.items():
        if value != OmegaConf.select(composed, name, throw_on_resolution_failure=False):
            yield f"{name}={as_override(value)}"


def as_override(value: Any) -> str:
    """The value as Hydra's command line reads it, so that it comes back as it is."""
    if isinstance(value, list):
        return "[" + ",".join(as_override(item) for item in value) + "]"
    if value is None or isinstance(value, bool | int | float):
        return yaml_value(value)
    return QuotedString(str(value).replace("${", "\\${"), Quote.single).with_quotes()
