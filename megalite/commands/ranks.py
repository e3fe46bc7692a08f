"""Who talks to whom: every group of ranks of a layout, as tables, JSON or a picture, and the layers of each stage.

python scripts/rank_generator.py --world-size 16 parallel.tp=4 parallel.pp=2
python scripts/rank_generator.py --world-size 16 parallel.tp=4 parallel.pp=2 parallel.ep=4 parallel.etp=1 --json
python scripts/rank_generator.py --world-size 64 parallel.tp=8 parallel.pp=4 --picture ranks.svg --gpus-per-node 8
python scripts/rank_generator.py --world-size 8 parallel.pp=4 model.num_layers=12

OVERRIDES are those of pretrain_gpt.py. Sizes that training does not offer yet can be looked at, too.
The stages are shown where an override names the model or its layers.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megalite.config.case import Case
from megalite.config.parallel_rules import (
    STAGE_NAMES,
    layers_split_over_stages,
    layout_of_case,
    stages_of_case,
    world_splits_into_the_layout,
)
from megalite.config.part import load_values, names_of
from megalite.config.remedies import problems_of
from megalite.config.schema import Config
from megalite.errors.problems import NO_VALUE, REFUSED, Problem, UserError, collect
from megalite.layout.flaws import Flaw
from megalite.layout.layout_rules import layout_of
from megalite.layout.ranks import ParallelLayout
from megalite.layout.stage_rules import StageSettings
from megalite.layout.stages import StageLayers, stage_layers
from megalite.observe.screens import print_lines
from megalite.plan.drawing import picture_problems, save_picture
from megalite.plan.ranks_picture import figure_of
from megalite.plan.ranks_table import json_lines, stage_lines, table_lines

MOST_RANKS = 1 << 20  # lists of more would fill the memory before anybody reads them
AXES = tuple(f"parallel.{field}" for field in ("tp", "cp", "pp", "vpp", "ep", "etp", "order"))
READ = tuple(dict.fromkeys((*AXES, *STAGE_NAMES.values())))
LABELS = {"world_size": "--world-size", "dp": "--dp", "split_rank": "--pp-split-rank"}
STAGE_FIELDS = {**STAGE_NAMES, "split_rank": LABELS["split_rank"]}
EXPERTS = {"parallel.ep", "parallel.etp"}
LAYERS = {"model", "model.num_layers", "experiment"}


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """This command's options, and the words for the launcher."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s --world-size N [--dp N] [--experts] [--pp-split-rank N]\n"
        "       [--json] [--picture FILE] [--gpus-per-node N] [OVERRIDES ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--world-size", "--world_size", required=True, help="number of ranks", **number)
    parser.add_argument("--dp", help="data-parallel size that must remain (default: whatever does)", **number)
    parser.add_argument("--experts", action="store_true", help="a mixture of experts even without parallel.ep and etp")
    parser.add_argument("--pp-split-rank", help="pipeline rank where a decoder begins, after an encoder", **number)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the groups, to a .png or .svg file")
    parser.add_argument("--gpus-per-node", default=8, help="ranks of a node in the picture (default: 8)", **number)
    return parser.parse_known_args(arguments)


def read(options: argparse.Namespace, overrides: Sequence[str]) -> tuple[ParallelLayout, tuple[StageLayers, ...]]:
    """The layout, and its stages where layers are to be placed; a UserError with everything that stands against it."""
    problems = [] if options.picture is None else picture_problems(options.picture, "--picture")
    for option in ("--world-size", "--gpus-per-node", "--dp"):
        given = getattr(options, option[2:].replace("-", "_"))
        if given is not None and given < 1:
            problems.append(Problem(option, given, "must be at least 1", f"{option}=8"))
    if options.world_size > MOST_RANKS:
        rule = "too many ranks to list"
        problems.append(Problem("--world-size", options.world_size, rule, f"--world-size={MOST_RANKS} at most"))
    config = collect(lambda: load_values(overrides, READ), problems)
    if config is None or problems:
        raise UserError(problems)
    return _laid_out(options, config, names_of(overrides))


def _laid_out(
    options: argparse.Namespace, config: Config, named: frozenset[str]
) -> tuple[ParallelLayout, tuple[StageLayers, ...]]:
    experts = options.experts or bool(EXPERTS & named)
    case = Case(config, options.world_size, options.dp, experts, options.pp_split_rank, LABELS)
    places_layers = bool(LAYERS & named)
    rules = (world_can_be_listed, world_splits_into_the_layout, *([layers_split_over_stages] * places_layers))
    problems = problems_of(case, rules)
    if not places_layers:
        problems += _needs_layers(stages_of_case(case))
    if problems:
        raise UserError(problems)
    return layout_of(layout_of_case(case)), stage_layers(stages_of_case(case)) if places_layers else ()


def world_can_be_listed(case: Case) -> Iterator[Flaw]:
    """No world is advised that is refused."""
    if case.world_size > MOST_RANKS:
        yield Flaw("world_size", "many", "too many ranks to list", ("world_size",))


def _needs_layers(settings: StageSettings) -> list[Problem]:
    others = [field for field in STAGE_FIELDS if field not in ("num_layers", "pp", "vpp")]
    asked = [STAGE_FIELDS[field] for field in others if settings.asks_for(field)]
    rule = f"is needed by {' and '.join(asked)}"
    return [Problem("model.num_layers", NO_VALUE, rule, "model.num_layers=12, or model=NAME")] if asked else []


def main(arguments: Sequence[str] | None = None) -> int:
    options, overrides = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        layout, stages = read(options, overrides)
        if options.picture is not None:
            save_picture(lambda: figure_of(layout, options.gpus_per_node), options.picture, "--picture")
    except UserError as error:
        print(error, file=sys.stderr)
        return REFUSED
    if options.json:
        print_lines(json_lines(layout, stages or None))
        return 0
    print_lines(table_lines(layout, shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120))
    if stages:
        print_lines(["", *stage_lines(stages)])
    if options.picture is not None:
        print_lines(["", f"picture: {options.picture}"])
    return 0
