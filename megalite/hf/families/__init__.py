"""The families of transformers' models that the GPT here can be, one file each; a new family is one new file."""

from importlib import import_module
from pkgutil import iter_modules

from megalite.hf.families.family import Family

_MODULES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
FAMILIES: dict[str, Family] = {each.FAMILY.model_type: each.FAMILY for each in _MODULES if hasattr(each, "FAMILY")}
