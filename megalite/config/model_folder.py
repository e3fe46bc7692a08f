"""What the config.json of a transformers folder says: the `model.*` settings of its model. Reads no weights."""

from pathlib import Path
from typing import Any

from megalite.config.families import FAMILIES, NAMES, model_settings
from megalite.config.schema import Config, ModelConfig
from megalite.config.settings import with_values
from megalite.config.user_files import read_object
from megalite.errors.problems import Problem, UserError

SETTING = "checkpoint.init_from"
REMEDY = "the folder is damaged or incomplete: copy or download it again, or save it again with save_pretrained"


def imported_model_settings(folder: str | Path) -> dict[str, Any]:
    """The `model.*` settings that match the folder's config.json: {"num_layers": 12, ...}."""
    try:
        return model_settings(read_model_file(Path(folder)))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        rule = f"no settings here describe its model ({type(error).__name__}: {error})"
        raise UserError(folder_problem(Path(folder) / "config.json", rule)) from error


def imported_model(folder: str | Path) -> ModelConfig:
    """The model of these settings; sizes that no config.json tells are not derived."""
    settings = imported_model_settings(folder)
    return with_values(Config(), {f"model.{name}": value for name, value in settings.items()}).model


def read_model_file(folder: Path) -> dict[str, Any]:
    """config.json of a supported family."""
    path = folder / "config.json"
    if not folder.is_dir():
        remedy = "give the path of a folder on this machine (nothing is downloaded), as save_pretrained writes it"
        raise UserError(Problem(SETTING, str(folder), "must be the folder of a transformers model", remedy))
    found = read_object(path, REMEDY)
    family = found.get("model_type")
    if family not in FAMILIES:
        remedy = f"give a {NAMES} model"
        if "auto_map" in found:
            remedy += "; code that comes with a model is never run"
        raise UserError(Problem(f"model_type in {path}", family, f"must be one of {', '.join(FAMILIES)}", remedy))
    return found


def folder_problem(path: Path, rule: str) -> Problem:
    """What is wrong with a file of the folder, or with the folder."""
    return Problem(SETTING, str(path), rule, REMEDY)
