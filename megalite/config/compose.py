"""From a command line to a checked config: every mistake is found, and all are in one UserError.

What the command leaves open comes from the folder that it names (of the run that it continues, of start weights, or of
a recipe), else from the files that it chooses. Imports neither torch nor any data library.
"""

import io
import os
import re
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megalite.config import overrides
from megalite.config.arguments import read_arguments, shown
from megalite.config.branch import BRANCH, branched, checkpoint_of
from megalite.config.derive import derive
from megalite.config.files import absolute, read_yaml, refusing
from megalite.config.model_folder import holds_tokenizer, imported_model_settings
from megalite.config.phase_rules import problems_of_phases, read_phases
from megalite.config.rule import example, outside
from megalite.config.rules import check, unused
from megalite.config.schema import Config
from megalite.config.settings import DERIVED, EXPERIMENT, GROUPS, SETTINGS, leaves, nested, with_values, yaml_value
from megalite.config.step_plan import HORIZONS, IN_TOKENS
from megalite.errors.problems import NO_VALUE, Problem, UserError, collect, refuse

OF_ONE_START = ("run_dir", "resume", "launch.preflight", "launch.status_file", "train.max_minutes")
_VARIABLE = re.compile(r"oc\.env\s*:\s*['\"]?([^,}\s'\"]+)")

# Settings of which each says the same in another way: one that is given replaces what others had from elsewhere.
ALTERNATIVES = (HORIZONS, *IN_TOKENS.items())
DEFAULTS = {name: setting.default for name, setting in SETTINGS.items()}
Values = Mapping[str, Any]  # by the names of settings


def load_config(argv: Sequence[str], world_size: int, unread: Collection[str] = ()) -> Config:
    """The derived, checked config of a command line, or a UserError with every problem in it, but for those that rules
    find with settings that are `unread`."""
    config, problems, doubtful, _ = read_settings(read_arguments(argv))
    doubtful |= {*unread}
    problems += check(config, world_size, doubtful)
    refuse(problems or problems_of_phases(config, world_size, doubtful))
    return derive(replace(config, told=(*config.told, *unused(config))), world_size)


def names_of(words: Sequence[str]) -> frozenset[str]:
    """The settings and groups that overrides name."""
    return frozenset(word.partition("=")[0].lstrip("+~") for word in words)


def load_part(words: Sequence[str], doer: str, reads: Sequence[str]) -> Config:
    """The config of overrides of which `doer` reads those in `reads`: settings, groups (data=NAME), or all that is in
    a group (data.*). A rule that speaks of another setting is silent."""
    known = {*SETTINGS, *GROUPS, EXPERIMENT}
    read = {name for name in known if name in reads or f"{name.partition('.')[0]}.*" in reads}
    hint = f"what it reads: {', '.join(f'{one}=NAME' if one in GROUPS else one for one in reads)}"
    strange = sorted(names_of(words) & known - read)
    problems = [Problem(name, NO_VALUE, f"{doer} does not read it", hint) for name in strange]
    config = collect(partial(load_config, words, 1, SETTINGS.keys() - read), problems)
    refuse(problems)
    return config or Config()


def load_values(words: Sequence[str], reads: Sequence[str]) -> Config:
    """The defaults with the values that overrides give the settings in `reads`. All are checked on their own: no rule
    that joins settings is asked. What overrides give other settings is left out."""
    found, problems, _, _ = read_settings(read_arguments(words))
    refuse(problems)
    return with_values(found, {name: DEFAULTS[name] for name in DEFAULTS.keys() - reads})


def show_information(arguments: Namespace) -> int:
    """Answers --help, --cfg job and the like through Hydra, once every override is known to be right."""
    given = list[str]()
    if not arguments.shell_completion:  # which has words of its own
        _, problems, _, given = read_settings(arguments)
        refuse(problems)
    output = io.StringIO()
    with redirect_stdout(output):
        words = [*given, *arguments.overrides, *shown(arguments)]
        status = overrides.run_hydra(words, lambda config: None, overrides.files_of(arguments))
    with suppress(OSError):  # `--help | head`, a full disk
        print(output.getvalue(), end="", flush=True)
    return status


