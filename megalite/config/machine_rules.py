"""What a config needs of this machine: folders, packages, variables; other ranks may see others."""

import glob
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from megalite.config.derive import BUILT_IN_TOKENIZERS, looks_like_path, run_dir_of
from megalite.config.files import OWN, STATUS, absolute, output_problems, run_dir_problems
from megalite.config.nccl_options import read_nccl_options
from megalite.config.schema import Config
from megalite.errors.problems import NO_VALUE, Problem, UserError

OLDEST_TORCH = (2, 11)  # as in pyproject.toml
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WANDB_MODES = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}
ALERTS = "MEGALITE_ALERT_COMMAND"  # in the place of log.alert_command
WEBHOOK = re.compile(r"https?://", re.IGNORECASE)
WANDB_PROJECT = re.compile(r"(?=.*\S)[^/\\#?%:]{1,128}")


def torch_is_new_enough(config: Config) -> Iterator[Problem]:
    """Asked without importing torch, which an old one would not survive. A torch built in place has no version."""
    with suppress(PackageNotFoundError):
        found, oldest = version("torch"), ".".join(map(str, OLDEST_TORCH))
        if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST_TORCH:
            rule = f"older than {oldest}; before 2.10 a file that torch loads can run code (CVE-2026-24747)"
            yield Problem("torch", found, rule, f"pip install 'torch>={oldest}'", here=True)


def tokenizer_exists(config: Config) -> Iterator[Problem]:
    name, folder = config.tokenizer, Path(absolute(config.tokenizer))
    if name in BUILT_IN_TOKENIZERS or (name and folder.is_dir()):
        return
    if (is_path := looks_like_path(name)) or not HUB_NAME.fullmatch(name):
        rule = f"there is no folder {folder}" if is_path else "neither built in, nor a folder, nor a possible hub name"
        remedy = f"{', '.join(BUILT_IN_TOKENIZERS)}, the folder of a transformers tokenizer, or a name like owner/name"
        yield Problem("tokenizer", name, rule, remedy, here=is_path)


def places_can_be_used(config: Config) -> Iterator[Problem]:
    """Start weights, the run's folder and the file of NCCL options."""
    start, nccl = config.checkpoint.init_from, config.parallel.nccl_options
    if start is not None and not (place := Path(absolute(start)) / "config.json").is_file():
        rule = f"must be the folder of a transformers model, and there is no {place}"
        remedy = "a folder that save_pretrained or megalite export has written (a run goes on by run_dir)"
        yield Problem("checkpoint.init_from", start, rule, remedy, here=True)
    if config.run_dir or config.run_name:
        asked = config.run_dir or f"null, run_name={config.run_name}"
        yield from run_dir_problems(asked, Path(run_dir_of(config)))
    try:
        if nccl is not None:
            read_nccl_options(Path(absolute(nccl)))
    except UserError as error:
        yield from error.problems


def data_is_not_written_over(config: Config) -> Iterator[Problem]:
    """A folder of text is read with all that is below it: what the run writes there would be other data next time."""
    path, cache, status = config.data.path, config.data.cache_dir, config.launch.status_file
    written = {"run_dir": config.run_dir or "runs", "data.cache_dir": cache, "launch.status_file": status}
    named = [path, *(config.data.validation or {}).values()]
    places = [absolute(str(part)) for one in named for part in (one if isinstance(one, list) else [one])]
    for place in places if config.data.source in ("text", "hf") else ():
        files = (one for one in glob.iglob(place, recursive=True) if os.path.isfile(one))
        read = {*map(os.path.realpath, (place, *files))}
        for name, target in ((name, target) for name, target in written.items() if target):
            real = Path(os.path.realpath(absolute(target)))
            if read & {*map(str, (real, *real.parents))}:
                rule = f"the run would write into its own data, data.path={path}"
                yield Problem(name, target, rule, f"{name}=PATH elsewhere, or a glob like data.path='*.txt'", here=True)


def status_file_is_free(config: Config) -> Iterator[Problem]:
    if (name := config.launch.status_file) is None:
        return
    path, folder = Path(absolute(name)), Path(os.path.realpath(run_dir_of(config)))
    place = Path(os.path.realpath(path.parent), path.name)
    inside = place.relative_to(folder).parts[:1] if place.is_relative_to(folder) else ()
    if problems := output_problems("launch.status_file", path, STATUS):
        yield replace(problems[0], here=True)
    elif folder.is_relative_to(place) or {*inside} & {*OWN}:
        rule = f"the run keeps files of its own by that name in {folder}"
        yield Problem("launch.status_file", name, rule, f"launch.status_file={STATUS.usual}, or a name elsewhere")


