"""Settings that a command leaves to a folder: to the run that it continues, or to the weights that it starts from.

They come as overrides in front of the command's own, which have the last word. A group that the command chooses
(`model=gpt2`) is all its own, and a recipe (`experiment=NAME`) chooses every group. Of a run, what was derived when it
began is derived again.
"""

import os
import re
import shlex
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from megalite.config.derive import absolute
from megalite.config.model_folder import holds_tokenizer, imported_model_settings
from megalite.config.overrides import as_override, unknown
from megalite.config.settings import DERIVED, SETTINGS, flat, leaves
from megalite.config.user_files import read_yaml, refusing
from megalite.errors.problems import Problem, UserError

PLAIN = re.compile(r"[A-Za-z_./][\w./-]*", re.ASCII)  # what a shell takes as it is, and YAML for no number
OF_ONE_START = ("run_dir", "resume", "launch.preflight", "launch.status_file", "train.max_minutes")


def of_run(tree: DictConfig, named: Set[str]) -> list[str]:
    """What the run was asked for whose folder the command names; empty where that folder holds no run."""
    path = _config_of_run(tree, named)
    if path is None:
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


def of_weights(tree: DictConfig, named: Set[str], *, asked: bool) -> list[str]:
    """The shape of the model in the folder of checkpoint.init_from, and its tokenizer: ids of another mean other words.

    Another tokenizer is the command's to name. A run that goes on keeps its own.
    """
    folder = _given(tree, "checkpoint.init_from")
    if folder is None or not os.path.lexists(Path(absolute(folder), "config.json")):
        return []  # a rule says what is missing
    place = absolute(folder)
    settings = {f"model.{name}": value for name, value in imported_model_settings(place).items()}
    default = _given(tree, "tokenizer") == SETTINGS["tokenizer"].default  # also where a recipe says nothing of it
    if default and not asked and _config_of_run(tree, named) is None:
        if holds_tokenizer(Path(place)):
            settings["tokenizer"], named = place, named - {"tokenizer"}
        elif _given(tree, "data.source") != "tokens":
            rule = f"{place} holds none, and its model knows the ids of the one that it was trained with"
            remedy = "tokenizer=FOLDER of that one; tokenizer=byte, or another that is named, if its words may be lost"
            raise UserError(Problem("tokenizer", None, rule, remedy))
    return _overrides(settings, tree, named)


def _config_of_run(tree: DictConfig, named: Set[str]) -> Path | None:
    """The settings of the run whose folder the command names; None where that folder holds no run."""
    folder, name = _given(tree, "run_dir"), _given(tree, "run_name")
    if named.isdisjoint(("run_dir", "run_name")) or (folder or name) is None:
        return None
    path = Path(absolute(folder or os.path.join("runs", name)), "config.yaml")
    return path if os.path.lexists(path) and os.path.isfile(path.with_name("run.json")) else None


def _given(tree: DictConfig, name: str) -> Any:
    """The setting's value; None where it refers to what there is not."""
    return OmegaConf.select(tree, name, throw_on_resolution_failure=False)


def _overrides(values: Mapping[str, Any], tree: DictConfig, others: Set[str]) -> list[str]:
    """Those but `others` that the command alone, with conf/ as it is today, would not give."""
    changed = {name: value for name, value in values.items() if name not in others and value != _given(tree, name)}
    return [f"{name}={as_override(value)}" for name, value in changed.items()]


def typed(name: str, value: str) -> str:
    """NAME=VALUE as it is typed in a shell; quoted where Hydra or the shell might read something else into it."""
    word = f"{name}={value}"
    with suppress(HydraException):
        if PLAIN.fullmatch(value) and OverridesParser.create().parse_override(word).value() == value:
            return word
    escaped = QuotedString(value.replace("${", "\\${"), Quote.double).with_quotes()
    return shlex.quote(f"{name}={escaped}")
