"""How context parallelism shares a sequence: the exchange, who holds which tokens, what each rank computes and sends.

python -m megalite plan sequence parallel.cp=4 model=llama3_8b train.seq_length=32768
python -m megalite plan sequence parallel.cp=4 parallel.cp_comm=ring train.seq_length=8192

OVERRIDES are those of pretrain_gpt.py. Scores are those of a sequence that is one document; bytes are in bf16.
Exit status: 0, or 2 refused.
"""

from argparse import Namespace

from megalite.commands.command import Shown, command
from megalite.config.compose import load_values
from megalite.config.derive import derive_model
from megalite.config.layout import exchange_of, sent_elements
from megalite.config.parallel_rules import CONTEXT_RULES
from megalite.config.rule import Case, problems_of
from megalite.errors.problems import Problem, refuse
from megalite.layout.sequence import CpShard, causal_plan

READ = (  # the settings that decide how a sequence is shared
    *(f"parallel.{name}" for name in ("tp", "cp", "cp_comm", "cp_alltoall", "sequence_parallel")),
    *(f"model.{name}" for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_size")),
    *("model.dropout", "model.attention_dropout", "data.cross_document_attention", "train.seq_length"),
)
BYTES = 2  # of an element in bf16


@command()
def main(options: Namespace, overrides: list[str]) -> Shown:
    config = load_values(overrides, READ)
    cp, length, exchange = config.parallel.cp, config.train.seq_length, exchange_of(config)
    problems = problems_of(Case(config, config.parallel.tp * cp), CONTEXT_RULES)
    if cp == 1:
        problems.append(Problem("parallel.cp", 1, "one rank has the whole sequence", "parallel.cp=2"))
    refuse(problems)
    size = derive_model(config.model, length).head_size or 0
    of_token = sent_elements(config, exchange.alltoall, exchange.ring) * size * BYTES
    sent = f"each rank sends {of_token * length / cp / 1e6:,.1f} MB per layer and sequence"
    lines = [f"cp {cp}: {exchange.name} ({exchange.why})", f"{sent}, {of_token:,.0f} bytes per token that it holds", ""]
    for index in range(cp):
        share = CpShard(index, exchange.ring, exchange.alltoall)
        held = " and ".join(f"{places[0]:,}-{places[-1]:,}" for places in share.places(length))
        scores = causal_plan(share, length).scores if exchange.ring > 1 else length * (length + 1) // 2
        heads = f" of 1/{exchange.alltoall} of the heads" if exchange.alltoall > 1 else ""
        lines.append(f"rank {index:<3} holds tokens {held:<28} computes {scores:,} scores{heads}")
    return Shown(lines)
