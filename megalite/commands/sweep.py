"""`--multirun`: one training per point of a Hydra sweep, each a process (or torchrun) of its own.

Hydra's sweepers choose the points and its launchers place them, as they are; what they call, here or on another
machine, is `train_point`. Every point has its own run folder, named by what defines the training, so the same command
continues all of them. Hydra's folder of the sweep gets a record per point and, at the end, a comparison of all.

A file in that folder says that the sweep is to stop: what trains is asked to, as a scheduler asks, and what waits does
not start. Nothing that goes wrong with one point is raised, so the others go on.
Exit status: 0 all points trained or stopped on request, 1 some failed, 2 refused before anything started.
"""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from megalite.config.arguments import SEARCH_PATH, Arguments, read_arguments
from megalite.config.compose import CONF, PACKAGE, hydra_loader, load_config, run_hydra
from megalite.config.user_files import as_record, read_json, refusing
from megalite.errors.problems import NO_VALUE, Problem, UserError, collect, to_stderr
from megalite.launch.environment import read_environment
from megalite.observe.report.write import COMPARISON, write_report
from megalite.observe.screens import print_lines
from megalite.train.history import read_metrics

MOST_POINTS = 10_000
BASIC = ".BasicSweeper"  # the one whose points are known beforehand
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
STOP = "stop"  # in the sweep's folder, a byte for each signal; from PATIENCE bytes on, nobody waits any more
PATIENCE = 3
RECORD = "point.json"


@dataclass(frozen=True)
class PointRecord:
    """What became of a point; its file is in the folder that Hydra made for it."""

    words: list[str]
    run_dir: str
    status: str  # trained, stopped or failed
    val_loss: float | None


def sweep(argv: list[str]) -> int:
    """Check what can be known, sweep, compare; UserError where the sweep is refused."""
    arguments, problems = read_arguments(argv)
    environment = collect(lambda: read_environment(os.environ), problems)
    if environment is not None and environment.world_size > 1:
        rule = f"is started once, not on each of {environment.world_size} ranks"
        remedy = "start it without torchrun or srun; sweep.nproc_per_node=N gives every point N ranks"
        problems.append(Problem("--multirun", NO_VALUE, rule, remedy))
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
    own = f"hydra.sweep.dir={QuotedString(str(folder), Quote.single).with_quotes()}"
    with _stop_file(folder / STOP):
        status = run_hydra(["--multirun", *arguments.sources, *arguments.overrides, own], train_point)
    return max(status, _report(folder))


def points_of(words: Sequence[str], loader: Any = None) -> list[list[str]]:
    """The overrides of each point of the basic sweeper, in its order; UserError if there are more than anyone trains.

    `loader` knows the choices of `model=glob(*)`.
    """
    choices = []
    for word in words:
        override = OverridesParser.create(loader).parse_override(word)
        if override.is_sweep_override():
            values = itertools.islice(override.sweep_string_iterator(), MOST_POINTS + 1)  # a range may have billions
            choices.append([f"{override.get_key_element()}={value}" for value in values])
        else:
            choices.append([word])
    if math.prod(map(len, choices)) > MOST_POINTS:
        rule, remedy = f"a grid of more than {MOST_POINTS:,} points", "fewer values, or a sweeper that chooses"
        raise UserError(Problem("--multirun", NO_VALUE, rule, remedy))
    return [list(point) for point in itertools.product(*choices)]


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
            known = _of_training(fixed if chosen else arguments.overrides)
            return folder, ranks, [known] if chosen else points_of(known, loader), chosen
        except MissingConfigException as error:
            name, _, value = str(error.missing_cfg_file).rpartition("/")
            if name.startswith("hydra/"):
                remedy = f"{', '.join(error.options or ())}; others are packages to install (docs/sweeps.md)"
                raise UserError(Problem(name, value, "there is no such choice here", remedy)) from error
            said = str(error).splitlines()[0]
        except (HydraException, OmegaConfBaseException) as error:
            said = str(error).splitlines()[0]
    load_config([*arguments.sources, *_of_training(fixed)], 1)  # says it better, where it is a setting
    raise UserError(Problem("--multirun", NO_VALUE, said, "see docs/sweeps.md"))


def _of_training(words: Sequence[str]) -> list[str]:
    return [word for word in words if not word.lstrip("+~").startswith(("hydra.", "hydra/"))]


