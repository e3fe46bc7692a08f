"""What the config.json of a transformers folder says: the `model.*` settings of its model. Reads no weights.

A value that no model has (another type, out of bounds) is a fault of the file. One that no setting here says is none:
the folder is sound, and its model is another one than the GPT here.
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from megalite.config.rule import Case, problems_of
from megalite.config.rules import RULES
from megalite.config.schema import Config, ModelConfig
from megalite.config.settings import SETTINGS, outside, with_values
from megalite.config.user_files import read_object
from megalite.errors.problems import NO_VALUE, Problem, UserError, refuse
from megalite.hf.families import FAMILIES
from megalite.hf.families.family import Family
from megalite.hf.families.llama import RotaryFamily

SETTING, NAMES = "checkpoint.init_from", ", ".join(FAMILIES)
REMEDY = "the folder is damaged or incomplete: copy or download it again, or save it again with save_pretrained"
REPAIR = "write into config.json what its model has, or copy or download the folder again"
OTHER_MODEL = f"the folder may be sound; give a model of {NAMES} that the settings of docs/configuration.md can say"
STRUCTURES = {"rope_parameters": dict, "rope_scaling": dict, "mlp_only_layers": list, "layer_types": list}
Misfit = tuple[str, Any, str]  # a key of config.json, its value and the rule that it breaks
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them makes a folder a tokenizer's


def imported_model_settings(folder: str | Path) -> dict[str, Any]:
    """The `model.*` settings that match the folder's config.json: {"num_layers": 12, ...}. UserError with every key
    whose value is wrong, or else with every key that they cannot say."""

    def refuse_all(misfits: Iterator[Misfit], why: str, hint: str) -> None:
        name = Path(folder) / "config.json"
        refuse([Problem(f"{name}: {key}", value, why + rule, hint, here=True) for key, value, rule in misfits])

    found = read_model_file(Path(folder))
    family = FAMILIES[found["model_type"]]
    refuse_all(_misfits(family, found), "", REPAIR)
    refuse_all(family.beyond(found), "no setting here says it; what can be said: ", OTHER_MODEL)
    settings = family.settings(found)
    refuse_all(_contradictions(family, found, settings), "", REPAIR)
    return settings


def imported_model(folder: str | Path) -> ModelConfig:
    """The model of these settings; sizes that no config.json tells are not derived."""
    settings = imported_model_settings(folder)
    return with_values(Config(), {f"model.{name}": value for name, value in settings.items()}).model


def settings_of(model: ModelConfig) -> dict[str, Any]:
    """The model's settings as families take them: {"num_layers": 12, "moe.top_k": 2, ...}."""
    fields = [setting.field for setting in SETTINGS.values() if setting.group == "model"]
    return {field.removeprefix("model."): attrgetter(field.removeprefix("model."))(model) for field in fields}


def holds_tokenizer(folder: Path) -> bool:
    """Whether the folder says what its model's token ids mean."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def read_model_file(folder: Path) -> dict[str, Any]:
    """config.json of a supported family."""
    path = folder / "config.json"
    if not folder.is_dir():
        remedy = "give the path of a folder on this machine (nothing is downloaded), as save_pretrained writes it"
        raise UserError(Problem(SETTING, str(folder), "must be the folder of a transformers model", remedy))
    found = read_object(path, REMEDY)
    if (family := found.get("model_type")) not in [*FAMILIES]:
        remedy = "give a model of these; code that comes with a model is never run"
        raise UserError(Problem(f"{path}: model_type", family, f"must be one of {NAMES}", remedy))
    return found


def folder_problem(path: Path, rule: str) -> Problem:
    """What is wrong with a file of the folder, or with the folder."""
    return Problem(SETTING, str(path), rule, REMEDY)


def _misfits(family: Family, found: Mapping[str, Any]) -> Iterator[Misfit]:
    """Keys that are missing, or whose values are of another type than their settings or out of bounds."""
    for key, kind in STRUCTURES.items():
        value = found.get(key)
        parts: list[Any] = value if isinstance(value, list) else []
        if not isinstance(value, kind | None) or any(isinstance(part, list | dict) for part in parts):
            yield key, value, "must be an object" if kind is dict else "must be a list of plain values"
            return
    yield from _values_that_misfit(found, family.names(found), family.absent)
    if isinstance(family, RotaryFamily):
        rope, keys = family.rope(found)
        yarn = rope["rope_type"] == "yarn"  # which has an answer for every key
        rope = {key: value for key, value in rope.items() if key in keys}
        yield from _values_that_misfit(rope, keys, dict.fromkeys(keys) if yarn else {}, bounds=False)
        counted = rope.get("factor") and rope.get("original_max_position_embeddings")
        if yarn and not counted and found.get("max_position_embeddings") is None:
            yield "max_position_embeddings", NO_VALUE, "is missing, and YaRN counts from it"


def _values_that_misfit(
    found: Mapping[str, Any], names: Mapping[str, str], absent: Mapping[str, Any], *, bounds: bool = True
) -> Iterator[Misfit]:
    for key, name in names.items():
        setting, value = SETTINGS[f"model.{name}"], found.get(key, absent.get(key, NO_VALUE))
        if value is None and (absent.get(key, 0) is None or key == "num_key_value_heads"):
            continue
        words = f"must be {setting.type_words.removesuffix(' or null')}"
        if value == NO_VALUE:
            yield key, value, f"is missing, and {words}"
        elif type(value) not in ((int, float) if setting.kind is float else (setting.kind,)):  # true is no number
            yield key, value, words
        elif bounds and (problem := outside(setting, value)):
            yield key, value, problem.rule


def _contradictions(family: Family, found: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[Misfit]:
    """Settings of the file that are out of bounds or cannot be together, by the rules for everyone's."""
    names = family.names(found) | (family.rope(found)[1] if isinstance(family, RotaryFamily) else {})
    keys = {f"model.{name}": key for key, name in names.items()}
    told = {f"model.{name}": value for name, value in settings.items() if value is not None}
    problems = [problem for name, value in told.items() if (problem := outside(SETTINGS[name], value))]
    config = with_values(Config(), {**told, SETTING: ".", "tokenizer": "."})  # weights and words of others
    for problem in problems or problems_of(Case(config, 1), RULES):
        if problem.setting.startswith("model."):
            yield keys.get(problem.setting, problem.setting), problem.value, problem.rule
