"""How context parallelism shares a sequence: the exchange, who holds which tokens, what each rank computes and sends.

python -m megalite plan sequence parallel.cp=4 model=llama3_8b train.seq_length=32768
python -m megalite plan sequence parallel.cp=4 parallel.cp_comm=ring train.seq_length=8192

OVERRIDES are those of pretrain_gpt.py. Scores are those of a sequence that is one document; bytes are in bf16.
Exit status: 0, or 2 refused.
"""

from argparse import Namespace
from collections.abc import Iterator

from megalite.commands.command import Shown, command
from megalite.config.compose import load_values
from megalite.config.derive import derive_model
from megalite.config.exchange import Exchange, exchange_of, sent_elements
from megalite.config.parallel_rules import CONTEXT_RULES
from megalite.config.rule import Case, problems_of
from megalite.config.schema import Config
from megalite.errors.problems import Problem, refuse
from megalite.layout.sequence import CpShard, causal_plan

READ = (  # the settings that decide how a sequence is shared
    *(f"parallel.{name}" for name in ("tp", "cp", "cp_comm", "cp_alltoall", "sequence_parallel")),
    *(f"model.{name}" for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_size")),
    *("model.dropout", "model.attention_dropout", "data.cross_document_attention", "train.seq_length"),
)
MOST_RANKS = 1024
BYTES = 2  # of an element in bf16


@command()
def main(options: Namespace, overrides: list[str]) -> Shown:
    config = load_values(overrides, READ)
    axes, exchange = config.parallel, exchange_of(config)
    problems = problems_of(Case(config, axes.tp * axes.cp), CONTEXT_RULES)
    if not 1 < axes.cp <= MOST_RANKS:
        rule = "one rank has the whole sequence" if axes.cp == 1 else "too many ranks to list"
        problems.append(Problem("parallel.cp", axes.cp, rule, f"parallel.cp=2 to {MOST_RANKS}"))
    refuse(problems)
    return Shown(lines(config, exchange))


def lines(config: Config, exchange: Exchange) -> Iterator[str]:
    """The answer in words."""
    cp, length = config.parallel.cp, config.train.seq_length
    size = derive_model(config.model, length).head_size or 0
    of_token = sent_elements(config, exchange.alltoall, exchange.ring) * size * BYTES
    yield f"cp {cp}: {exchange.name} ({exchange.why})"
    whole = of_token * length / cp / 1e6
    yield f"each rank sends {whole:,.1f} MB per layer and sequence, {of_token:,.0f} bytes per token that it holds"
    yield ""
    for index in range(cp):
        share = CpShard(index, exchange.ring, exchange.alltoall)
        held = " and ".join(f"{places[0]:,}-{places[-1]:,}" for places in share.places(length))
        scores = causal_plan(share, length).scores if exchange.ring > 1 else length * (length + 1) // 2
        heads = f" of 1/{exchange.alltoall} of the heads" if exchange.alltoall > 1 else ""
        yield f"rank {index:<3} holds tokens {held:<28} computes {scores:,} scores{heads}"