def _check(points: Sequence[Sequence[str]], flags: Sequence[str], ranks: int, *, chosen: bool) -> None:
    """Refuse what some point would be refused for, and two points in one folder."""
    problems: dict[tuple[str, str, str], Problem] = {}
    taken: dict[str, int] = {}
    for number, point in enumerate(points):
        if number and number % 100 == 0:
            print_lines([f"checked {number:,} of {len(points):,} points"])
        found: list[Problem] = []
        config = collect(lambda point=point: load_config([*flags, *point], ranks), found)  # type: ignore[misc]
        folder = "" if config is None else str(config.run_dir)
        if config is not None and chosen and config.train.eval_interval == 0:
            rule, remedy = "without evaluations there is no validation loss to choose by", "train.eval_interval=100"
            found.append(Problem("train.eval_interval", 0, rule, remedy))
        if folder and taken.setdefault(folder, number) != number:
            rule = f"points {taken[folder]} and {number} would train in the same folder"
            remedy = "sweep what defines the training, or name folders by what differs: run_dir='runs/s${train.steps}'"
            found.append(Problem("run_dir", folder, rule, remedy))
        for each in found:
            problems.setdefault((each.setting, str(each.value), each.rule), each)
    if problems:
        raise UserError(list(problems.values()))


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


def _report(folder: Path) -> int:
    """Says what became of the points and draws a page that compares them; the exit status."""
    paths = sorted(folder.rglob(RECORD), key=lambda path: (len(path.parent.name), path.parent.name))
    records = [as_record(PointRecord, read_json(path), path) for path in paths]
    everywhere = set[str].intersection(*(set(record.words) for record in records)) if records else set()
    for record in records:
        own = " ".join(word for word in record.words if word not in everywhere) or "(no overrides of its own)"
        loss = "" if record.val_loss is None else f", validation loss {record.val_loss:.4f}"
        print_lines([f"{own}: {record.status}{loss}{f'; {record.run_dir}' if record.run_dir else ''}"])
    trained = [Path(record.run_dir) for record in records if record.run_dir]
    if trained := [run for run in trained if (run / "metrics.jsonl").is_file()]:
        print_lines([f"comparison: {write_report(trained, folder / COMPARISON)}"])
    if any(record.status == "stopped" for record in records):
        print_lines(["stopped; the same command continues"])
    return int(any(record.status == "failed" for record in records))


def train_point(config: DictConfig) -> float:
    """Train what Hydra composed; the final validation loss, NaN where there is none."""
    hydra = HydraConfig.get()
    words = [word for word in hydra.overrides.task if not word.lstrip("+").startswith("sweep.")]
    folder, stop = Path(hydra.runtime.output_dir), Path(hydra.runtime.cwd, hydra.sweep.dir, STOP)
    alone = hydra.runtime.choices["hydra/launcher"] == "basic"  # else several points write at once
    ranks = int(config.sweep.nproc_per_node) if "sweep" in config else 1
    run_dir, status, loss = "", "stopped", None
    try:
        run_dir = str(load_config([*_sources(hydra), *words], ranks).run_dir)
        if not stop.exists():
            with open(os.devnull if alone else folder / "output.log", "wb") as log:
                failed = run_process(_command(ranks, [*_sources(hydra), *words]), None if alone else log, stop)
            status = "stopped" if stop.exists() else "failed" if failed else "trained"
        if status == "trained":
            losses = [line["val_loss"] for line in read_metrics(Path(run_dir, "metrics.jsonl")) if "val_loss" in line]
            loss = losses[-1] if losses else None
    except UserError as error:
        to_stderr(str(error))
        status = "failed"
    (folder / RECORD).write_text(json.dumps(asdict(PointRecord(words, run_dir, status, loss))))
    return math.nan if loss is None else loss


def _sources(hydra: HydraConf) -> list[str]:
    """Where Hydra found its config, as words of the launcher."""
    words = ["--config-name", str(hydra.job.config_name)] if hydra.job.config_name != "config" else []
    for source in hydra.runtime.config_sources:
        if source.provider == "main" and Path(source.path) != CONF:
            words += ["--config-path", source.path]
    return [*words, *(word for word in hydra.overrides.hydra if word.startswith(SEARCH_PATH))]


def _command(ranks: int, words: Sequence[str]) -> list[str]:
    launcher = PACKAGE.parent / "pretrain_gpt.py"
    program = [str(launcher)] if launcher.is_file() else ["-m", "megalite", "train"]
    if ranks > 1:
        program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program]
    return [sys.executable, *program, *words]


def run_process(command: list[str], output: IO[bytes] | None, stop: Path) -> int:
    """The status of a child, which is in a session of its own: a terminal's Ctrl-C reaches it through the stop file."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a launcher's worker, not the driver
        with suppress(ValueError):  # not its main thread, where signals do not come
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    asked = False
    while True:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(0.3)
        if stop.exists() and not asked:
            child.terminate()
            asked = True
        if asked and stop.stat().st_size >= PATIENCE:
            os.killpg(child.pid, signal.SIGKILL)