def read_settings(arguments: Namespace) -> tuple[Config, list[Problem], set[str], list[str]]:
    """The config of a command line, the problems with it, the settings that were refused (nobody knows which values
    they were to have), and overrides with what a folder gives."""
    problems, files = list[Problem](), overrides.files_of(arguments)
    choices, command = dict[str, str](), dict[str, Any]()
    setup_globals()  # ${now:...}
    for text in arguments.overrides:
        chosen, values = collect(partial(overrides.read_override, text, files), problems) or ({}, {})
        choices, command = choices | chosen, command | values
    found = collect(partial(overrides.composed, files, choices), problems)
    all_of_them = choices.keys() - GROUPS.keys()  # a recipe may set anything
    replaced = _replaced(command)
    names = {name for name, setting in SETTINGS.items() if setting.group in choices or all_of_them}
    names |= command.keys() | replaced.keys()
    by_files = DEFAULTS | (found or {})
    if by_files["tokenizer"] == DEFAULTS["tokenizer"] and "tokenizer" not in command:
        names.discard("tokenizer")  # a recipe that does not speak of it leaves it to the weights
    written = by_files | replaced | command
    problems += [overrides.unknown(name, value) for name, value in written.items() if name not in SETTINGS]
    departures = tuple(name for name in SETTINGS if name in command and command[name] != by_files[name])
    values, wrong = _resolved(written)
    told = list[str]()
    given = [f"{name}={yaml_value(value)}" for name, value in replaced.items() if value != by_files[name]]
    sources = {"as before": _of_run, "from its run": _of_parent, "from the weights": _of_weights}
    if files.recipe is not None:
        sources = {f"from {files.recipe}": partial(_of_recipe, files.recipe)}
    elif arguments.config_name or arguments.config_path:
        sources = {}  # a command that names the config takes nothing from elsewhere
    for source, values_of in sources.items():
        held = collect(partial(values_of, values, names), problems) or {}
        new = {name: value for name, value in held.items() if name not in names and value != values[name]}
        if new:
            given += (words := [f"{name}={overrides.as_override(value)}" for name, value in new.items()])
            told.append(f"{source}: {', '.join(words)}")
            parsed = OverridesParser.create().parse_overrides(words)
            written |= _replaced(new) | {each.get_key_element(): each.value() for each in parsed}
            values, wrong = _resolved(written)
    problems += wrong
    meant = {overrides.nearest_setting(name) or name for name in (problem.setting.lstrip("+~") for problem in problems)}
    doubtful = {*SETTINGS} if found is None or EXPERIMENT in meant else meant
    own = _run_of(values, names)
    config = with_values(Config(), values)
    config = collect(partial(branched, config, names, own and own.parent), problems) or config
    config, of_phases = read_phases(config)
    config = replace(config, told=tuple(told), departures=departures)
    return config, [*problems, *of_phases], doubtful, given


def _replaced(given: Values) -> dict[str, Any]:
    """The defaults of the settings that stand back, because another of their alternatives is given."""
    groups = [group for group in ALTERNATIVES if any(given.get(name) is not None for name in group)]
    return {name: DEFAULTS[name] for group in groups for name in group if name not in given}


def _resolved(written: Values) -> tuple[dict[str, Any], list[Problem]]:
    """All values, with interpolations resolved and types checked; a wrong value becomes a problem and the default."""
    problems, tree = list[Problem](), OmegaConf.create(nested({name: written[name] for name in SETTINGS}))
    values = {name: collect(partial(_value, tree, name, written[name]), problems) for name in SETTINGS}
    return values | {each.setting: DEFAULTS[each.setting] for each in problems}, problems


