"""Who talks to whom: every group of ranks of a layout, as tables, JSON or a picture, and the layers of each stage.

python scripts/rank_generator.py --world-size 16 --tp 4 --pp 2
python scripts/rank_generator.py --world-size 16 --tp 4 --pp 2 --ep 4 --etp 1 --json
python scripts/rank_generator.py --world-size 64 --tp 8 --pp 4 --picture ranks.svg --gpus-per-node 8
python scripts/rank_generator.py --world-size 8 --pp 4 --num-layers 12 --standalone-embedding
"""

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.config.problems import REFUSED, Problem, UserError, collect
from megalite.parallel.layout import DEFAULT_ORDER, ParallelLayout
from megalite.parallel.layout_rules import LayoutRequest, layout_of, layout_problems, pipeline_sizes
from megalite.parallel.picture import picture_problems, save_picture
from megalite.parallel.remedies import is_whole
from megalite.parallel.stage_rules import StageSettings, broken_rules
from megalite.parallel.stages import StageLayers, stage_layers
from megalite.parallel.tables import json_lines, stage_lines, table_lines
from megalite.train.screens import print_lines

MOST_RANKS = 1 << 20  # lists of more would fill the memory before anybody reads them
MOST_DIGITS = 40  # of a number that is read at all
STAGE_FLAGS = {
    "num_layers": "--num-layers",
    "pp": "--pp",
    "vpp": "--vpp",
    "standalone_embedding": "--standalone-embedding",
    "split_rank": "--pp-split-rank",
    "first_layers": "--first-stage-layers",
    "last_layers": "--last-stage-layers",
    "count_embedding": "--count-embedding",
    "count_loss": "--count-loss",
    "layout": "--stages",
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All options can be written with underscores, too.",
        allow_abbrev=False,
    )
    number: dict[str, Any] = {"type": _number, "metavar": "N"}
    layout = parser.add_argument_group("layout")
    layout.add_argument("--world-size", required=True, help="number of ranks", **number)
    layout.add_argument("--tp", default=1, help="tensor parallel size", **number)
    layout.add_argument("--cp", default=1, help="context parallel size", **number)
    layout.add_argument("--dp", help="data parallel size (default: what remains of the world)", **number)
    layout.add_argument("--pp", default=1, help="pipeline stages", **number)
    layout.add_argument("--vpp", help="chunks of each pipeline rank (default: 1, or as --stages says)", **number)
    layout.add_argument("--ep", help="expert parallel size (default: 1)", **number)
    layout.add_argument("--etp", help="tensor parallel size inside an expert (default: tp)", **number)
    layout.add_argument("--experts", action="store_true", help="a mixture of experts even without --ep and --etp")
    layout.add_argument("--order", default=DEFAULT_ORDER, help="fastest-varying axis first (default: %(default)s)")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    output.add_argument("--picture", type=Path, metavar="FILE", help="also draw the groups, to a .png or .svg file")
    output.add_argument("--gpus-per-node", default=8, help="ranks of a node in the picture (default: 8)", **number)
    stages = parser.add_argument_group("layers of each pipeline stage")
    stages.add_argument("--num-layers", help="layers to be placed; of encoder and decoder each", **number)
    stages.add_argument("--pp-split-rank", dest="split_rank", help="pipeline rank where the decoder begins", **number)
    stages.add_argument("--standalone-embedding", action="store_true", help="no layers on the first pipeline rank")
    stages.add_argument("--first-stage-layers", dest="first_layers", help="layers of the first pipeline rank", **number)
    stages.add_argument("--last-stage-layers", dest="last_layers", help="layers of the last pipeline rank", **number)
    stages.add_argument("--count-embedding", action="store_true", help="the embedding counts as a layer")
    stages.add_argument("--count-loss", action="store_true", help="the loss counts as a layer")
    stages.add_argument(
        "--stages",
        dest="layout",
        metavar="LAYOUT",
        type=_stage_list,
        help="layers stage by stage: 'Et*3|(tt|)*4,L', or 3,2,2,2,2,0",
    )
    return parser.parse_args([_with_dashes(argument) for argument in arguments])


