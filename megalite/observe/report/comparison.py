"""Draws several runs on common axes, and the settings in which they differ: comparison.html."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megalite.observe import readable
from megalite.observe.report.charts import COLOURS, Chart, Line, line_chart
from megalite.observe.report.page import FIGURES, Figure, environment, layout_of, status_of
from megalite.observe.run_data import OVER_TOKENS, RunData, Series

UNREMARKABLE = ("run_dir", "run_name", "resume")
SIDE_BY_SIDE = 6  # names of more runs than that are cut: their values stand below each other in a tip
NAME_LENGTH = 12
COMPARED = ("loss", "val_loss", "val_bits_per_byte", "lr", "grad_norm", "tokens_per_s", "step_time_s", "mfu")


def compare(runs: Sequence[RunData]) -> str:
    """The whole page."""
    names = names_of(runs)
    chosen, derived = differences(runs)
    page = environment().get_template("comparison.html")
    return page.render(
        names=names,
        lines=[Line(name, (), at % COLOURS) for at, name in enumerate(names)],
        charts=list(_charts(runs, names)),
        summary=[(label, [cell(run) for run in runs]) for label, cell in SUMMARY],
        chosen=chosen,
        derived=derived,
    )


def names_of(runs: Sequence[RunData]) -> list[str]:
    """As much of each folder's path as tells the runs apart."""
    paths = [run.folder.absolute() for run in runs]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _charts(runs: Sequence[RunData], names: Sequence[str]) -> Iterator[tuple[str, Chart | None]]:
    """Charts with their titles, of the figures that any run has."""
    shown = names if len(names) <= SIDE_BY_SIDE else [each[-NAME_LENGTH:] for each in names]
    for name in COMPARED:
        if any(run.figures[name] for run in runs):
            yield FIGURES[name].title, _chart(FIGURES[name], shown, [run.figures[name] for run in runs], "step")
    paces = [pace for run in runs for pace in run.tokens_per_step]
    for name in OVER_TOKENS if paces and max(paces) > 1.001 * min(paces) else ():
        if any(run.over_tokens[name] for run in runs):
            title = f"{FIGURES[name].title} over tokens"
            yield title, _chart(FIGURES[name], shown, [run.over_tokens[name] for run in runs], "token")


def _chart(figure: Figure, names: Sequence[str], series: Sequence[Series], over: str) -> Chart | None:
    lines = [
        Line(name, each.buckets, at % COLOURS, figure.dots, figure.smooth)
        for at, (name, each) in enumerate(zip(names, series, strict=True))
    ]
    return line_chart(figure.title.lower(), lines, replace(figure.look, over=over))


SUMMARY: tuple[tuple[str, Callable[[RunData], str]], ...] = (
    ("status", lambda run: status_of(run, live=False)[0]),
    ("steps", lambda run: f"{run.step:,} of {run.steps:,}"),
    ("tokens", lambda run: _newest(run, "tokens", readable.rate)),
    ("training loss", lambda run: _newest(run, "loss", readable.loss)),
    ("best validation loss", lambda run: "-" if run.best is None else readable.loss(run.best[1])),
    ("at step", lambda run: "-" if run.best is None else f"{run.best[0]:,}"),
    ("tokens/s", lambda run: _newest(run, "mean_tokens_per_s", readable.rate)),
    ("tokens/s, newest", lambda run: _newest(run, "tokens_per_s", readable.rate)),
    ("MFU", lambda run: "-" if run.mfu is None else readable.percent(run.mfu)),
    ("time in training", lambda run: readable.duration(run.training_s)),
    ("peak memory, GiB", lambda run: readable.gibibytes(max(run.memory_gib, default=0.0))),
    ("bad steps", lambda run: f"{run.last.get('bad_steps', 0):,}"),
    ("ranks", lambda run: "-" if (layout := layout_of(run)) is None else f"{layout.world_size}"),
    ("megalite", lambda run: _version(run)),
    ("device", lambda run: str(run.start.get("device") or "-")),
)


def _newest(run: RunData, name: str, words: Callable[[float], str]) -> str:
    return words(float(run.last[name])) if name in run.last else "-"


def _version(run: RunData) -> str:
    versions = run.start.get("versions") or {}
    return " ".join(versions[name] for name in ("megalite", "commit") if name in versions) or "-"


Differences = list[tuple[str, list[str]]]  # setting, and its value in each run


def differences(runs: Sequence[RunData]) -> tuple[Differences, Differences]:
    """Settings that are not equal in all runs, chosen and derived ones; a dash where a run does not know one."""
    chosen, derived = Differences(), Differences()
    for name in dict.fromkeys(name for run in runs for name in run.config):
        values = [readable.setting(run.config[name]) if name in run.config else "-" for run in runs]
        if len(set(values)) > 1 and name not in UNREMARKABLE:
            follows = all(name in run.derived for run in runs if name in run.config)
            (derived if follows else chosen).append((name, values))
    return chosen, derived
