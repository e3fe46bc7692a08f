"""Who talks to whom: every group of ranks of a layout, as tables, JSON or a picture, and the layers of each stage.

python scripts/rank_generator.py --world-size 16 parallel.tp=4 parallel.pp=2
python scripts/rank_generator.py --world-size 16 parallel.tp=4 parallel.pp=2 parallel.ep=4 parallel.etp=1 --json
python scripts/rank_generator.py --world-size 64 parallel.tp=8 parallel.pp=4 --picture ranks.svg --gpus-per-node 8
python scripts/rank_generator.py --world-size 8 parallel.pp=4 model.num_layers=12

OVERRIDES are those of pretrain_gpt.py. Sizes that training does not offer yet can be looked at, too.
The stages are shown where an override names the model or its layers.
"""

import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from megalite.commands.command import PICTURE, Shown, command, option
from megalite.config.compose import load_values, names_of
from megalite.config.parallel_rules import (
    LAYOUT_RULES,
    STAGE_NAMES,
    STAGE_RULES,
    dense_ranks,
    layout_of,
    stage_settings,
)
from megalite.config.remedies import Case, Flaw, problems_of
from megalite.errors.problems import NO_VALUE, Problem, UserError, collect
from megalite.layout.ranks import ParallelLayout
from megalite.layout.stages import StageLayers, stage_layers
from megalite.plan.ranks_picture import figure_of
from megalite.plan.ranks_table import json_lines, stage_lines, table_lines

MOST_RANKS = 1 << 20  # lists of more would fill the memory before anybody reads them
LABELS = {"world_size": "--world-size", "split_rank": "--pp-split-rank"}
AXES = tuple(f"parallel.{axis}" for axis in ("tp", "cp", "pp", "vpp", "ep", "etp", "order"))
STAGE_LABELS = {**STAGE_NAMES, "split_rank": LABELS["split_rank"]}
NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}


@command(
    option("--world-size", "--world_size", required=True, help="number of ranks", **NUMBER),
    option("--dp", help="data-parallel size that must remain (default: whatever does)", **NUMBER),
    option("--experts", action="store_true", help="a mixture of experts even without parallel.ep and etp"),
    option("--pp-split-rank", help="pipeline rank where a decoder begins, after an encoder", **NUMBER),
    option("--json", action="store_true", help="one JSON object instead of tables"),
    PICTURE,
    option("--gpus-per-node", default=8, help="ranks of a node in the picture (default: 8)", **NUMBER),
)
def main(options: Namespace, overrides: list[str]) -> Shown:
    layout, stages = lay_out(options, overrides)
    if options.json:
        lines = [*json_lines(layout, stages)]
    else:
        lines = [*table_lines(layout, shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120)]
        lines += ["", *stage_lines(stages)] if stages else []
    return Shown(lines, draw=lambda: figure_of(layout, options.gpus_per_node))


def lay_out(options: Namespace, overrides: Sequence[str]) -> tuple[ParallelLayout, tuple[StageLayers, ...]]:
    """The layout, and its stages where layers are to be placed; a UserError with everything that stands against it."""
    given = {"--world-size": options.world_size, "--gpus-per-node": options.gpus_per_node, "--dp": options.dp}
    problems = [
        Problem(name, value, "must be at least 1", f"{name}=8")
        for name, value in given.items()
        if value is not None and value < 1
    ]
    if options.world_size > MOST_RANKS:
        rule, remedy = "too many ranks to list", f"--world-size={MOST_RANKS} at most"
        problems.append(Problem("--world-size", options.world_size, rule, remedy))
    reads = tuple(dict.fromkeys((*AXES, *STAGE_NAMES.values())))
    config = collect(lambda: load_values(overrides, reads), problems)
    if config is None or problems:
        raise UserError(problems)
    named = names_of(overrides)
    places_layers = not named.isdisjoint(("model", "model.num_layers", "experiment"))
    experts = options.experts or not named.isdisjoint(("parallel.ep", "parallel.etp"))
    case = Case(config, options.world_size, experts, options.pp_split_rank, LABELS)
    settings = stage_settings(config, options.pp_split_rank)
    problems = problems_of(case, (world_can_be_listed, *LAYOUT_RULES, *(STAGE_RULES if places_layers else ())))
    dp, rest = divmod(options.world_size, dense_ranks(config))
    if options.dp not in (None, dp) and not rest:
        remedy = f"--dp={dp}, or --world-size={options.dp * dense_ranks(config)}"
        problems.append(Problem("--dp", options.dp, f"the layout leaves {dp} of the world", remedy))
    if not places_layers and (asked := [STAGE_LABELS[name] for name in settings.asked() if name != "vpp"]):
        rule, remedy = f"is needed by {' and '.join(asked)}", "model.num_layers=12, or model=NAME"
        problems.append(Problem("model.num_layers", NO_VALUE, rule, remedy))
    if problems:
        raise UserError(problems)
    return layout_of(case), stage_layers(settings) if places_layers else ()


def world_can_be_listed(case: Case) -> Iterator[Flaw]:
    """No world is advised that is refused."""
    if case.world_size > MOST_RANKS:
        yield Flaw("world_size", "too many ranks to list", {"world_size": [MOST_RANKS]})
