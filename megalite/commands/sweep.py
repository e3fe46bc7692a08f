"""`--multirun`: one training per point of a Hydra sweep, each a process (or torchrun) of its own.

Hydra's sweepers choose the points and its launchers place them; what they call, here or on another machine, is
`train_point`. Hydra's folder of the sweep gets a record per point and, at the end, a comparison of all. A file in that
folder says that the sweep is to stop: what trains is asked to, and what waits does not start. Nothing that goes wrong
with one point is raised, so the others go on.
Exit status: 0 all points trained or stopped on request, 1 some failed, 2 refused before anything started.
"""

import json
import math
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice, product
from pathlib import Path
from types import FrameType
from typing import IO

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from megalite.config import files
from megalite.config.arguments import flags
from megalite.config.compose import load_config, names_of
from megalite.config.overrides import PACKAGE, as_override, files_of, hydra_with, in_one_line, run_hydra
from megalite.config.schema import Config
from megalite.errors.problems import NO_VALUE, Problem, UserError, collect, refuse, to_stderr
from megalite.launch.environment import read_environment
from megalite.launch.process import PATIENCE, STOP_SIGNALS
from megalite.observe.readable import print_lines
from megalite.observe.report.page import COMPARISON, write_report
from megalite.optim.groups import with_known_groups
from megalite.train.history import read_metrics

MOST_NAMED = 4  # settings in the name of a folder
MOST_POINTS = 10_000  # of a grid
POINT = files.Kind("the record of a sweep's point", "point.json", rb'\{"words": \[')
STOP = files.Kind("the stop file of a sweep", "stop", rb"\.+\Z")
SWEEP = files.Kind("Hydra's record of a sweep", "multirun.yaml", rb"hydra:\n")


def sweep(arguments: Namespace) -> int:
    """Check what can be known, sweep, compare; UserError where the sweep is refused."""
    if (ranks := read_environment(os.environ).world_size) > 1:
        hint = "start it without torchrun or srun; sweep.nproc_per_node=N gives every point N ranks"
        raise UserError(Problem("--multirun", NO_VALUE, f"is started once, not on each of {ranks} ranks", hint))
    words = arguments.overrides
    parse, several = OverridesParser.create().parse_override, list[str]()
    for word in words:
        with suppress(HydraException):  # which the check tells
            several += [word] if parse(word).is_sweep_override() else []
    folder, swept = _checked(arguments, [word for word in words if word not in several]), names_of(several)
    own = [f"hydra.sweep.dir={as_override(str(folder))}"]
    if 0 < len(swept) <= MOST_NAMED and "hydra.sweep.subdir" not in names_of(words):
        own += ["hydra.sweep.subdir=${hydra.job.override_dirname}"]
        own += [f"hydra.job.config.override_dirname.exclude_keys=[{','.join(sorted(names_of(words) - swept))}]"]
    train = partial(train_point, flags=flags(arguments))
    with files.private_files(), _stop_file(folder):
        return max(run_hydra([*words, *own, "--multirun"], train, files_of(arguments)), _report(folder))


def _checked(arguments: Namespace, fixed: list[str]) -> Path:
    """Hydra's folder of this sweep; UserError for a point that would be refused, or two in one folder."""
    chosen = files_of(arguments)
    try:
        with hydra_with(chosen):
            found = hydra.compose(chosen.name, fixed, return_hydra_config=True)
            basic = found.hydra.sweeper._target_.endswith(".BasicSweeper")  # whose points are known beforehand
            points = points_of(arguments.overrides, GlobalHydra.instance().config_loader()) if basic else [fixed]
    except (HydraException, OmegaConfBaseException) as error:
        _load(arguments, 1, fixed)  # says it better, where it is a setting
        hint = "name one of these, or install its package (docs/sweeps.md)"
        raise UserError(Problem("--multirun", NO_VALUE, in_one_line(error), hint)) from error
    problems = list[Problem]()
    configs = [collect(partial(_load, arguments, _ranks(found), point), problems) for point in points]
    problems = [each for at, each in enumerate(problems) if each not in problems[:at]]
    counted = Counter(config.run_dir for config in configs if config)
    hint = "sweep what defines the training, or name folders by what differs: run_dir='runs/s${train.steps}'"
    rule = "several points would train in the same folder"
    problems += [Problem("run_dir", place, rule, hint) for place, count in counted.items() if count > 1]
    if not basic and configs[0] and configs[0].train.eval_interval == 0:
        rule, hint = "without evaluations there is no validation loss to choose by", "train.eval_interval=100"
        problems.append(Problem("train.eval_interval", 0, rule, hint))
    refuse(problems)
    return Path(found.hydra.sweep.dir).absolute()


def points_of(words: Sequence[str], loader: ConfigLoader | None = None) -> list[list[str]]:
    """The overrides of each point of the basic sweeper, in its order. `loader` knows the choices of `model=glob(*)`."""
    choices = []
    for override in OverridesParser.create(loader).parse_overrides([*words]):
        found = override.sweep_string_iterator() if override.is_sweep_override() else []
        values = islice(found, MOST_POINTS + 1)  # a range may have billions
        choices.append([f"{override.get_key_element()}={value}" for value in values] or [override.input_line or ""])
    if math.prod(map(len, choices)) > MOST_POINTS:
        rule, hint = f"a grid of more than {MOST_POINTS:,} points", "fewer values, or a sweeper that chooses"
        raise UserError(Problem("--multirun", NO_VALUE, rule, hint))
    return [list(point) for point in product(*choices)]


