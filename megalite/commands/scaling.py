"""`megalite scaling plan` and `scaling fit`: small trainings from one dial, and the law that their losses follow."""

import json
import os
import shlex
import shutil
import sys
from argparse import Namespace
from contextlib import suppress
from fractions import Fraction
from math import ceil, gcd
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from megalite.commands.command import COUNT, WORLD_SIZE, Shown, command, option
from megalite.config.arguments import number_from
from megalite.config.compose import load_config, names_of
from megalite.config.derive import derive_vocabulary
from megalite.config.files import absolute, draft_of, refusing, sync_folder, write_new
from megalite.config.numbers import whole_number
from megalite.config.schema import MOST_STEPS, Config
from megalite.config.settings import DERIVED, OPEN, as_plain, value_of, yaml_value
from megalite.config.step_plan import HORIZONS, samples_after, steps_to
from megalite.errors.problems import NO_VALUE, Problem, UserError, collect, refuse
from megalite.model.flops import active_parameters, flops_per_token
from megalite.observe.scaling import as_json, law_lines, law_picture, points_of
from megalite.optim.groups import with_known_groups
from megalite.plan.scaling_fit import fit as fitted
from megalite.verify.shrink import vocabulary_of

DEPTHS = (2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91)  # each about sqrt(2) times the one before
WIDTH, LAYERS, HORIZON = "model.hidden_size", "model.num_layers", "train.tokens_per_parameter"
HEADS, SHARED = "model.num_attention_heads", "model.num_key_value_heads"
INNER = ("model.ffn_hidden_size", "model.moe.ffn_hidden_size")
PLACE = "name a new folder, where you may write: --out FOLDER"
DECIDED = {  # by the plan
    **dict.fromkeys((LAYERS, WIDTH), "--sizes and --width-per-layer"),
    **dict.fromkeys(HORIZONS, "--tokens-per-parameter"),
    **dict.fromkeys(("run_dir", "run_name"), "--out"),
}
SCRIPT = """\
#!/usr/bin/env bash
# Trains the sizes one after the other, from the folder where they were planned. Words of the command line are overrides
# for all of them. LAUNCH="torchrun --standalone --nproc-per-node 8" starts each on 8 processes. The same command
# continues: what is finished is passed over.
set -euo pipefail
for size in {sizes}; do
    ${{LAUNCH:-python}} -m megalite train --config-dir {folder} --config-name "$size" run_dir={folder}/"$size" "$@"
done
"""


@command(
    option("--sizes", default="5", metavar="N", help="how many sizes, or their layers: 2,4,8 (default: %(default)s)"),
    option("--width-per-layer", default=64, help=f"{WIDTH} by layers (default: %(default)s)", **COUNT),
    option(
        "--tokens-per-parameter",
        type=number_from(0, 10**9, above=True, whole=False),
        default=20.0,
        metavar="T",
        help=f"{HORIZON} (default: %(default)g)",
    ),
    option("--out", type=Path, default=Path("scaling"), metavar="FOLDER", help="new or empty (default: %(default)s)"),
    WORLD_SIZE,
)
def plan(options: Namespace, overrides: list[str]) -> Shown:
    """A sweep of sizes from one dial, the depth: a recipe for each in FOLDER, and FOLDER/train.sh, which trains them.

    python -m megalite scaling plan --sizes 5 --tokens-per-parameter 20 --out scaling data=tokens data.path=tokens/web
    bash scaling/train.sh
    python -m megalite scaling fit scaling/*/

    A model of n layers is 64 n wide (--width-per-layer), rounded up to a multiple of the width by key-value head of the
    model that OVERRIDES choose (model=NAME; of the default model 64). Heads, and inner widths of MLPs where they are
    given, grow with the width. N sizes are the first N of 2, 3, 4, 6, 8, 11, 16, ... layers. Rates are the same at all
    sizes unless OVERRIDES have model.mup_base_width (docs/mup.md).

    One size by itself: python pretrain_gpt.py --config-dir FOLDER --config-name d8 run_dir=FOLDER/d8
    Parameters are those that a token meets, embeddings included. A vocabulary that only the data would tell counts in
    the table as the usual one of its tokenizer.
    """
    world_size, folder = options.world_size or 1, options.out
    problems = list[Problem]()
    depths = collect(lambda: _depths(options.sizes), problems) or []
    named = names_of(overrides)
    for name in sorted(named & DECIDED.keys()):
        problems.append(Problem(name, NO_VALUE, f"{DECIDED[name]} decides that here", "leave it out"))
    if "checkpoint.init_from" in named:
        problems.append(Problem("checkpoint.init_from", NO_VALUE, "its weights have one size", "leave it out"))
    with refusing(folder, PLACE):
        if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
            problems.append(Problem("--out", str(folder), "it holds something, and is not replaced", PLACE))
    refuse(problems)
    asked, configs = load_config(overrides, world_size), dict[str, Config]()
    for depth in depths:
        words = _sizes(asked, depth, options.width_per_layer) | {HORIZON: options.tokens_per_parameter}
        given = [word for word in overrides if names_of([word]).isdisjoint({HEADS, SHARED, *INNER})]
        given += [f"{name}={yaml_value(value)}" for name, value in words.items()]
        loaded = collect(lambda given=given: with_known_groups(load_config(given, world_size)), problems)  # type: ignore[misc]
        configs[f"d{depth}"] = loaded or asked
    refuse([one for at, one in enumerate(problems) if one not in problems[:at]])
    lines = [_HEAD, *(_row(name, config) for name, config in configs.items())]
    _write(folder, configs)
    return Shown(
        [*lines, "", f"train them: bash {folder}/train.sh", f"then: python -m megalite scaling fit {folder}/*/"]
    )


