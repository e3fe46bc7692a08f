"""The command line split into Hydra's flags and the overrides, with flags that megalite refuses as problems.

Hydra's own parser decides what is a flag, so `--cfg job`, `--help`, `-cn` and the rest mean what Hydra's docs say.
"""

import io
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from megalite.config.inherited import as_override
from megalite.config.secrecy import ADVICE, HIDDEN, secret_name, secret_override, secret_value
from megalite.config.user_files import ALIASES, read_yaml
from megalite.errors.problems import NO_VALUE, Problem, UserError

INFORMATION = ("help", "hydra_help", "cfg", "info", "shell_completion")
COMMANDS = ("run", "multirun", *INFORMATION[2:])  # of which Hydra takes one
OF_INFORMATION = ("resolve", "package", "config_name")
SEARCH_PATH = "hydra.searchpath="
LARGEST_PRESET = 2**20  # bytes; what aliases make of it is another matter


@dataclass
class Arguments:
    """What a command line asks for."""

    overrides: list[str] = field(default_factory=list)
    config_name: str = "config"
    config_path: str | None = None  # --config-path, absolute: instead of conf/
    search_path: list[str] = field(default_factory=list)  # --config-dir and hydra.searchpath, as one override
    information: list[str] = field(default_factory=list)  # the flags that ask Hydra to show something

    @property
    def sources(self) -> list[str]:
        """The words that lead another process to the same config files."""
        path = [] if self.config_path is None else ["--config-path", self.config_path]
        return ["--config-name", self.config_name, *path, *self.search_path]


def purpose(argv: list[str]) -> str:
    """What the command line is for: `training`, `sweep` (--multirun), or `information` (--help, --cfg job, ...)."""
    parsed, _, complaint = _parse(argv)
    if parsed is None:
        return "training" if complaint else "information"  # --version prints and exits while it is parsed
    return "information" if _information(parsed) else "sweep" if parsed.multirun else "training"


def read_arguments(argv: list[str]) -> tuple[Arguments, list[Problem]]:
    """Flags and overrides, with a problem for every flag that has no meaning here."""
    parsed, unknown, complaint = _parse(argv)
    if parsed is None:
        shown = HIDDEN if any(map(secret_override, argv)) else " ".join(argv)
        return Arguments(), [Problem("command line", shown, complaint, "see --help")] if complaint else []
    words = [*parsed.overrides, *unknown]
    problems = [_unknown_flag(word) for word in words if word.startswith("-")]
    asked = [f"--{name.replace('_', '-')}" for name in COMMANDS if getattr(parsed, name)]
    if len(asked) > 1:
        problems.append(Problem(asked[0], NO_VALUE, f"cannot be given with {' and '.join(asked[1:])}", "one of them"))
    if parsed.experimental_rerun:
        rule, remedy = "Hydra's rerun loads a pickle, which can run code", "start the same command again"
        problems.append(Problem("--experimental-rerun", parsed.experimental_rerun, rule, remedy))
    if parsed.resolve and not parsed.cfg:
        problems.append(Problem("--resolve", True, "only has a meaning with --cfg", "--cfg job --resolve"))
    paths = [folder for word in words if word.startswith(SEARCH_PATH) for folder in _listed_folders(word)]
    folders = [("--config-path", parsed.config_path), ("--config-dir", parsed.config_dir)]
    for name, folder in (*folders, *((SEARCH_PATH[:-1], path) for path in paths)):
        if folder is not None and not os.path.isdir(folder):
            shown = HIDDEN if secret_value(folder) else folder
            problems.append(Problem(name, shown, "there is no such folder", "--config-dir FOLDER, of yaml files"))
        elif folder is not None:
            problems += _bombs(folder)
    overrides = [word for word in words if not word.startswith(("-", SEARCH_PATH))]
    if any(secret_name(word.partition("=")[0]) for word in unknown):
        # `--api-key VALUE`: the bare word is the flag's value, and must not be repeated in another message.
        overrides = [word for word in overrides if "=" in word]
    if any(problem.rule.endswith(ALIASES) for problem in problems):
        raise UserError(problems)  # before Hydra writes the aliases out
    urls = [f"file://{Path(path).absolute()}" for path in [parsed.config_dir, *paths] if path and os.path.isdir(path)]
    return Arguments(
        [word.removeprefix("+") if word.startswith("+experiment=") else word for word in overrides],
        parsed.config_name or "config",
        str(Path(parsed.config_path).absolute()) if parsed.config_path and os.path.isdir(parsed.config_path) else None,
        [f"{SEARCH_PATH}{as_override(urls)}"] if urls else [],
        _information(parsed),
    ), problems


def _information(parsed: Namespace) -> list[str]:
    """The flags among them that ask for something to be shown, with what belongs to them."""
    if not any(getattr(parsed, name) for name in INFORMATION):
        return []
    given = {f"--{name.replace('_', '-')}": getattr(parsed, name) for name in (*INFORMATION, *OF_INFORMATION)}
    return [word for flag, value in given.items() if value for word in ([flag] if value is True else [flag, value])]


def _parse(argv: list[str]) -> tuple[Namespace | None, list[str], str]:
    """What Hydra's parser makes of it, the words unknown to it, and its complaint where it gives up."""
    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint), redirect_stdout(io.StringIO()):
            parsed, unknown = get_args_parser().parse_known_args(argv)
    except SystemExit:
        return None, [], complaint.getvalue().strip().rpartition("error: ")[2]
    return parsed, unknown, ""


def _unknown_flag(text: str) -> Problem:
    name, _, value = text.partition("=")
    if secret_override(text):
        return Problem(name if secret_name(name) else HIDDEN, HIDDEN, "looks like a secret", ADVICE)
    remedy = f"settings are written name=value, without dashes: {text.lstrip('-')}; see --help"
    return Problem(name, value, "unknown option", remedy)


def _listed_folders(text: str) -> list[str]:
    """The folders of an override `hydra.searchpath=[...]`."""
    try:
        found = OverridesParser.create().parse_override(text).value()
    except HydraException:
        found = text.removeprefix(SEARCH_PATH)
    return [str(folder).removeprefix("file://") for folder in (found if isinstance(found, list) else [found])]


def _bombs(folder: str) -> Iterator[Problem]:
    """Files there whose aliases stand for more than there is memory for: Hydra would write them all out."""
    for path in sorted([*Path(folder).glob("*.yaml"), *Path(folder).glob("*/*.yaml")]):
        try:
            if os.path.isfile(path) and os.path.getsize(path) <= LARGEST_PRESET:
                read_yaml(path)
        except (OSError, UserError) as error:  # what else is wrong with it counts if it is chosen
            yield from [problem for problem in getattr(error, "problems", []) if problem.rule.endswith(ALIASES)]
