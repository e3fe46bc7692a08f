"""`megalite coordinates`: whether activations keep their size as a model grows, with muP and without it."""

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import gcd, inf, isfinite, isnan, nan
from typing import TYPE_CHECKING

import numpy as np

from megalite.commands.command import COUNT, PICTURE, Shown, command, option
from megalite.config.compose import load_config, names_of
from megalite.config.numbers import whole_number
from megalite.config.schema import Config
from megalite.config.settings import value_of, yaml_value
from megalite.config.step_plan import HORIZONS
from megalite.errors.problems import Problem, UserError, refuse, several, to_stderr
from megalite.observe.terminal import curve
from megalite.optim.groups import with_known_groups
from megalite.plan.chart import chart
from megalite.plan.picture import Picture

if TYPE_CHECKING:
    from megalite.verify.coordinates import Measured

WIDTH, BASE, LAYERS = "model.hidden_size", "model.mup_base_width", "model.mup_base_layers"
WIDTHS, MOST_WIDTHS, WIDEST = "64,128,256,512", 16, 10**7
FLAT = 0.2  # the largest power that is called flat
GROWING = tuple(
    f"model.{name}" for name in ("num_attention_heads", "num_key_value_heads", "ffn_hidden_size", "moe.ffn_hidden_size")
)
USUAL = {  # unless the command says otherwise
    "lr.schedule": "constant",
    "lr.warmup_steps": 0,
    "train.seq_length": 128,
    "train.global_batch_size": 4,
}
WITH, WITHOUT = "with muP", "without"
Found = Mapping[str, "Measured"]


@command(
    option("--widths", default=WIDTHS, metavar="W,W", help=f"values of {WIDTH} (default: %(default)s)"),
    option("--steps", default=10, help="steps of each training (default: %(default)s)", **COUNT),
    PICTURE,
)
def coordinates(options: Namespace, overrides: list[str]) -> Shown:
    """Trains a model at several widths for a few steps, with muP and without it, and shows how activations grow.

    python -m megalite coordinates --picture coordinates.svg
    python -m megalite coordinates model=tiny_moe optimizer=muon --widths 64,128,256

    The table has the mean absolute activation of the embedding, of each block's output and of the logits after the last
    step, and the power of the width with which it grows: near 0 with muP, whose base is model.mup_base_width, or else
    the smallest width. Heads grow with the width. The default takes about a minute on two cores. Exit status 1: some
    activations do not keep their size with muP either.
    """
    widths = _widths(options.widths)
    plans = {way: _plan(widths, options.steps, overrides, scaled=way == WITH) for way in (WITH, WITHOUT)}
    from megalite.verify.coordinates import measure

    found = {way: measure(plan, partial(_tell, way)) for way, plan in plans.items()}
    flat = _worst(found[WITH])[0] <= FLAT
    return Shown(_lines(found, options.steps), int(not flat), lambda: _picture(found, options.steps))


def _tell(way: str, width: int) -> None:
    to_stderr(f"{way}: training {WIDTH}={width}")


def _widths(text: str) -> list[int]:
    """The widths, ascending."""
    parts = text.split(",")
    widths = set[int]()
    with suppress(ValueError):
        widths = {whole_number(part) for part in parts}
    if not 2 <= len(widths) == len(parts) <= MOST_WIDTHS or min(widths) < 1 or max(widths) > WIDEST:
        rule = f"must be 2 to {MOST_WIDTHS} different widths with commas between them"
        raise UserError(Problem("--widths", text, rule, f"--widths {WIDTHS}"))
    return sorted(widths)


