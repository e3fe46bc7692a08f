"""Overrides for a command that reads only some settings: written and checked as in training."""

from collections.abc import Sequence

from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megalite.config.arguments import read_arguments
from megalite.config.bounds import bounds
from megalite.config.compose import hydra_loader, load_config
from megalite.config.overrides import Examination
from megalite.config.schema import Config
from megalite.config.settings import EXPERIMENT, GROUPS, SETTINGS, with_values
from megalite.errors.problems import NO_VALUE, Problem, UserError, collect


def names_of(words: Sequence[str]) -> frozenset[str]:
    """The settings and groups that overrides name."""
    return frozenset(word.partition("=")[0].lstrip("+~") for word in words)


def load_part(words: Sequence[str], doer: str, reads: Sequence[str]) -> Config:
    """The config of overrides of which `doer` reads those in `reads`: settings, groups (data=NAME), or all that is in
    a group (data.*). A rule that speaks of another setting is silent."""
    problems = []
    read = {name for name in (*SETTINGS, *GROUPS) if name in reads or f"{name.partition('.')[0]}.*" in reads}
    for name in sorted(names_of(words) - read):
        if name in SETTINGS or name in GROUPS or name == EXPERIMENT:
            listed = ", ".join(f"{one}=NAME" if one in GROUPS else one for one in reads)
            problems.append(Problem(name, NO_VALUE, f"{doer} does not read it", f"what it reads: {listed}"))
    config = collect(lambda: load_config(list(words), 1, SETTINGS.keys() - read), problems)
    if problems or config is None:
        raise UserError(problems)
    return config


def load_values(words: Sequence[str], reads: Sequence[str]) -> Config:
    """The defaults with the overrides' values of the settings in `reads`, each checked on its own.

    The words may be those of a training command: other settings must exist, and their values are left out. No rule that
    joins settings is asked, so the command asks those that concern it. Raises UserError.
    """
    arguments, problems = read_arguments(list(words))
    with hydra_loader(arguments) as loader:
        examination = Examination(loader, arguments)
        for word in arguments.overrides:
            examination.examine(word)
        if problems := [*problems, *examination.problems]:
            raise UserError(problems)
        accepted = [*arguments.search_path, *examination.accepted]
        try:
            composed = loader.load_configuration(
                arguments.config_name, accepted, run_mode=RunMode.RUN, from_shell=False
            )
        except (HydraException, OmegaConfBaseException) as error:
            remedy = "see docs/configuration.md"
            raise UserError(Problem("overrides", " ".join(words), str(error).splitlines()[0], remedy)) from error
    config = with_values(Config(), {name: OmegaConf.select(composed, name) for name in reads})
    if problems := list(bounds(config)):
        raise UserError(problems)
    return config
