"""Which bucket holds which parameters, and who owns what of it: tables of the gradient buffers of a run.

python -m megalite plan buffers model=gpt2 tokenizer=gpt2 --dp 4
python -m megalite plan buffers model=llama3_8b parallel.tp=2 train.global_batch_size=64 --world-size 128 --rank 5
python -m megalite plan buffers model=gpt2 optimizer.bucket_size=5000000 optimizer.instances=2 --dp 8
python -m megalite plan buffers model=tiny_moe tokenizer=byte parallel.tp=2 parallel.ep=4 parallel.etp=1 --world-size 8

OVERRIDES are those of pretrain_gpt.py. No data is read, no GPU is used, nothing is written.
"""

from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from functools import partial

from megalite.commands.command import RANKS, WORLD_SIZE, Shown, command, option
from megalite.config.arguments import number_from
from megalite.config.compose import load_config
from megalite.config.derive import derive_vocabulary
from megalite.config.parallel_rules import checked_layout
from megalite.config.rule import Case
from megalite.config.schema import Config
from megalite.errors.problems import Problem, UserError
from megalite.layout.ranks import header_lines as layout_lines
from megalite.optim.memory import bytes_of_rank
from megalite.optim.rank_buffers import rank_buffers
from megalite.plan.buffers_table import buffer_lines
from megalite.verify.shrink import vocabulary_of
from megalite.verify.verify import load


@command(
    WORLD_SIZE,
    option("--dp", **RANKS, help="data-parallel size (default: 2)"),
    option("--rank", type=number_from(0), metavar="R", help="whose buffers (default: 0)"),
)
def main(options: Namespace, overrides: list[str]) -> Shown:
    config, world_size = load_world(overrides, options.world_size, options.dp)
    if options.rank is not None and options.rank >= world_size:
        rule = f"there are {world_size} ranks, counted from 0"
        raise UserError(Problem("--rank", options.rank, rule, f"--rank {world_size - 1}, or less"))
    notes = []
    if config.precision == "auto":
        notes.append("note: precision=auto is taken as bf16 (set it to be exact)")
        config = replace(config, precision="bf16")
    if not config.model.vocab_size:
        config = derive_vocabulary(config, vocabulary_of(config))
        size = f"{config.model.vocab_size:,}"
        notes.append(f"note: model.vocab_size is taken as {size}: the tokenizer is not asked (set it to be exact)")
    world = checked_layout(Case(config, world_size))
    buffers = rank_buffers(config, world, options.rank or 0)
    kept = partial(bytes_of_rank, precision=config.precision, optimizer=config.optimizer)
    axes, *of_experts = layout_lines(world)[: 1 + world.has_experts]
    header = [f"{config.model.name}, {axes}, {config.precision}", *of_experts, *notes]
    return Shown([*header, *buffer_lines(buffers, kept)])


def load_world(overrides: list[str], world_size: int | None, dp: int | None) -> tuple[Config, int]:
    """The config and the number of its ranks, by default two data-parallel ones; one process has buffers, too."""
    if (world_size, dp) in ((1, None), (None, 1)):
        with suppress(UserError):
            return load_config(overrides, 1), 1
    return load(overrides, world_size, 2 if world_size is None and dp is None else dp)
