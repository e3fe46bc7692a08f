"""Settings that a command leaves to a folder: to the run that it continues, or to the weights that it starts from.

The command's own words count more. A group that the command chooses (`model=gpt2`) is all its own, and a recipe
(`experiment=NAME`) chooses every group. What was derived when a run began is derived again.
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
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megalite.config.model_folder import holds_tokenizer, imported_model_settings
from megalite.config.overrides import unknown
from megalite.config.settings import DERIVED, SETTINGS, leaves, nested
from megalite.config.user_files import absolute, read_yaml, refusing
from megalite.errors.problems import Problem, UserError

PLAIN = re.compile(r"[A-Za-z_./][\w./-]*", re.ASCII)  # what a shell takes as it is, and YAML for no number
OF_ONE_START = ("run_dir", "resume", "launch.preflight", "launch.status_file", "train.max_minutes")


class Command:
    """The settings of a command as files and overrides give them, and the names of those that overrides set."""

    def __init__(self, written: Mapping[str, Any], named: Set[str]) -> None:
        self.named = named
        self._tree = OmegaConf.create(nested(written))

    def value(self, name: str) -> Any:
        """The setting's value; None where it is of another type, or refers to what there is not."""
        with suppress(OmegaConfBaseException, ValueError, OverflowError):  # refused later
            found = OmegaConf.select(self._tree, name)
            return SETTINGS[name].typed(OmegaConf.to_object(found) if OmegaConf.is_config(found) else found)
        return None

    def run(self) -> Path | None:
        """The config.yaml of the run whose folder the command names; None where that folder holds no run."""
        folder, name = self.value("run_dir"), self.value("run_name")
        if self.named.isdisjoint(("run_dir", "run_name")) or (folder or name) is None:
            return None
        path = Path(absolute(folder or os.path.join("runs", name)), "config.yaml")
        return path if os.path.lexists(path) and os.path.isfile(path.with_name("run.json")) else None

    def new(self, values: Mapping[str, Any], others: Set[str] = frozenset()) -> dict[str, Any]:
        """The `values` that differ from the command's, without `others` and the settings that the command names."""
        left = {*self.named, *others}
        return {name: value for name, value in values.items() if name not in left and value != self.value(name)}


def of_run(command: Command) -> dict[str, Any]:
    """The settings that were given to the run in the folder that the command names; empty where there is no run."""
    if (path := command.run()) is None:
        return {}
    values, derived = _saved(path, "restore it from a copy, or give all settings and another run_dir")
    return command.new({name: values[name] for name in SETTINGS if name in values}, {*OF_ONE_START, *derived})


def of_recipe(path: Path, command: Command) -> dict[str, Any]:
    """The settings in the config.yaml of a run, for a new run in another folder."""
    values, derived = _saved(path, "write it as the run did, or give all settings")
    if slips := [unknown(name, value) for name, value in values.items() if name not in SETTINGS]:
        raise UserError(slips)
    return command.new(values, {*OF_ONE_START, "run_name", *derived})


def is_of_run(path: Path) -> bool:
    """Whether a file is the config.yaml of a run, under any name: it says what was derived."""
    with suppress(UserError):  # refused by the next reader
        saved = read_yaml(path)
        return isinstance(saved, dict) and DERIVED in saved
    return False


def _saved(path: Path, remedy: str) -> tuple[dict[str, Any], list[str]]:
    """The values in a run's config.yaml by name, and the names of the settings that nobody gave."""
    saved = read_yaml(path, remedy)
    with refusing(path, remedy):
        values = leaves(saved) if isinstance(saved, dict) else {DERIVED: None}
        derived: Any = values.pop(DERIVED, [])
        lists = [value for value in (derived, *values.values()) if isinstance(value, list)]
        if not isinstance(derived, list) or any(isinstance(one, list | dict) for each in lists for one in each):
            raise ValueError("holds no settings of a run")
    return values, derived


def of_weights(command: Command, *, asked: bool) -> dict[str, Any]:
    """The shape of the model in the folder of checkpoint.init_from, and its tokenizer: ids of another mean other words.

    The command may name another tokenizer (`asked`). A run that goes on keeps its own.
    """
    folder = command.value("checkpoint.init_from")
    if folder is None or not os.path.lexists(Path(absolute(folder), "config.json")):
        return {}  # a rule says what is missing
    place = absolute(folder)
    found = command.new({f"model.{name}": value for name, value in imported_model_settings(place).items()})
    default = command.value("tokenizer") == SETTINGS["tokenizer"].default  # also where a recipe does not speak of it
    if not default or asked or command.run() is not None:
        return found
    if holds_tokenizer(Path(place)):
        return found | {"tokenizer": place}
    if command.value("data.source") != "tokens":
        rule = f"{place} holds none, and its model knows the ids of the one that it was trained with"
        remedy = "tokenizer=FOLDER of that one; tokenizer=byte, or another that is named, if its words may be lost"
        raise UserError(Problem("tokenizer", None, rule, remedy))
    return found


def typed(name: str, value: str) -> str:
    """NAME=VALUE as it is typed in a shell; quoted where Hydra or the shell might read something else into it."""
    word = f"{name}={value}"
    with suppress(HydraException):
        if PLAIN.fullmatch(value) and OverridesParser.create().parse_override(word).value() == value:
            return word
    escaped = QuotedString(value.replace("${", "\\${"), Quote.double).with_quotes()
    return shlex.quote(f"{name}={escaped}")