def read(options: argparse.Namespace) -> tuple[ParallelLayout, tuple[StageLayers, ...] | None]:
    """The layout, and its stages where layers are to be placed; a UserError with everything that stands against it."""
    settings = StageSettings(**{field: getattr(options, field) for field in STAGE_FLAGS})
    request = _request(options)
    problems = _too_long(options)
    unread = {problem.setting for problem in problems}
    found: list[Problem] = []
    layout = collect(lambda: _layout(request, settings, options), found)
    stages = collect(lambda: _stages(settings, request, options), found)
    for problem in found:  # what both say about --pp and --vpp is said once
        if problem.setting not in unread and (problem.setting, problem.rule) not in {
            (one.setting, one.rule) for one in problems
        }:
            problems.append(problem)
    gpus = options.gpus_per_node
    if not is_whole(gpus, 1) and "--gpus-per-node" not in unread:
        problems.append(Problem("--gpus-per-node", gpus, "must be a whole number, at least 1", "--gpus-per-node=8"))
    if options.picture is not None:
        problems += picture_problems(options.picture, "--picture")
    if problems or layout is None:
        raise UserError(problems)
    return (replace(layout, vpp=len(stages) // layout.pp) if stages else layout), stages


def _request(options: argparse.Namespace) -> LayoutRequest:
    asked = {field.name: getattr(options, field.name) for field in fields(LayoutRequest)}
    asked |= {field: 1 for field in ("vpp", "ep") if asked[field] is None}
    return LayoutRequest(**asked | {"experts": options.experts or options.ep is not None})


def _layout(request: LayoutRequest, settings: StageSettings, options: argparse.Namespace) -> ParallelLayout:
    broken = broken_rules(settings)

    def accepts(changed: LayoutRequest) -> bool:
        """Whether the stages suit the changed sizes, too."""
        if is_whole(changed.world_size, MOST_RANKS + 1) and changed.world_size != request.world_size:
            return False
        then = replace(settings, pp=changed.pp, vpp=None if options.vpp is None else changed.vpp)
        return options.num_layers is None or broken_rules(then) <= broken

    if is_whole(request.world_size, MOST_RANKS + 1):
        problems = [each for each in layout_problems(request, _flag, accepts) if each.setting != "--world-size"]
        many = Problem("--world-size", request.world_size, "too many ranks to list", f"at most {MOST_RANKS}")
        raise UserError([many, *problems])
    return layout_of(request, _flag, accepts)


def _stages(
    settings: StageSettings, request: LayoutRequest, options: argparse.Namespace
) -> tuple[StageLayers, ...] | None:
    if options.num_layers is not None:
        return stage_layers(settings, STAGE_FLAGS, pipeline_sizes(request))
    others = [field for field in STAGE_FLAGS if field not in ("num_layers", "pp", "vpp")]
    asked = [STAGE_FLAGS[field] for field in others if settings.asks_for(field)]
    if asked:
        rule, remedy = f"is needed by {' and '.join(asked)}", "--num-layers=N, the layers of the model"
        raise UserError(Problem("--num-layers", ..., rule, remedy))
    return None


def _too_long(options: argparse.Namespace) -> list[Problem]:
    """Numbers with so many digits that they are left unread."""
    problems = []
    for name, given in vars(options).items():
        if isinstance(given, str) and re.fullmatch(r"[+-]?[0-9]+", given) and name not in ("order", "layout"):
            rule = f"too large: it has {len(given.lstrip('+-'))} digits"
            problems.append(Problem(STAGE_FLAGS.get(name, _flag(name)), ..., rule, f"at most {MOST_DIGITS} digits"))
    return problems


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _number(text: str) -> int | str:
    """The number, or the text as it is: it is refused later, together with everything else that is wrong."""
    return int(text) if re.fullmatch(rf"[+-]?[0-9]{{1,{MOST_DIGITS}}}", text) else text


def _stage_list(text: str) -> str | list[int]:
    count = rf"\s*[0-9]{{1,{MOST_DIGITS}}}\s*"
    return [int(each) for each in text.split(",")] if re.fullmatch(f"{count}(,{count})*", text) else text


def _with_dashes(argument: str) -> str:
    """--world_size=16 -> --world-size=16"""
    return re.sub(r"^--[\w-]+", lambda option: option[0].replace("_", "-"), argument)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        layout, stages = read(options)
        if options.picture is not None:
            save_picture(layout, options.gpus_per_node, options.picture, "--picture")
    except UserError as error:
        print(error, file=sys.stderr)
        return REFUSED
    if options.json:
        print_lines(json_lines(layout, stages))
        return 0
    print_lines(table_lines(layout, shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120))
    if stages:
        print_lines(["", *stage_lines(stages)])
    if options.picture is not None:
        print_lines(["", f"picture: {options.picture}"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
