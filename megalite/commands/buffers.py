"""Which bucket holds which parameters, and who owns what of it: tables of the gradient buffers of a run.

python -m megalite plan buffers model=gpt2 tokenizer=gpt2 --dp 4
python -m megalite plan buffers model=llama3_8b parallel.tp=2 train.global_batch_size=64 --world-size 128 --rank 5
python -m megalite plan buffers model=gpt2 optimizer.bucket_size=5000000 optimizer.instances=2 --dp 8
python -m megalite plan buffers model=tiny_moe tokenizer=byte parallel.tp=2 parallel.ep=4 parallel.etp=1 --world-size 8

OVERRIDES are those of pretrain_gpt.py. No data is read, no GPU is used, nothing is written: precision=auto counts as
bf16, and a vocabulary that only the data would tell as the usual one of its tokenizer.
"""

from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from functools import partial

from megalite.commands.command import RANKS, WORLD_SIZE, Shown, command, option
from megalite.config.arguments import number_from
from megalite.config.compose import load_config, load_values
from megalite.config.derive import derive_vocabulary
from megalite.config.layout import dense_ranks
from megalite.config.parallel_rules import checked_layout
from megalite.config.rule import Case
from megalite.errors.problems import Problem, UserError
from megalite.layout.ranks import header_lines as layout_lines
from megalite.optim.rank_buffers import bytes_of_rank, rank_buffers
from megalite.plan.buffers_table import buffer_lines
from megalite.verify.shrink import vocabulary_of


@command(
    WORLD_SIZE,
    option("--dp", **RANKS, default=2, help="data-parallel size without --world-size (default: %(default)s)"),
    option("--rank", type=number_from(0), default=0, metavar="R", help="whose buffers (default: 0)"),
)
def main(options: Namespace, overrides: list[str]) -> Shown:
    world_size = options.world_size or options.dp
    with suppress(UserError):  # which load_config then tells
        sizes = load_values(overrides, [f"parallel.{axis}" for axis in ("tp", "cp", "pp")])
        world_size = options.world_size or options.dp * dense_ranks(sizes)
    config = load_config(overrides, world_size)
    if options.rank >= world_size:
        rule = f"there are {world_size} ranks, counted from 0"
        raise UserError(Problem("--rank", options.rank, rule, f"--rank {world_size - 1}, or less"))
    if config.precision == "auto":
        config = replace(config, precision="bf16")
    config = derive_vocabulary(config, vocabulary_of(config))
    world = checked_layout(Case(config, world_size))
    kept = partial(bytes_of_rank, precision=config.precision, optimizer=config.optimizer)
    axes, *of_experts = layout_lines(world)[: 1 + world.has_experts]
    about = f"{config.model.name}, {axes}, {config.precision}, vocabulary {config.model.vocab_size:,}"
    return Shown([about, *of_experts, *buffer_lines(rank_buffers(config, world, options.rank), kept)])