def _load(arguments: Namespace, ranks: int, words: Sequence[str]) -> Config:
    """The config of a point, which Hydra's own settings do not concern."""
    own = [word for word in words if "hydra" not in word.partition("=")[0]]
    return with_known_groups(load_config([*flags(arguments), *own], ranks))


def _ranks(config: DictConfig) -> int:
    """The ranks of a point; what is no number from 1 is refused with the rest."""
    count = config.sweep.nproc_per_node if "sweep" in config else 1
    return count if isinstance(count, int) and count > 1 else 1


@contextmanager
def _stop_file(folder: Path) -> Iterator[None]:
    """Meanwhile a signal that asks to stop only writes a byte to a file, which each point sees wherever it runs. What
    an earlier sweep has left in the folder goes; UserError where others have files of these names."""
    stop = folder / STOP.usual

    def ask(number: int, frame: FrameType | None) -> None:
        with stop.open("ab") as file:
            file.write(b".")

    with files.refusing(folder, "another hydra.sweep.dir"):
        folder.mkdir(parents=True, exist_ok=True)
        left = {stop: STOP, **dict.fromkeys(folder.rglob(POINT.usual), POINT)}
        places = left | {folder / kind.usual: kind for kind in (COMPARISON, SWEEP)}
        refuse([each for path, kind in places.items() for each in files.output_problems("hydra.sweep.dir", path, kind)])
        for path in left:
            path.unlink(missing_ok=True)
    heard = signal.set_wakeup_fd(-1)  # the thread of StopSignals would end this process while points save
    before = {number: signal.signal(number, ask) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        signal.set_wakeup_fd(heard, warn_on_full_buffer=False)
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(folder: Path) -> int:
    """Says what became of the points and draws a page that compares them; the exit status."""
    lines, trained, found = list[str](), list[Path](), set[str]()
    for path in sorted(folder.rglob(POINT.usual), key=lambda path: (len(str(path)), path)):
        record = files.read_object(path)
        loss = "" if record["val_loss"] is None else f", validation loss {record['val_loss']:.4f}"
        lines.append(f"{path.parent.relative_to(folder)}: {record['status']}{loss}; {record['run_dir']}")
        found.add(record["status"])
        if record["run_dir"] and Path(record["run_dir"], "metrics.jsonl").is_file():
            trained.append(Path(record["run_dir"]))
    if trained:
        lines.append(f"comparison: {write_report(trained, folder / COMPARISON.usual, COMPARISON)}")
    if "stopped" in found:
        lines.append("stopped; the same command continues")
    print_lines(lines)
    return int("failed" in found)


def train_point(config: DictConfig, flags: Sequence[str]) -> float:
    """Train what Hydra composed by these flags; the final validation loss, NaN where there is none."""
    job = HydraConfig.get()
    words, ranks = [*flags, *job.overrides.task], _ranks(config)
    folder, stop = Path(job.runtime.output_dir), Path(job.runtime.cwd, job.sweep.dir, STOP.usual)
    alone = job.runtime.choices["hydra/launcher"] == "basic"  # else several points write at once
    launcher = PACKAGE.parent / "pretrain_gpt.py"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    program = [sys.executable, *torchrun, *([str(launcher)] if launcher.is_file() else ["-m", "megalite", "train"])]
    run_dir, status, loss = "", "stopped", None
    with files.private_files():
        try:
            run_dir = str(load_config(words, ranks).run_dir)
            if not stop.exists():
                with open(os.devnull, "a") if alone else files.open_to_append(folder / "output.log") as log:
                    failed = run_process([*program, *words], None if alone else log, stop)
                status = "stopped" if stop.exists() else "failed" if failed else "trained"
            if status == "trained":
                lines = read_metrics(Path(run_dir, "metrics.jsonl"))
                loss = next((line["val_loss"] for line in lines[::-1] if "val_loss" in line), None)
        except UserError as error:
            to_stderr(str(error))
            status = "failed"
        record = {"words": [*job.overrides.task], "run_dir": run_dir, "status": status, "val_loss": loss}
        files.write_atomically(folder / POINT.usual, json.dumps(record).encode(), POINT)
    return math.nan if loss is None else float(loss)


def run_process(command: list[str], output: IO[str] | None, stop: Path) -> int:
    """The status of a child, which is in a session of its own: a terminal's Ctrl-C reaches it through the stop file."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a launcher's worker, not the driver
        with suppress(ValueError):  # not its main thread, where signals do not come
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    while not stop.exists():
        with suppress(subprocess.TimeoutExpired):
            return child.wait(0.3)
    child.terminate()  # once: torchrun gives its ranks up at the second signal
    while stop.stat().st_size < PATIENCE:  # a dot for each signal: from then on nobody waits
        with suppress(subprocess.TimeoutExpired):
            return child.wait(0.3)
    os.killpg(child.pid, signal.SIGKILL)
    return child.wait()
