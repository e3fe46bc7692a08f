"""Settings that a command leaves to a folder: to the run that it continues, or to the weights that it starts from.

They come as overrides in front of the command's own, which have the last word. A group that the command chooses
(`model=gpt2`) is all its own, and a recipe (`experiment=NAME`) chooses every group. Of a run, what was derived when it
began is derived again.
"""

import os
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from megalite.config.derive import BUILT_IN_TOKENIZERS, absolute
from megalite.config.model_folder import imported_model_settings
from megalite.config.overrides import as_override, unknown
from megalite.config.settings import SETTINGS, flat, leaves
from megalite.config.user_files import read_yaml, refusing
from megalite.errors.problems import UserError

DERIVED = "derived"  # key of a run's config.yaml: the settings in it that nobody gave
OF_ONE_START = ("run_dir", "resume", "launch.preflight", "launch.status_file", "train.max_minutes")


def of_run(tree: DictConfig, named: Set[str]) -> list[str]:
    """What the run was asked for whose folder the command names; empty where that folder holds no run."""
    folder, name = _given(tree, "run_dir"), _given(tree, "run_name")
    if named.isdisjoint(("run_dir", "run_name")) or (folder or name) is None:
        return []
    path = Path(absolute(folder or os.path.join("runs", name)), "config.yaml")
    if not (os.path.lexists(path) and os.path.isfile(path.with_name("run.json"))):
        return []
    values, derived = _saved(path, "restore it from a copy, or give all settings and another run_dir")
    return _overrides(flat(values), tree, {*named, *OF_ONE_START, *derived})


def is_of_run(path: Path) -> bool:
    """Whether a file is the config.yaml of a run, under any name: it says what was derived."""
    with suppress(UserError):  # said by whoever reads it
        saved = read_yaml(path)
        return isinstance(saved, dict) and DERIVED in saved
    return False


def of_recipe(path: Path, tree: DictConfig, named: Set[str]) -> list[str]:
    """What a run's config.yaml says, for a new run with a folder of its own."""
    saved, derived = _saved(path, "write it as the run did, or give all settings")
    values = leaves(saved)
    if slips := [unknown(name, value) for name, value in values.items() if name not in {*SETTINGS, DERIVED}]:
        raise UserError(slips)
    return _overrides(values, tree, {*named, *OF_ONE_START, "run_name", DERIVED, *derived})


def _saved(path: Path, remedy: str) -> tuple[dict[str, Any], list[str]]:
    """The settings in a run's config.yaml, and the names of those that nobody gave."""
    saved = read_yaml(path, remedy)
    with refusing(path, remedy):
        derived = saved.get(DERIVED, []) if isinstance(saved, dict) else None
        lists = [value for value in (derived, *flat(saved).values()) if isinstance(value, list)] if saved else []
        if not isinstance(derived, list) or any(isinstance(one, list | dict) for each in lists for one in each):
            raise ValueError("holds no settings of a run")
    return saved, derived


def of_weights(tree: DictConfig, named: Set[str]) -> list[str]:
    """The shape of the model in the folder of checkpoint.init_from.

    Its vocabulary only where the tokenizer is not of this run's making: ids of another mean other words.
    """
    folder = _given(tree, "checkpoint.init_from")
    if folder is None or not os.path.lexists(Path(absolute(folder), "config.json")):
        return []  # a rule says what is missing
    shape = {f"model.{name}": value for name, value in imported_model_settings(absolute(folder)).items()}
    own_words = {"model.vocab_size"} if _given(tree, "tokenizer") in BUILT_IN_TOKENIZERS else set()
    return _overrides(shape, tree, named | own_words)


def _given(tree: DictConfig, name: str) -> Any:
    """The setting's value; None where it refers to what there is not."""
    return OmegaConf.select(tree, name, throw_on_resolution_failure=False)


def _overrides(values: Mapping[str, Any], tree: DictConfig, others: Set[str]) -> list[str]:
    """Those but `others` that the command alone, with conf/ as it is today, would not give."""
    changed = {name: value for name, value in values.items() if name not in others and value != _given(tree, name)}
    return [f"{name}={as_override(value)}" for name, value in changed.items()]
