"""`megalite plan ...` and `verify`: what a layout does, before anything runs. OVERRIDES are those of pretrain_gpt.py.

No data is read, no GPU is used; `plan` imports no torch.
"""

import json
import shutil
import sys
from argparse import Namespace
from dataclasses import asdict, replace
from functools import partial

from megalite.commands.command import COUNT, PICTURE, RANKS, WORLD_SIZE, Shown, command, option
from megalite.commands.train import train_rank
from megalite.config import rules
from megalite.config.arguments import number_from
from megalite.config.compose import load_values, names_of
from megalite.config.derive import derive_vocabulary, schedule_request
from megalite.config.layout import STAGE_NAMES, layout_of, stage_settings
from megalite.config.rule import Case, problems_of
from megalite.config.schema import A_YEAR_S
from megalite.config.settings import with_values
from megalite.errors.problems import NO_VALUE, Problem, UserError, refuse, to_stderr
from megalite.layout.buffer_layout import Kind
from megalite.layout.ranks import header_lines
from megalite.layout.stages import stage_layers
from megalite.optim.rank_buffers import bytes_of_rank, rank_buffers
from megalite.pipeline.checker import check
from megalite.pipeline.schedules import build_schedule
from megalite.plan.buffers_table import buffer_lines
from megalite.plan.ranks import groups_of, ranks_picture, stage_lines, table_lines
from megalite.plan.timeline import FORWARD_PASSES, schedule_picture, simulated
from megalite.verify.shrink import load, vocabulary_of

LABELS = {"world_size": "--world-size", "split_rank": "--pp-split-rank"}
SIZES = ("tp", "cp", "pp", "vpp", "ep", "etp")
RANKS_READ = {*(f"parallel.{axis}" for axis in (*SIZES, "order")), "model.moe.num_experts", *STAGE_NAMES.values()}
SCHEDULE_READ = (  # of the model and of other axes nothing is asked
    *(f"parallel.{name}" for name in ("pp", "vpp", "schedule", "microbatch_group_size")),
    *("train.global_batch_size", "train.micro_batch_size"),
)
SECONDS = number_from(0, A_YEAR_S, above=True, whole=False)
MOST_CELLS = 64  # actions of a rank that are listed


@command(
    option("--world-size", "--world_size", required=True, help="number of ranks", **RANKS),
    *(option(f"--{axis}", help=f"parallel.{axis}", **COUNT) for axis in SIZES),
    option("--experts", action="store_true", help="a mixture of experts even without parallel.ep and etp"),
    option("--pp-split-rank", help="pipeline rank where a decoder begins, after an encoder", **COUNT),
    option("--json", action="store_true", help="one JSON object instead of tables"),
    PICTURE,
    option("--gpus-per-node", default=8, help="ranks of a node in the picture (default: 8)", **COUNT),
)
def ranks(options: Namespace, overrides: list[str]) -> Shown:
    """Who talks to whom: every group of ranks of a layout, as tables, JSON or a picture, and the layers of each stage.

    python -m megalite plan ranks --world-size 64 --tp 8 --pp 4 --picture ranks.svg --gpus-per-node 8
    python -m megalite plan ranks --world-size 16 --pp 4 --ep 4 --etp 1 model.num_layers=12 --json

    scripts/rank_generator.py is the same, and `--tp 4` is `parallel.tp=4`. Stages are shown where an override names the
    model or its layers, and who holds which expert where it has some.
    """
    sizes = [f"parallel.{axis}={size}" for axis in SIZES if (size := getattr(options, axis)) is not None]
    named = names_of(overrides := [*overrides, *sizes])
    config = load_values(overrides, sorted(RANKS_READ))
    places_layers = not named.isdisjoint(("model", "model.num_layers", "experiment"))
    experts = config.model.moe.num_experts
    asked = options.experts or config.parallel.ep > 1 or not named.isdisjoint(("parallel.ep", "parallel.etp"))
    if not experts and asked:
        config = with_values(config, {"model.moe.num_experts": config.parallel.ep})
    case = Case(config, options.world_size, options.pp_split_rank, LABELS)
    others = (*(rules.EXPERT_RULES if experts else ()), *(rules.STAGE_RULES if places_layers else ()))
    problems = problems_of(case, (*rules.LAYOUT_RULES, *others))
    settings = stage_settings(config, options.pp_split_rank)
    if not places_layers and (settled := [name for name in settings.asked if name != "vpp"]):
        rule = f"is needed by {' and '.join({**STAGE_NAMES, **LABELS}[name] for name in settled)}"
        problems.append(Problem("model.num_layers", NO_VALUE, rule, "model.num_layers=12, or model=NAME"))
    refuse(problems)
    layout = layout_of(config, options.world_size)
    groups, stages = groups_of(layout, experts), stage_layers(settings) if places_layers else ()
    width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120
    lines = [*header_lines(layout), *table_lines(groups, layout.world_size, width)]
    lines += ["", *stage_lines(stages)] if stages else []
    found = {**groups, **({"stages": [asdict(stage) for stage in stages]} if stages else {})}
    shown = [json.dumps(found)] if options.json else lines
    return Shown(shown, draw=lambda: ranks_picture(layout, options.gpus_per_node, experts))


