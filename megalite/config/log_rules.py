"""Judges the settings of wandb and TensorBoard; rules.py says what a rule is.

log.wandb says whether a run is shown at wandb, else the variable WANDB_MODE. Who says neither gets it where a key
is set up.
"""

import os
from collections.abc import Iterator, Mapping

from megalite.config.packages import is_installed
from megalite.config.schema import Config
from megalite.errors.problems import Problem

MODES = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}
FORBIDDEN = "/\\#?%:"  # in the name of a project
LONGEST = 128


def asked_mode(setting: str | None, variables: Mapping[str, str]) -> str | None:
    """What the user asks for: disabled, offline or online. None: nothing, or a WANDB_MODE that means nothing."""
    return setting or MODES.get(variables.get("WANDB_MODE", ""))


def wandb_mode_is_known(config: Config, world_size: int) -> Iterator[Problem]:
    mode = os.environ.get("WANDB_MODE", "")
    if config.log.wandb is None and mode and mode not in MODES:
        remedy = "WANDB_MODE=online, offline or disabled, or leave it out"
        yield Problem("WANDB_MODE", mode, "is not a mode in which one process can write a run", remedy)


def packages_are_installed(config: Config, world_size: int) -> Iterator[Problem]:
    mode = asked_mode(config.log.wandb, os.environ)
    if mode in ("offline", "online") and not is_installed("wandb"):
        name = "log.wandb" if config.log.wandb else "WANDB_MODE"
        remedy = "pip install wandb, or log.wandb=disabled"
        yield Problem(name, mode, "the package wandb is not installed", remedy, here=True)
    if config.log.tensorboard and not is_installed("tensorboard"):
        remedy = "pip install tensorboard, or log.tensorboard=false"
        yield Problem("log.tensorboard", True, "the package tensorboard is not installed", remedy, here=True)


def wandb_takes_the_names(config: Config, world_size: int) -> Iterator[Problem]:
    log = config.log
    project = log.wandb_project.strip()
    if not project or len(project) > LONGEST or any(sign in project for sign in FORBIDDEN):
        rule = f"wandb takes 1 to {LONGEST} characters and none of {' '.join(FORBIDDEN)}"
        yield Problem("log.wandb_project", log.wandb_project, rule, "log.wandb_project=megalite")
    for setting, name in (("log.wandb_entity", log.wandb_entity), ("log.wandb_name", log.wandb_name)):
        if name is not None and not name.strip():
            yield Problem(setting, name, "is empty", f"{setting}=null, or a name")


LOG_RULES = (wandb_mode_is_known, packages_are_installed, wandb_takes_the_names)
