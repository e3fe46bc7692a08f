"""The command line split into Hydra's flags and the overrides, with flags that megalite refuses as problems.

Hydra's own parser decides what is a flag, so `--cfg job`, `--help`, `-cn` and the rest mean what Hydra's docs say.
"""

import io
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

from hydra._internal.utils import get_args_parser

from megalite.config.problems import Problem
from megalite.config.secrecy import ADVICE, HIDDEN, secret_name, secret_override

INFORMATION = ("help", "hydra_help", "cfg", "info", "shell_completion")


@dataclass
class Arguments:
    """What a command line asks for."""

    overrides: list[str] = field(default_factory=list)
    config_name: str = "config"
    config_path: str | None = None  # --config-path, absolute: instead of conf/
    search_path: list[str] = field(default_factory=list)  # --config-dir, as an override of Hydra


def wants_information(argv: list[str]) -> bool:
    """Whether the command line asks Hydra to show something (--help, --cfg job, ...) instead of running."""
    parsed, _, complaint = _parse(argv)
    if parsed is None:
        return not complaint  # --version prints and exits while it is parsed
    return any(bool(getattr(parsed, name)) for name in INFORMATION)


def read_arguments(argv: list[str]) -> tuple[Arguments, list[Problem]]:
    """Flags and overrides, with a problem for every flag that has no meaning here."""
    parsed, unknown, complaint = _parse(argv)
    if parsed is None:
        return Arguments(), [Problem("command line", _shown(argv), complaint, "see --help")] if complaint else []
    problems = []
    overrides = list(parsed.overrides)
    for text in unknown:
        if text.startswith("-"):
            problems.append(_unknown_flag(text))
        else:
            overrides.append(text)
    if any(secret_name(text.partition("=")[0]) for text in unknown):
        # `--api-key VALUE`: the bare word is the flag's value, and must not be repeated in another message.
        overrides = [text for text in overrides if "=" in text]
    if parsed.multirun:
        rule = "sweeps are not run in one process: a run is one process per rank"
        problems.append(
            Problem("--multirun", True, rule, "start one run per setting, from a shell loop or a job array")
        )
    if parsed.experimental_rerun:
        rule = "Hydra's rerun loads a pickle, which can run code"
        problems.append(
            Problem("--experimental-rerun", parsed.experimental_rerun, rule, "start the same command again")
        )
    if parsed.resolve and not parsed.cfg:
        problems.append(Problem("--resolve", True, "only has a meaning with --cfg", "--cfg job --resolve"))
    arguments = Arguments(overrides, parsed.config_name or "config")
    for flag, folder in (("--config-path", parsed.config_path), ("--config-dir", parsed.config_dir)):
        if folder is not None and not Path(folder).is_dir():
            problems.append(Problem(flag, folder, "there is no such folder", "a folder of yaml files"))
        elif flag == "--config-path" and folder is not None:
            arguments.config_path = str(Path(folder).absolute())
    if parsed.config_dir is not None and Path(parsed.config_dir).is_dir():
        arguments.search_path = [f"hydra.searchpath=['file://{Path(parsed.config_dir).absolute()}']"]
    return arguments, problems


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
