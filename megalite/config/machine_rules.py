"""What a config needs of this machine: folders, packages, variables; other ranks may see others.

Each rule is a small generator of `Problem`s. log.wandb says whether a run is shown at wandb, else the variable
WANDB_MODE. Without both, a run is shown where a key is set up.
"""

import glob
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from megalite.config.derive import BUILT_IN_TOKENIZERS, looks_like_path, run_dir_of
from megalite.config.files import OWN, STATUS, absolute, output_problems, run_dir_problems
from megalite.config.nccl_options import read_nccl_options
from megalite.config.schema import Config
from megalite.errors.problems import Problem, UserError
from megalite.errors.words import nearest

OLDEST_TORCH = (2, 11)  # as in pyproject.toml
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WANDB_MODES = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}
WANDB_PROJECT = re.compile(r"(?=.*\S)[^/\\#?%:]{1,128}")


def torch_is_new_enough(config: Config) -> Iterator[Problem]:
    """Asked without importing torch, which an old one would not survive."""
    try:
        found = version("torch")
    except PackageNotFoundError:  # built in place: whoever does that knows what it is
        return
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        rule = f"older than {oldest}; before 2.10 a file that torch loads can run code (CVE-2026-24747)"
        yield Problem("torch", found, rule, f"pip install 'torch>={oldest}'", here=True)


def nccl_options_can_be_read(config: Config) -> Iterator[Problem]:
    try:
        if config.parallel.nccl_options is not None:
            read_nccl_options(Path(absolute(config.parallel.nccl_options)))
    except UserError as error:
        yield from error.problems


def tokenizer_exists(config: Config) -> Iterator[Problem]:
    name, folder = config.tokenizer, Path(absolute(config.tokenizer))
    if name in BUILT_IN_TOKENIZERS or (name and folder.is_dir()):
        return
    if looks_like_path(name):
        remedy = "the folder of a transformers tokenizer"
        yield Problem("tokenizer", name, f"there is no folder {folder}", remedy, here=True)
    elif not HUB_NAME.fullmatch(name):
        hint = f"tokenizer={near}, or " if (near := nearest(name, BUILT_IN_TOKENIZERS)) else ""
        remedy = f"{hint}one of {', '.join(BUILT_IN_TOKENIZERS)}, a folder, or a name like gpt2 or owner/name"
        yield Problem("tokenizer", name, "neither built in, nor a folder, nor the form of a hub name", remedy)


def start_weights_exist(config: Config) -> Iterator[Problem]:
    source = config.checkpoint.init_from
    if source is not None and not (place := Path(absolute(source)) / "config.json").is_file():
        rule = f"must be the folder of a transformers model, and there is no {place}"
        remedy = "a folder that save_pretrained or megalite export has written (a run goes on by run_dir)"
        yield Problem("checkpoint.init_from", source, rule, remedy, here=True)


def run_dir_can_be_used(config: Config) -> Iterator[Problem]:
    if config.run_dir:
        yield from run_dir_problems(config.run_dir, Path(absolute(config.run_dir)))
    elif config.run_name:
        yield from run_dir_problems(f"null, run_name={config.run_name}", Path(run_dir_of(config)))


def what_is_written_is_not_read_as_data(config: Config) -> Iterator[Problem]:
    """A folder of text is read with all that is below it: what the run writes there would be other data next time."""
    path, cache, status = config.data.path, config.data.cache_dir, config.launch.status_file
    written = {"run_dir": config.run_dir or "runs", "data.cache_dir": cache, "launch.status_file": status}
    places = [absolute(str(part)) for part in (path if isinstance(path, list) else [path])]
    for place in places if config.data.source in ("text", "hf") else ():
        for name, target in ((name, target) for name, target in written.items() if target):
            real = os.path.realpath(absolute(target))
            inside = os.path.isdir(place) and Path(real).is_relative_to(os.path.realpath(place))
            if inside or (os.path.isfile(real) and real in map(os.path.realpath, glob.iglob(place, recursive=True))):
                rule = f"the run would write into its own data, data.path={path}"
                yield Problem(name, target, rule, f"{name}=PATH elsewhere, or a glob like data.path='*.txt'", here=True)


def status_file_is_not_another_s(config: Config) -> Iterator[Problem]:
    if (name := config.launch.status_file) is None:
        return
    path, folder = Path(absolute(name)), Path(os.path.realpath(run_dir_of(config)))
    if problems := output_problems("launch.status_file", path, STATUS):
        yield replace(problems[0], here=True)
        return
    place = Path(os.path.realpath(path.parent), path.name)
    inside = place.is_relative_to(folder) and place.relative_to(folder).parts
    if folder.is_relative_to(place) or (inside and inside[0] in OWN):
        rule = f"the run keeps files of its own by that name in {folder}"
        yield Problem("launch.status_file", name, rule, f"launch.status_file={STATUS.usual}, or a name elsewhere")


def asked_mode(setting: str | None, variables: Mapping[str, str]) -> str | None:
    """What the user asks of wandb: disabled, offline or online. None: nothing, or a WANDB_MODE that means nothing."""
    return setting or WANDB_MODES.get(variables.get("WANDB_MODE", ""))


def is_installed(package: str) -> bool:
    """Whether a package is there; it is not imported, which takes seconds."""
    found = find_spec(package)
    return found is not None and found.origin is not None  # a folder of that name, as wandb itself makes, has none


def trackers_can_be_used(config: Config) -> Iterator[Problem]:
    log, variable, mode = config.log, os.environ.get("WANDB_MODE", ""), asked_mode(config.log.wandb, os.environ)
    if log.wandb is None and variable and mode is None:
        remedy = "WANDB_MODE=online, offline or disabled, or leave it out"
        yield Problem("WANDB_MODE", variable, "is not a mode in which one process can write a run", remedy)
    if mode in ("offline", "online") and not is_installed("wandb"):
        name, remedy = "log.wandb" if log.wandb else "WANDB_MODE", "pip install wandb, or log.wandb=disabled"
        yield Problem(name, mode, "the package wandb is not installed", remedy, here=True)
    if log.tensorboard and not is_installed("tensorboard"):
        remedy = "pip install tensorboard, or log.tensorboard=false"
        yield Problem("log.tensorboard", True, "the package tensorboard is not installed", remedy, here=True)
    if not WANDB_PROJECT.fullmatch(log.wandb_project):
        rule = "wandb takes 1 to 128 characters and none of / \\ # ? % :"
        yield Problem("log.wandb_project", log.wandb_project, rule, "log.wandb_project=megalite")


MACHINE_RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    *(torch_is_new_enough, nccl_options_can_be_read, tokenizer_exists, start_weights_exist, run_dir_can_be_used),
    *(what_is_written_is_not_read_as_data, status_file_is_not_another_s, trackers_can_be_used),
)
