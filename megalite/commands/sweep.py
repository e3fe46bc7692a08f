"""`--multirun`: one training per point of a Hydra sweep, each a process (or torchrun) of its own.

Hydra's sweepers choose the points and its launchers place them, as they are; what they call is `train_point`
(sweep_point.py). Every point has its own run folder, keyed by what defines the training, so the same command continues
all of them. Hydra's folder of the sweep gets a record per point and, at the end, a comparison of all.

Exit status: 0 all points trained or stopped on request, 1 some failed, 2 refused before anything started.
"""

import itertools
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from megalite.commands.sweep_point import RECORD, STOP, records_of, train_point
from megalite.config.arguments import Arguments, read_arguments
from megalite.config.compose import CONF, hydra_loader, load_config
from megalite.config.packages import is_installed
from megalite.config.user_files import refusing
from megalite.errors.problems import NO_VALUE, Problem, UserError, collect
from megalite.launch.environment import read_environment
from megalite.observe.report.write import COMPARISON, write_report
from megalite.observe.screens import print_lines

MOST_POINTS = 10_000
BASIC = ".BasicSweeper"  # the one whose points are known beforehand
PLUGINS = {
    "hydra/launcher=joblib": "hydra-joblib-launcher",
    "hydra/launcher=submitit_local": "hydra-submitit-launcher",
    "hydra/launcher=submitit_slurm": "hydra-submitit-launcher",
    "hydra/sweeper=optuna": "hydra-optuna-sweeper",
}
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def main(argv: Sequence[str]) -> int:
    """Check what can be known, sweep, compare; UserError where the sweep is refused."""
    arguments, problems = read_arguments(list(argv))
    problems += _not_started_once(os.environ) + list(_missing_plugins(arguments.overrides))
    if problems:
        raise UserError(problems)
    folder, ranks, points, chosen = _composed(arguments)
    if not chosen:
        print_lines([f"sweep of {len(points):,} points in {folder}"])
    _check(points, arguments.sources, ranks, chosen=chosen)
    with refusing(folder, "another hydra.sweep.dir"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STOP).touch()
        for left in (folder / STOP, *folder.rglob(RECORD)):  # by an earlier sweep into this folder
            left.unlink(missing_ok=True)
    own = _assigned("hydra.sweep.dir", str(folder))
    with _stop_file(folder / STOP):
        status = _swept(["--multirun", *arguments.sources, *arguments.overrides, own])
    return max(status, _tell(folder))


def points_of(words: Sequence[str], loader: Any = None) -> list[list[str]]:
    """The overrides of each point of the basic sweeper, in its order; UserError if there are more than anyone trains.

    `loader` knows the choices of `model=glob(*)`.
    """
    choices = []
    for word in words:
        override = OverridesParser.create(loader).parse_override(word)
        if override.is_sweep_override():
            key = override.get_key_element()
            values = itertools.islice(override.sweep_string_iterator(), 10 * MOST_POINTS)  # a range may have billions
            choices.append([f"{key}={value}" for value in values])
        else:
            choices.append([word])
    count = math.prod(map(len, choices))
    if count > MOST_POINTS:
        more = " or more" if any(len(each) == 10 * MOST_POINTS for each in choices) else ""
        rule = f"a grid of {count:,} points{more}, but a sweep has at most {MOST_POINTS:,}"
        raise UserError(Problem("--multirun", NO_VALUE, rule, "fewer values, or a sweeper that chooses"))
    return [list(point) for point in itertools.product(*choices)]


def _is_hydra_s(word: str) -> bool:
    return word.lstrip("+~").startswith(("hydra.", "hydra/"))


def _not_started_once(variables: Mapping[str, str]) -> list[Problem]:
    problems: list[Problem] = []
    environment = collect(lambda: read_environment(variables), problems)
    if environment is not None and environment.world_size > 1:
        rule = f"is started once, not on each of {environment.world_size} ranks"
        remedy = "start it without torchrun or srun; sweep.nproc_per_node=N gives every point N ranks"
        problems.append(Problem("--multirun", NO_VALUE, rule, remedy))
    return problems


def _missing_plugins(words: Sequence[str]) -> Iterator[Problem]:
    for word in words:
        package = PLUGINS.get(word.lstrip("+"))
        if package and not is_installed(f"hydra_plugins.{package.replace('-', '_')}"):
            name, _, value = word.partition("=")
            yield Problem(name, value, f"the package {package} is not installed", f"pip install {package}")