def asked_mode(setting: str | None, variables: Mapping[str, str]) -> str | None:
    """The mode of wandb by log.wandb, else by WANDB_MODE. None: neither says one, so a key that is set up decides."""
    return setting or WANDB_MODES.get(variables.get("WANDB_MODE", ""))


def is_installed(package: str) -> bool:
    """Whether a package is there; importing it takes seconds. A folder of that name, as wandb makes, has no origin."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def trackers_can_be_used(config: Config) -> Iterator[Problem]:
    log, variable, mode = config.log, os.environ.get("WANDB_MODE", ""), asked_mode(config.log.wandb, os.environ)
    if variable and not (log.wandb or mode):
        remedy = "WANDB_MODE=online, offline or disabled, or leave it out"
        yield Problem("WANDB_MODE", variable, "is not a mode in which one process can write a run", remedy)
    asked = {"wandb": mode not in (None, "disabled"), "tensorboard": log.tensorboard, "trackio": log.trackio}
    for package, off in (("wandb", "disabled"), ("tensorboard", "false"), ("trackio", "false")):
        if asked[package] and not is_installed(package):
            rule, remedy = f"the package {package} is not installed", f"pip install {package}, or log.{package}={off}"
            yield Problem(f"log.{package}", NO_VALUE, rule, remedy, here=True)
    if not WANDB_PROJECT.fullmatch(log.wandb_project):
        rule = "wandb takes 1 to 128 characters and none of / \\ # ? % :"
        yield Problem("log.wandb_project", log.wandb_project, rule, "log.wandb_project=megalite")


def store_can_be_used(config: Config) -> Iterator[Problem]:
    """Whether it answers, rank 0 asks it at the start (checkpoint/remote.py)."""
    name, url = "checkpoint.remote", config.checkpoint.remote
    if url is None:
        return
    from fsspec.registry import available_protocols, known_implementations  # type: ignore[import-untyped]  # 0.2 s

    known, (protocol, mark, place) = available_protocols(), url.partition("://")
    if not mark or not place.strip("/") or protocol not in known:
        rule = f"is not PROTOCOL://PLACE with a protocol of fsspec, which knows {', '.join(known)}"
        yield Problem(name, url, rule, f"{name}=s3://BUCKET/runs/mine, or gs://, az://, hf://, file:///mnt/disk/mine")
    elif re.match(r"[^/@]*:[^/@]*@", place):
        rule = "names a password, and settings are recorded and uploaded"
        yield Problem(
            name, "", rule, f"{name}={protocol}://PLACE, with credentials in variables or fsspec's config files"
        )
    elif not is_installed(package := known_implementations[protocol]["class"].partition(".")[0]):
        rule, remedy = f"the package {package} is not installed", f"pip install {package}, or {name}=null"
        yield Problem(name, url, rule, remedy, here=True)


def alerts_can_be_sent(config: Config) -> Iterator[Problem]:
    """The address of a webhook is its password, and commands and config.yaml are read by others."""
    variable, hidden = os.environ.get(ALERTS, ""), "(not shown)"
    if WEBHOOK.match(config.log.alert_command or ""):
        rule, remedy = "a webhook's address is a secret", f"export {ALERTS}=ADDRESS instead: it is recorded nowhere"
        yield Problem("log.alert_command", hidden, rule, remedy)
    try:
        parts = urlsplit(variable) if WEBHOOK.match(variable) else None
        if parts and (not parts.hostname or parts.port == 0 or not variable.isascii() or re.search(r"\s", variable)):
            raise ValueError
    except ValueError:
        remedy = f"{ALERTS}=https://HOST/PATH, or a shell command"
        yield Problem(ALERTS, hidden, "is no address of a webhook", remedy, here=True)


MACHINE_RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    *(torch_is_new_enough, tokenizer_exists, places_can_be_used),
    *(data_is_not_written_over, status_file_is_free, trackers_can_be_used, alerts_can_be_sent, store_can_be_used),
)