def _value(tree: DictConfig, name: str, written: Any) -> Any:
    """The value of a setting; UserError where it is of another type, refers to what there is not, or is a secret."""
    setting = SETTINGS[name]
    if any("$" in one or overrides.secret_name(one) for one in _VARIABLE.findall(str(written))):
        raise UserError(overrides.secret_problem(name))
    try:
        value = OmegaConf.select(tree, name, throw_on_missing=True)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        if overrides.SECRET_VALUE.search(str(value)):  # it came in by a file or by ${oc.env:NAME}
            raise UserError(overrides.secret_problem(name))
        value = overrides.of_type(setting, value)
    except OmegaConfBaseException as error:
        raise UserError(Problem(name, written, overrides.in_one_line(error), example(setting))) from error
    except (ValueError, OverflowError) as error:  # the latter: 400 digits, and no point among them
        raise UserError(Problem(name, written, f"must be {setting.type_words}", example(setting))) from error
    if value is not None and (problem := outside(setting, value)):
        raise UserError(problem)
    return value


def _of_run(values: Values, named: Collection[str]) -> dict[str, Any]:
    """The settings that were given to the run in the folder that the command names; empty where there is no run."""
    path = _run_of(values, named)
    return {name: value for name, value in (_saved(path) if path else {}).items() if name in SETTINGS}


def _of_parent(values: Values, named: Collection[str]) -> dict[str, Any]:
    """The settings that were given to the run that a new one branches off."""
    if values[BRANCH] is None or _run_of(values, named):
        return {}
    saved = _saved(checkpoint_of(values[BRANCH])[0] / "config.yaml")
    return {name: value for name, value in saved.items() if name in SETTINGS and name not in ("run_name", BRANCH)}


def _run_of(values: Values, named: Collection[str]) -> Path | None:
    """The config.yaml of the run whose folder the command names; None where that folder holds no run."""
    folder, name = values["run_dir"], values["run_name"]
    if not {"run_dir", "run_name"} & {*named} or (folder or name) is None:
        return None
    path = Path(absolute(folder or os.path.join("runs", name)), "config.yaml")
    return path if os.path.lexists(path) and path.with_name("run.json").is_file() else None


def _of_recipe(path: Path, values: Values, named: Collection[str]) -> dict[str, Any]:
    """The settings in the config.yaml of a run, for a new run in another folder."""
    saved = _saved(path)
    refuse([overrides.unknown(name, value) for name, value in saved.items() if name not in SETTINGS])
    return {name: value for name, value in saved.items() if name != "run_name"}


def _saved(path: Path) -> dict[str, Any]:
    """The values in a run's config.yaml by name, without those that were derived or concern one start."""
    with refusing(path, hint := "restore it from a copy, or give all settings"):
        saved = read_yaml(path, hint)
        derived = saved.pop(DERIVED, []) if isinstance(saved, dict) else None
        if not isinstance(derived, list):
            raise ValueError("holds no settings of a run")
    return {name: value for name, value in leaves(saved).items() if name not in (*OF_ONE_START, *derived)}


def _of_weights(values: Values, named: Collection[str]) -> dict[str, Any]:
    """The shape of the model in the folder of checkpoint.init_from, and its tokenizer (ids of another mean other words)
    unless the command names one, or a run goes on."""
    place = absolute(values["checkpoint.init_from"] or "")
    if values["checkpoint.init_from"] is None or not os.path.lexists(Path(place, "config.json")):
        return {}  # a rule says what is missing
    found = {f"model.{name}": value for name, value in imported_model_settings(place).items()}
    if values["tokenizer"] != DEFAULTS["tokenizer"] or "tokenizer" in named or _run_of(values, named):
        return found
    if holds_tokenizer(Path(place)):
        return found | {"tokenizer": place}
    if values["data.source"] != "tokens":
        rule = f"{place} holds none, and its model knows the ids of the one that it was trained with"
        raise UserError(Problem("tokenizer", None, rule, "tokenizer=FOLDER of that one, or tokenizer=byte"))
    return found