@command(PICTURE, option("--dp", **RANKS, default=1, help="data-parallel size (default: %(default)s)"))
def schedule(options: Namespace, overrides: list[str]) -> Shown:
    """A pipeline's schedule, checked, timed and drawn: who computes which microbatch when, what is held, what is idle.

    python -m megalite plan schedule parallel.pp=4 parallel.vpp=2 train.micro_batch_size=1 --picture interleaved.svg

    Times are simulated: all ranks take equally long, a backward pass twice as long as a forward pass, transfers no
    time. The report of a run shows what it recorded (train.record_pipeline).
    """
    config = load_values(overrides, SCHEDULE_READ)
    world_size = config.parallel.pp * options.dp
    refuse(problems_of(Case(config, world_size), rules.LAYOUT_RULES + rules.SCHEDULE_RULES))
    planned = build_schedule(schedule_request(config, world_size))
    flaws = check(planned)
    assert not flaws, "\n".join(map(str, flaws))
    timeline = simulated(planned)
    lines = [timeline.title, timeline.summary(FORWARD_PASSES), ""]
    for rank, spans in enumerate(timeline.ranks):
        cells = [*(str(span.action) for span in spans[:MOST_CELLS]), *(["..."] if len(spans) > MOST_CELLS else [])]
        lines.append(f"rank {rank:<3} holds at most {timeline.held(rank):<16} {' '.join(cells)}")
    return Shown(lines, draw=lambda: schedule_picture(timeline, FORWARD_PASSES, timeline.title))


@command(
    WORLD_SIZE,
    option("--dp", **RANKS, help="data-parallel size, in place of --world-size (default: 2)"),
    option("--rank", type=number_from(0), default=0, metavar="R", help="whose buffers (default: 0)"),
)
def buffers(options: Namespace, overrides: list[str]) -> Shown:
    """Which bucket holds which parameters, and who owns what of it: tables of the gradient buffers of a run.

    python -m megalite plan buffers model=llama3_8b parallel.tp=2 train.global_batch_size=64 --world-size 128 --rank 5

    precision=auto counts as bf16, and a vocabulary that only the data would tell as the usual one of its tokenizer.
    """
    config, world_size = load(overrides, options.world_size, options.dp or 2)
    if options.rank >= world_size:
        rule = f"there are {world_size} ranks, counted from 0"
        raise UserError(Problem("--rank", options.rank, rule, f"--rank {world_size - 1}, or less"))
    if config.precision == "auto":
        config = replace(config, precision="bf16")
    config = derive_vocabulary(config, vocabulary_of(config))
    world = layout_of(config, world_size)
    kept = partial(bytes_of_rank, precision=config.precision, optimizer=config.optimizer)
    axes, *of_experts = header_lines(world)
    about = f"{config.model.name}, {axes}, {config.precision}, vocabulary {config.model.vocab_size:,}"
    sharers: dict[Kind, int] = {"dense": world.tp, "expert": world.etp or 1}
    homes = sharers if config.optimizer.name == "muon" else {}
    return Shown([about, *of_experts, *buffer_lines(rank_buffers(config, world, options.rank), kept, homes)])


@command(
    WORLD_SIZE,
    option("--dp", **RANKS, help="data-parallel size (default: 2 where that makes at most 8 ranks)"),
    option("--timeout", type=SECONDS, default=300.0, metavar="S", help="a hang is a failure (default: %(default)g)"),
)
def verify(options: Namespace, overrides: list[str]) -> Shown:
    """Whether a layout trains like one process: your config, made small, on CPU processes and on one, in fp64.

    python -m megalite verify --dp 2 model=llama3_8b parallel.tp=2 parallel.sequence_parallel=false
    python -m megalite verify --world-size 64 model=gpt3_175b parallel.tp=8 train.global_batch_size=64

    The model shrinks, its features and what divides what stay; above 8 ranks each axis shrinks to its least factor,
    mostly 2. Nothing stays.
    Exit status: 0 the layout computes the same, 1 it does not (or a rank failed or hung), 2 refused.
    """
    config, world_size = load(overrides, options.world_size, options.dp)
    if world_size == 1:
        rule, remedy = "one process is what layouts are compared to", "--dp 2, or parallel.tp=2 with a batch to suit"
        raise UserError(Problem("world size", 1, rule, remedy))
    from megalite.verify import verify as verification  # and torch
    from megalite.verify.running import RunFailure

    try:
        lines, equal = verification.verify(config, world_size, train_rank, options.timeout)
    except RunFailure as failure:
        words, status = failure.args
        to_stderr(words)
        return Shown(status=status)
    return Shown(lines, 0 if equal else 1)
