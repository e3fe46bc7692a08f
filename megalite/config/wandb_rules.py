"""Whether a run is to be shown at Weights and Biases, and under which names; rules.py says what a rule is.

The setting says it, else the variable WANDB_MODE; who says neither gets it where a key is set up (wandb_key.py).
The package itself is only looked for here: importing it takes a second.
"""

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from megalite.config.problems import Problem
from megalite.config.schema import Config

MODES = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}
FORBIDDEN = "/\\#?%:"  # in the name of a project
LONGEST = 128


def asked_mode(setting: str | None, variables: Mapping[str, str]) -> str | None:
    """What the user asks for: disabled, offline or online. None: nothing, or a WANDB_MODE that means nothing."""
    return setting or MODES.get(variables.get("WANDB_MODE", ""))


def wandb_is_installed() -> bool:
    found = find_spec("wandb")
    return found is not None and found.origin is not None  # a folder of that name, as wandb itself makes, has none


def wandb_mode_is_known(config: Config, world_size: int) -> Iterator[Problem]:
    mode = os.environ.get("WANDB_MODE", "")
    if config.log.wandb is None and mode and mode not in MODES:
        remedy = "WANDB_MODE=online, offline or disabled, or leave it out"
        yield Problem("WANDB_MODE", mode, "is not a mode in which one process can write a run", remedy)


def wandb_is_there_if_asked_for(config: Config, world_size: int) -> Iterator[Problem]:
    mode = asked_mode(config.log.wandb, os.environ)
    if mode in ("offline", "online") and not wandb_is_installed():
        name = "log.wandb" if config.log.wandb else "WANDB_MODE"
        remedy = "pip install wandb, or log.wandb=disabled; the run can also be sent later"
        yield Problem(name, mode, "the package wandb is not installed", remedy, here=True)


def wandb_takes_the_names(config: Config, world_size: int) -> Iterator[Problem]:
    log = config.log
    project = log.wandb_project.strip()
    if not project or len(project) > LONGEST or any(sign in project for sign in FORBIDDEN):
        rule = f"wandb takes 1 to {LONGEST} characters and none of {' '.join(FORBIDDEN)}"
        yield Problem("log.wandb_project", log.wandb_project, rule, "log.wandb_project=megalite")
    for setting, name in (("log.wandb_entity", log.wandb_entity), ("log.wandb_name", log.wandb_name)):
        if name is not None and not name.strip():
            yield Problem(setting, name, "is empty", f"{setting}=null, or a name")


WANDB_RULES = (wandb_mode_is_known, wandb_is_there_if_asked_for, wandb_takes_the_names)