def _plan(widths: Sequence[int], steps: int, overrides: Sequence[str], *, scaled: bool) -> dict[int, Config]:
    """The trainings by width. Heads grow along, and MLPs whose width is given."""
    usual = [f"{name}={value}" for name, value in USUAL.items() if name not in names_of(overrides)]
    asked = load_config([*overrides, *usual], 1)
    if (weights := asked.checkpoint.init_from) is not None:
        rule = "its weights have one width, and are no start values"
        raise UserError(Problem("checkpoint.init_from", weights, rule, "leave it out"))
    base, layers = (value_of(asked, BASE) or widths[0], value_of(asked, LAYERS)) if scaled else (None, None)
    shape = asked.model
    growing = {name: value_of(asked, name) for name in GROWING if name not in asked.derived}
    growing = {name: size for name, size in growing.items() if size is not None}
    problems, plan = list[Problem](), dict[int, Config]()
    for width in widths:
        uneven = next((name for name, size in growing.items() if size * width % shape.hidden_size), None)
        if uneven is not None:
            rule = f"{uneven}={growing[uneven]} of {shape.hidden_size} is no whole number there"
            problems.append(
                Problem(
                    "--widths",
                    width,
                    rule,
                    f"multiples of {shape.hidden_size // gcd(shape.hidden_size, growing[uneven])}",
                )
            )
            continue
        sizes = {name: size * width // shape.hidden_size for name, size in growing.items()}
        sizes |= {WIDTH: width, BASE: base, LAYERS: layers, "train.steps": steps}
        kept = [word for word in overrides if names_of([word]).isdisjoint({*sizes, *HORIZONS})]
        words = [*kept, *usual, *(f"{name}={yaml_value(value)}" for name, value in sizes.items())]
        plan[width] = with_known_groups(load_config(words, 1))
    refuse(problems)
    return plan


def _lines(found: Found, steps: int) -> Iterator[str]:
    """The table, the curve of the logits, and what it means."""
    widths = [*found[WITH].after]
    yield f"mean absolute activations after {several(steps, 'step')}, by {WIDTH}"
    yield ""
    yield f"{'':14}{''.join(f'{width:>10}' for width in widths)}{'power of the width':>22}"
    for way, measured in found.items():
        yield way
        for place in measured.places:
            sizes = "".join(f"{sizes[place]:>10.4g}" for sizes in measured.after.values())
            yield f"  {place:12}{sizes}{measured.power(place):>+22.2f}"
    if (sys.stdout.encoding or "utf-8").lower().startswith("utf"):
        without, scaled = (
            [(width, sizes["logits"]) for width, sizes in found[way].after.items()] for way in (WITHOUT, WITH)
        )
        yield from ("", f"logits over the width: {WITHOUT} muP as a line, with it as ●")
        yield from curve(np.array(without), np.array(scaled))
    yield ""
    for way, measured in found.items():
        excess, place = _worst(measured)
        kept = "activations keep their size" if excess <= FLAT else "activations do not keep their size"
        shown = f"go as width^{measured.power(place):+.2f}" if isfinite(excess) else "are 0 or not finite"
        yield f"{way}: {kept}; the steepest, {place}, {shown}"


def _worst(measured: "Measured") -> tuple[float, str]:
    """The place whose activations keep their size least, and by what power. Logits may shrink: they start as a random
    sum, smaller with the width, and few steps leave them so."""
    powers = {place: measured.power(place) for place in measured.places}
    excess = {place: power if place == "logits" else abs(power) for place, power in powers.items()}
    return max((inf if isnan(power) else power, place) for place, power in excess.items())


def _picture(found: Found, steps: int) -> Picture:
    """How many times as large as at the smallest width the activations are."""
    curves = dict[str, list[tuple[float, float]]]()
    for way, measured in found.items():
        first = next(iter(measured.after.values()))
        shown = [place for place in measured.places if place in ("embedding", measured.places[-2], "logits")]
        for place in shown:
            curves[f"{place}, {way}"] = [
                (width, sizes[place] / (first[place] or nan)) for width, sizes in measured.after.items()
            ]
    title = f"mean absolute activations after {several(steps, 'step')}, over those of the smallest width"
    return chart(title, [*curves.items()], WIDTH)
