"""The command line split into Hydra's flags and the overrides, with flags that megalite refuses as problems.

Hydra's own parser decides what is a flag, so `--cfg job`, `--help`, `-cn` and the rest mean what Hydra's docs say.
"""

import io
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser

from megalite.config.inherited import as_override
from megalite.config.own_presets import SEARCH_PATH, bombs, listed_folders
from megalite.config.secrecy import ADVICE, HIDDEN, secret_name, secret_override
from megalite.errors.problems import NO_VALUE, Problem, UserError, collect

COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")  # of which Hydra takes one
INFORMATION = ("help", "hydra_help", "cfg", "info", "shell_completion")
OF_INFORMATION = ("resolve", "package", "config_name")
# Hydra's own folders and working directory: one process per rank must leave nothing of them on disk.
FIXED_HYDRA_SETTINGS: dict[str, Any] = {
    "hydra.run.dir": ".",
    "hydra.output_subdir": None,
    "hydra.job.chdir": False,
    "hydra.callbacks": {},
}


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


def wants_information(argv: list[str]) -> bool:
    """Whether the command line asks Hydra to show something (--help, --cfg job, ...) instead of running."""
    parsed, _, complaint = _parse(argv)
    if parsed is None:
        return not complaint  # --version prints and exits while it is parsed
    return bool(_information(parsed))


def wants_sweep(argv: list[str]) -> bool:
    """Whether the command line asks for one training per point of a sweep."""
    parsed, _, _ = _parse(argv)
    return parsed is not None and bool(parsed.multirun)


def read_arguments(argv: list[str]) -> tuple[Arguments, list[Problem]]:
    """Flags and overrides, with a problem for every flag that has no meaning here."""
    parsed, unknown, complaint = _parse(argv)
    if parsed is None:
        return Arguments(), [Problem("command line", _shown(argv), complaint, "see --help")] if complaint else []
    problems = []
    overrides, folders = [], []
    for text in [*parsed.overrides, *unknown]:
        if text.startswith("-"):
            problems.append(_unknown_flag(text))
        elif text.startswith(SEARCH_PATH):
            folders += collect(partial(listed_folders, text), problems) or []
        else:  # Hydra's `+experiment=NAME` adds what is here from the start
            overrides.append(text[text.startswith("+experiment=") :])
    if any(secret_name(text.partition("=")[0]) for text in unknown):
        # `--api-key VALUE`: the bare word is the flag's value, and must not be repeated in another message.
        overrides = [text for text in overrides if "=" in text]
    asked = [f"--{name.replace('_', '-')}" for name in COMMANDS if getattr(parsed, name)]
    if len(asked) > 1:
        problems.append(Problem(asked[0], NO_VALUE, f"cannot be given with {' and '.join(asked[1:])}", "one of them"))
    if parsed.experimental_rerun:
        rule = "Hydra's rerun loads a pickle, which can run code"
        problems.append(
            Problem("--experimental-rerun", parsed.experimental_rerun, rule, "start the same command again")
        )
    if parsed.resolve and not parsed.cfg:
        problems.append(Problem("--resolve", True, "only has a meaning with --cfg", "--cfg job --resolve"))
    arguments = Arguments(overrides, parsed.config_name or "config", information=_information(parsed))
    for flag, folder in (("--config-path", parsed.config_path), ("--config-dir", parsed.config_dir)):
        if folder is not None and not Path(folder).is_dir():
            problems.append(Problem(flag, folder, "there is no such folder", "a folder of yaml files"))
        elif flag == "--config-path" and folder is not None:
            arguments.config_path = str(Path(folder).absolute())
    if parsed.config_dir is not None and Path(parsed.config_dir).is_dir():
        folders.insert(0, parsed.config_dir)
    if found := [problem for folder in [*filter(None, [parsed.config_path]), *folders] for problem in bombs(folder)]:
        raise UserError([*problems, *found])  # before Hydra takes them up
    if folders:
        urls = [f"file://{Path(folder).absolute()}" for folder in folders]
        arguments.search_path = [f"{SEARCH_PATH}{as_override(urls)}"]
    return arguments, problems


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
    bare = text.lstrip("-")
    remedy = (
        f"settings have no dashes: {bare}" if value else "settings are written name=value, without dashes; see --help"
    )
    return Problem(name, value, "unknown option", remedy)


def _shown(argv: list[str]) -> str:
    return HIDDEN if any(secret_override(text) for text in argv) else " ".join(argv)
