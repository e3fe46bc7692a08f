"""Who talks to whom: every group of ranks of a layout, as tables, JSON or a picture, and the layers of each stage.

python -m megalite plan ranks --world-size 16 --tp 4 --pp 2
python -m megalite plan ranks --world-size 16 parallel.tp=4 parallel.pp=2 parallel.ep=4 parallel.etp=1 --json
python -m megalite plan ranks --world-size 64 --tp 8 --pp 4 --picture ranks.svg --gpus-per-node 8
python -m megalite plan ranks --world-size 8 --pp 4 model.num_layers=12
python -m megalite plan ranks --world-size 8 --tp 2 --ep 4 --etp 1 model.moe.num_experts=8

scripts/rank_generator.py is the same. OVERRIDES are those of pretrain_gpt.py; `--tp 4` is `parallel.tp=4`. Sizes that
training does not offer yet can be looked at, too.
The stages are shown where an override names the model or its layers, and who holds which expert where it has some.
"""

import shutil
import sys
from argparse import Namespace

from megalite.commands.command import COUNT, PICTURE, RANKS, Shown, command, option
from megalite.config.compose import load_values, names_of
from megalite.config.layout import STAGE_NAMES, stage_settings
from megalite.config.parallel_rules import EXPERT_RULES, LAYOUT_RULES, STAGE_RULES, checked_layout
from megalite.config.rule import Case, problems_of
from megalite.errors.problems import NO_VALUE, Problem, refuse
from megalite.layout.ranks import header_lines
from megalite.layout.stages import stage_layers
from megalite.plan.ranks import groups_of, json_lines, ranks_picture, stage_lines, table_lines

LABELS = {"world_size": "--world-size", "split_rank": "--pp-split-rank"}
SIZES = ("tp", "cp", "pp", "vpp", "ep", "etp")
READ = {*(f"parallel.{axis}" for axis in (*SIZES, "order")), "model.moe.num_experts", *STAGE_NAMES.values()}


@command(
    option("--world-size", "--world_size", required=True, help="number of ranks", **RANKS),
    *(option(f"--{axis}", help=f"parallel.{axis}", **COUNT) for axis in SIZES),
    option("--experts", action="store_true", help="a mixture of experts even without parallel.ep and etp"),
    option("--pp-split-rank", help="pipeline rank where a decoder begins, after an encoder", **COUNT),
    option("--json", action="store_true", help="one JSON object instead of tables"),
    PICTURE,
    option("--gpus-per-node", default=8, help="ranks of a node in the picture (default: 8)", **COUNT),
)
def main(options: Namespace, overrides: list[str]) -> Shown:
    sizes = [f"parallel.{axis}={size}" for axis in SIZES if (size := getattr(options, axis)) is not None]
    named = names_of(overrides := [*overrides, *sizes])
    config = load_values(overrides, sorted(READ))
    places_layers = not named.isdisjoint(("model", "model.num_layers", "experiment"))
    has_experts = options.experts or not named.isdisjoint(("parallel.ep", "parallel.etp"))
    case = Case(config, options.world_size, has_experts, options.pp_split_rank, LABELS)
    problems = problems_of(case, (*LAYOUT_RULES, *EXPERT_RULES, *(STAGE_RULES if places_layers else ())))
    settings = stage_settings(config, options.pp_split_rank)
    if not places_layers and (asked := [name for name in settings.asked if name != "vpp"]):
        rule = f"is needed by {' and '.join({**STAGE_NAMES, **LABELS}[name] for name in asked)}"
        problems.append(Problem("model.num_layers", NO_VALUE, rule, "model.num_layers=12, or model=NAME"))
    refuse(problems)
    layout, experts = checked_layout(case), config.model.moe.num_experts
    groups, stages = groups_of(layout, experts), stage_layers(settings) if places_layers else ()
    width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120
    lines = [*header_lines(layout), *table_lines(groups, layout.world_size, width)]
    lines += ["", *stage_lines(stages)] if stages else []
    shown = json_lines(groups, stages) if options.json else lines
    return Shown(shown, draw=lambda: ranks_picture(layout, options.gpus_per_node, experts))