def _depths(text: str) -> list[int]:
    """The layers of each size, ascending."""
    numbers = list[int]()
    with suppress(ValueError):
        numbers = [whole_number(part) for part in text.split(",")]
    if len(numbers) == 1 and 2 <= numbers[0] <= len(DEPTHS):
        return [*DEPTHS[: numbers[0]]]
    if not 2 <= len({*numbers}) == len(numbers) or min(numbers) < 1:
        rule = f"must be how many sizes there are, 2 to {len(DEPTHS)}, or their different numbers of layers"
        raise UserError(Problem("--sizes", text, rule, "--sizes 5, or --sizes 2,4,8"))
    return sorted(numbers)


def _sizes(asked: Config, depth: int, per_layer: int) -> dict[str, Any]:
    """The settings of a model of this depth, shaped like the one that was asked for."""
    shape, width = asked.model, asked.model.hidden_size
    heads, shared = shape.num_attention_heads, shape.num_key_value_heads
    common = gcd(heads, shared, width)
    unit = width // common
    hidden = -(-depth * per_layer // unit) * unit
    sizes: dict[str, Any] = {LAYERS: depth, WIDTH: hidden, HEADS: heads * hidden // width}
    sizes |= {} if SHARED in asked.derived else {SHARED: shared * hidden // width}
    for name in INNER:
        if name not in asked.derived and (inner := value_of(asked, name)) is not None:
            sizes[name] = max(1, round(inner * Fraction(hidden, width)))
    return sizes


_HEAD = f"{'':6}{'layers':>7}{'width':>7}{'heads':>7}{'parameters':>15}{'tokens':>18}{'steps':>11}{'FLOPs':>11}"


def _row(name: str, config: Config) -> str:
    """A size in the table; its steps are those of a run on data of that vocabulary."""
    model, train = derive_vocabulary(config, vocabulary_of(config)).model, config.train
    parameters = active_parameters(model)
    per_parameter = Fraction(str(train.tokens_per_parameter))
    steps = steps_to(train, ceil(per_parameter * parameters / train.seq_length))
    if steps > MOST_STEPS:
        rule = f"takes {steps:,} steps at {model.num_layers} layers, more than {MOST_STEPS:,}"
        raise UserError(Problem("--tokens-per-parameter", train.tokens_per_parameter, rule, "less, or larger batches"))
    tokens = samples_after(train, steps) * train.seq_length
    flops = flops_per_token(model, train.seq_length, causal=False) * tokens
    shape = f"{model.num_layers:>7}{model.hidden_size:>7}{model.num_attention_heads:>7}"
    return f"{name:6}{shape}{parameters:>15,}{tokens:>18,}{steps:>11,}{flops:>11.2e}"


def _write(folder: Path, configs: dict[str, Config]) -> None:
    """The folder with all of its files, or nothing."""
    place = Path(absolute(str(folder)))
    draft = draft_of(place)
    with refusing(folder, PLACE):
        draft.mkdir(parents=True)
        try:
            for name, config in configs.items():
                derived = [each for each in config.derived if value_of(config, each) not in OPEN]
                content = yaml.safe_dump(as_plain(config) | {DERIVED: derived}, sort_keys=False, allow_unicode=True)
                write_new(draft / f"{name}.yaml", content.encode())
            script = SCRIPT.format(sizes=" ".join(configs), folder=shlex.quote(str(folder)))
            write_new(draft / "train.sh", script.encode())
            os.replace(draft, place)
            sync_folder(place.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


@command(
    option("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a finished run"),
    option("--picture", "--out", type=Path, metavar="FILE", help="also draw the law and the runs, to an .svg file"),
    option("--json", action="store_true", help="one JSON object instead of tables"),
    overrides=False,
)
def fit(options: Namespace, overrides: list[str]) -> Shown:
    """Fits how the loss of finished runs falls with their size, and says what that means for larger ones.

    python -m megalite scaling fit scaling/*/ --out law.svg

    Where parameters N and tokens D vary apart (6 runs, 3 values of each): L = E + A / N^a + B / D^b, and the N and D of
    the least loss at a given compute. Else, as at one number of tokens per parameter: L = E + A / C^a over the compute
    C (4 amounts of it; 3: without E). Least squares of the relative deviations. The intervals of a law's exponents hold
    together in 98 of 100 cases; where an end is missing, the runs do not tell it.
    """
    points, measured = points_of(options.runs)
    law, remarks = fitted(points)
    if options.json:
        lines = iter([json.dumps(as_json(points, law, remarks, measured))])
    else:
        drawn = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
        lines = law_lines(points, law, remarks, measured, drawn)
    return Shown(lines, draw=lambda: law_picture(points, law))
