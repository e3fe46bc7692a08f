"""What finished runs say of scaling: read from their folders, and the law through them as lines, JSON and a picture.

The loss is the validation loss after the last step, or where a run has none, the training loss for all: a mean over
the last twentieth of the steps. Parameters N are those that a token meets (of experts the chosen ones), embeddings
included; tokens D are those trained on; compute C is the model FLOPs by which MFU is told.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import inf, log10
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megalite.config.files import RUN, read_object, refusing
from megalite.config.overrides import of_type
from megalite.config.rule import outside
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, with_values
from megalite.errors.problems import Problem, UserError, collect_all, refuse
from megalite.model.flops import active_parameters, flops_per_token
from megalite.observe.run_data import RunData, read_run
from megalite.observe.terminal import curve
from megalite.plan.chart import chart
from megalite.plan.picture import Picture
from megalite.plan.scaling_fit import LEVEL, Law, Point
from megalite.train.history import METRICS, read_metrics

LAST = 20  # part of the steps whose training losses are averaged
FURTHER = (1, 10, 100)  # times the largest compute, of which the law is told
DRAWN = 60  # points of the law's curve
SAME = {
    "data_fingerprint": "data or tokenizer",
    "model.vocab_size": "vocabulary",
    "train.seq_length": "sequence length",
}


def points_of(folders: Sequence[Path]) -> tuple[list[Point], str]:
    """What the runs say, and the words for their loss. UserError with all that keeps them from being compared."""
    runs = collect_all(_finished, folders)
    labels = [read_object(run.folder / RUN) for run in runs]
    problems, seen = list[Problem](), dict[Any, Path]()
    facts = [
        {name: label.get(name, run.config.get(name)) for name in SAME} for run, label in zip(runs, labels, strict=True)
    ]
    for run, label, its in zip(runs, labels, facts, strict=True):
        identity = label.get("run_id") or run.folder.resolve()
        first = seen.setdefault(identity, run.folder)
        if first is not run.folder:
            problems.append(Problem("RUN", str(run.folder), f"is the same run as {first}", "each run once"))
        for name, words in SAME.items():
            if its[name] != facts[0][name]:
                rule = (
                    f"{words} ({its[name]}) are not those of {runs[0].folder} ({facts[0][name]}): losses do not compare"
                )
                problems.append(Problem("RUN", str(run.folder), rule, f"runs of one {words}"))
                break
    refuse(problems)
    validated = all(run.evaluation.get("step") == run.step and "val_loss" in run.evaluation for run in runs)
    points = collect_all(lambda run: _point(run, validated), runs)
    return points, "validation loss after the last step" if validated else f"training loss, mean of the last 1/{LAST}"


def _finished(folder: Path) -> RunData:
    run = read_run(folder)
    if run.end is None or run.end["kind"] != "finished" or not run.last.get("tokens"):
        rule = f"is not finished: it has done {run.step:,} of {run.steps:,} steps"
        raise UserError(Problem("RUN", str(folder), rule, "its own command goes on with it; or leave it out"))
    return run


def _point(run: RunData, validated: bool) -> Point:
    loss = run.evaluation["val_loss"] if validated else _training_loss(run)
    if not 0 < loss < inf:
        rule = f"its loss is {loss}: no law goes through that"
        raise UserError(Problem("RUN", str(run.folder), rule, "leave it out"))
    names = [name for name in SETTINGS if name.startswith("model.") and name in run.config]
    place, length = run.folder / "config.yaml", "train.seq_length"
    with refusing(place):
        values = {name: of_type(SETTINGS[name], run.config[name]) for name in [*names, length]}
        refuse(
            [wrong for name, value in values.items() if value is not None and (wrong := outside(SETTINGS[name], value))]
        )
        config = with_values(Config(), values)
        if None in (config.model.vocab_size, config.model.head_size, config.model.num_key_value_heads):
            raise ValueError("does not hold all sizes of a model")
        parameters = active_parameters(config.model)
        flops = flops_per_token(config.model, config.train.seq_length, causal=False)
    tokens = run.last["tokens"]
    return Point(run.folder, parameters, tokens, flops * tokens, loss)


def _training_loss(run: RunData) -> float:
    lines = [line for line in read_metrics(run.folder / METRICS) if "loss" in line]
    return fmean(line["loss"] for line in lines if line["step"] > lines[-1]["step"] * (1 - 1 / LAST))


def law_lines(points: Sequence[Point], law: Law, remarks: Sequence[str], measured: str, drawn: bool) -> Iterator[str]:
    """The runs beside the law, what the law says, and `drawn`, its curve."""
    width = max(len(str(point.run)) for point in points)
    yield f"loss: {measured}; N: parameters that a token meets, embeddings included; C: model FLOPs"
    yield ""
    yield f"{'run':{width}}{'N':>12}{'tokens D':>12}{'C':>12}{'loss':>10}{'law':>10}{'off':>9}"
    for point in points:
        said = law.of_point(point)
        amounts = "".join(f"{amount:>12.3e}" for amount in (point.parameters, point.tokens, point.compute))
        yield f"{point.run!s:{width}}{amounts}{point.loss:>10.4f}{said:>10.4f}{point.loss / said - 1:>+9.2%}"
    yield ""
    yield f"L = {law}; deviation of a run {law.deviation:.2%}; intervals hold together in {LEVEL:.0%} of cases"
    for name, (value, interval) in law.known.items():
        words = {"N": "N of least loss goes as C^", "L": "the least loss nears E as C^-"}.get(name, f"{name} = ")
        yield f"  {words}{value:.3f}, interval {_span(interval)}"
    yield from (f"  {remark}" for remark in remarks)
    yield from ("", *_further(points, law))
    if drawn:
        yield from ("", "the law as a line, runs as ●, over log10 of C")
        ours = [(log10(point.compute), point.loss) for point in points]
        yield from curve(np.array(_curve(points, law)), np.array(ours))


def _further(points: Sequence[Point], law: Law) -> Iterator[str]:
    """What the law says of compute that runs have not had."""
    optimal = law.optimum(1.0) is not None
    largest = max(point.compute for point in points)
    told = f"{'best N':>12}{'best D':>12}{'D / N':>10}" if optimal else ""
    yield f"{'C':>12}{told}{'loss':>10}"
    for times in FURTHER:
        compute, cells = times * largest, ""
        if found := law.optimum(compute):
            cells = f"{found[0]:>12.3e}{found[1]:>12.3e}{found[1] / found[0]:>10.1f}"
        yield f"{compute:>12.3e}{cells}{law.at(compute):>10.4f}"


def _span(interval: tuple[float, float]) -> str:
    low, high = (f"{end:.3f}" if 0 < end < inf else "" for end in interval)
    return f"{low} to {high}" if low and high else f"from {low}" if low else f"up to {high}" if high else "not told"


def _curve(points: Sequence[Point], law: Law) -> list[tuple[float, float]]:
    computes = [point.compute for point in points]
    grid = np.geomspace(min(computes), FURTHER[1] * max(computes), DRAWN)
    return [(log10(compute), law.at(compute)) for compute in grid.tolist()]


def law_picture(points: Sequence[Point], law: Law) -> Picture:
    """The loss over the compute: runs, and the law up to 10 times the largest."""
    dots = [(log10(point.compute), point.loss) for point in points]
    return chart(
        f"L = {law}",
        [("the law, at the best N and D" if law.of != ("C",) else "the law", _curve(points, law))],
        "log10 of the FLOPs",
        ("runs", dots),
    )


def as_json(points: Sequence[Point], law: Law, remarks: Sequence[str], measured: str) -> dict[str, Any]:
    """The same for programs. An end of an interval that is open is null."""
    largest = max(point.compute for point in points)
    found: dict[str, Any] = {"loss": measured, "law": str(law), "E": law.floor, "factors": law.factors}
    found |= {"exponents": dict(zip(law.of, law.exponents, strict=True)), "deviation": law.deviation, "level": LEVEL}
    found["known"] = {
        name: {"value": value, "interval": [end if 0 < end < inf else None for end in interval]}
        for name, (value, interval) in law.known.items()
    }
    found["runs"] = [{**asdict(point), "run": str(point.run), "law": law.of_point(point)} for point in points]
    found["further"] = [
        {"compute": times * largest, "loss": law.at(times * largest), "N and D": law.optimum(times * largest)}
        for times in FURTHER
    ]
    return found | {"remarks": list(remarks)}