def _composed(arguments: Arguments) -> tuple[Path, int, list[list[str]], bool]:
    """Hydra's folder of this sweep, the ranks of a point, what is known of the points, whether they are chosen."""
    fixed = arguments.overrides
    with hydra_loader(arguments) as loader:
        try:
            parser = OverridesParser.create(loader)
            fixed = [word for word in arguments.overrides if not parser.parse_override(word).is_sweep_override()]
            words = [*arguments.search_path, *fixed]
            found = loader.load_configuration(arguments.config_name, words, run_mode=RunMode.MULTIRUN)
            # A number below 1 is refused with the rest.
            ranks = max(1, found.sweep.nproc_per_node) if "sweep" in found else 1
            folder, chosen = Path(found.hydra.sweep.dir).absolute(), not found.hydra.sweeper._target_.endswith(BASIC)
            known = [word for word in (fixed if chosen else arguments.overrides) if not _is_hydra_s(word)]
            return folder, ranks, [known] if chosen else points_of(known, loader), chosen
        except MissingConfigException as error:
            name, _, value = str(error.missing_cfg_file).rpartition("/")
            if name.startswith("hydra/"):
                choices = ", ".join(error.options or ())
                raise UserError(Problem(name, value, "there is no such choice", choices)) from error
            said = str(error).splitlines()[0]
        except (HydraException, OmegaConfBaseException) as error:
            said = str(error).splitlines()[0]
    # It says it better, where it is a setting.
    load_config([*arguments.sources, *(word for word in fixed if not _is_hydra_s(word))], 1)
    raise UserError(Problem("--multirun", NO_VALUE, said, "see docs/sweeps.md"))


def _check(points: Sequence[Sequence[str]], flags: Sequence[str], ranks: int, *, chosen: bool) -> None:
    """Refuse what some point would be refused for, and two points in one folder."""
    problems: list[Problem] = []
    taken: dict[str, int] = {}
    for number, point in enumerate(points):
        if number and number % 100 == 0:
            print_lines([f"checked {number:,} of {len(points):,} points"])
        found: list[Problem] = []
        config = collect(lambda point=point: load_config([*flags, *point], ranks), found)  # type: ignore[misc]
        known = {(each.setting, str(each.value), each.rule) for each in problems}
        problems += [each for each in found if (each.setting, str(each.value), each.rule) not in known]
        if config is None:
            continue
        if chosen and config.train.eval_interval == 0:
            rule, remedy = "without evaluations there is no validation loss to choose by", "train.eval_interval=100"
            problems.append(Problem("train.eval_interval", 0, rule, remedy))
        folder = str(config.run_dir)
        if folder in taken:
            rule = f"points {taken[folder]} and {number} would train in the same folder"
            remedy = "sweep what defines the training, or name folders by what differs: run_dir='runs/s${train.steps}'"
            problems.append(Problem("run_dir", folder, rule, remedy))
        taken.setdefault(folder, number)
    if problems:
        raise UserError(problems)


def _assigned(name: str, text: str) -> str:
    """An override of Hydra's with that text, whatever is in it."""
    escaped = text.replace("'", "\\'")
    return f"{name}='{escaped}'"


@contextmanager
def _stop_file(path: Path) -> Iterator[None]:
    """Meanwhile a signal that asks to stop only writes a byte to the file: each point sees it, wherever it runs."""

    def ask(number: int, frame: FrameType | None) -> None:
        with path.open("ab") as file:
            file.write(b".")

    before = {number: signal.signal(number, ask) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _swept(words: list[str]) -> int:
    """Let Hydra sweep; it says itself what went wrong with it."""
    given, sys.argv[1:] = sys.argv[1:], words
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(train_point)()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv[1:] = given
    return 0


def _tell(folder: Path) -> int:
    """What became of the points, and a page that compares them; the exit status."""
    records = records_of(folder)
    everywhere = set[str].intersection(*(set(record.words) for record in records)) if records else set()
    print_lines(record.line(everywhere) for record in records)
    trained = [Path(record.run_dir) for record in records if record.metrics().is_file()]
    if trained:
        print_lines([f"comparison: {write_report(trained, folder / COMPARISON)}"])
    if any(record.status == "stopped" for record in records):
        print("stopped; the same command continues")
    return int(any(record.status == "failed" for record in records))
