"""What the config.json of a transformers folder says: the `model.*` settings of its model. Reads no weights.

A value that no model has (another type, out of bounds) is a fault of the file. One that no setting here says is none:
the folder is sound, and its model is another one than the GPT here.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalite.config.files import read_object
from megalite.config.rule import Case, outside, problems_of
from megalite.config.rules import RULES
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, with_values
from megalite.errors.problems import NO_VALUE, Problem, UserError, refuse
from megalite.hf.families import FAMILIES
from megalite.hf.families.llama import RotaryFamily

SETTING, NAMES = "checkpoint.init_from", ", ".join(FAMILIES)
HINT = "the folder is damaged or incomplete: copy or download it again, or save it again with save_pretrained"
OTHER_MODEL = f"the folder may be sound; give a model of {NAMES} that the settings of docs/configuration.md can say"
OPEN = ("rope_attention_factor", "rope_mscale", "rope_mscale_all_dim")  # settings that may be null
Misfit = tuple[str, Any, str]  # a key of config.json, its value and the rule that it breaks
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them makes a folder a tokenizer's


def imported_model_settings(folder: str | Path) -> dict[str, Any]:
    """The `model.*` settings that match the folder's config.json: {"num_layers": 12, ...}. UserError with every key
    whose value is wrong, or else with every key that they cannot say."""
    path, found = Path(folder, "config.json"), read_model_file(Path(folder))
    family = FAMILIES[found["model_type"]]
    keys = {name: key for name, key in family.keys.items() if key in found}
    keys |= {name: key for key, name in family.also.items() if key in found}

    def problem(key: str, value: Any, rule: str, hint: str = HINT) -> Problem:
        return Problem(f"{path}: {key}", value, rule, hint, here=True)

    numbers = {name: found[key] for name, key in keys.items() if type(found[key]) in (int, float)}
    refuse([problem(*misfit) for misfit in _misfits(numbers, keys)])  # before 10**9 layers are listed
    try:
        beyond = [*family.beyond(found)]
        settings = {} if beyond else family.settings(found)
        if isinstance(family, RotaryFamily):
            keys |= {name: key for key, name in family.rope(found)[1].items()}
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        rule = f"describes no {family.model_type} model ({type(error).__name__}: {error})"
        raise UserError(Problem(str(path), NO_VALUE, rule, HINT, here=True)) from error
    unsaid = "no setting here says it; what can be said: "
    refuse([problem(key, value, unsaid + known, OTHER_MODEL) for key, value, known in beyond])
    refuse([problem(*misfit) for misfit in _misfits({name: settings[name] for name in settings if name in keys}, keys)])
    told = {f"model.{name}": value for name, value in settings.items() if value is not None}
    config = with_values(Config(), {**told, SETTING: ".", "tokenizer": "."})  # weights and words of others
    broken = [(one.setting.removeprefix("model."), one) for one in problems_of(Case(config, 1), RULES)]
    refuse([problem(keys.get(name, name), one.value, one.rule) for name, one in broken if name != one.setting])
    return settings


def _misfits(values: Mapping[str, Any], keys: Mapping[str, str]) -> Iterator[Misfit]:
    """The keys whose values are of another type than their settings or out of bounds."""
    for name, value in values.items():
        setting = SETTINGS[f"model.{name}"]
        if type(value) not in ((int, float) if setting.kind is float else (setting.kind,)):  # true is no number
            if value is not None or name not in OPEN:
                yield keys[name], value, f"must be {setting.type_words.removesuffix(' or null')}"
        elif problem := outside(setting, value):
            yield keys[name], value, problem.rule


def holds_tokenizer(folder: Path) -> bool:
    """Whether the folder says what its model's token ids mean."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def read_model_file(folder: Path) -> dict[str, Any]:
    """config.json of a supported family."""
    path = folder / "config.json"
    if not folder.is_dir():
        hint = "give the path of a folder on this machine (nothing is downloaded), as save_pretrained writes it"
        raise UserError(Problem(SETTING, str(folder), "must be the folder of a transformers model", hint))
    found = read_object(path, HINT)
    if (family := found.get("model_type")) not in [*FAMILIES]:
        hint = "give a model of these; code that comes with a model is never run"
        raise UserError(Problem(f"{path}: model_type", family, f"must be one of {NAMES}", hint))
    return found


def folder_problem(path: Path, rule: str) -> Problem:
    """What is wrong with a file of the folder, or with the folder."""
    return Problem(SETTING, str(path), rule, HINT)
