"""Context parallelism beside data parallelism on two ranks of one thread, on long sequences.

Both train the same model on the same tokens per step, in turns, and their losses must agree; of data-parallel ranks
each has whole sequences, of context-parallel ranks half of each.

    python benchmarks/benchmark.py --context                    8,192 tokens, fp32 and bf16
    python benchmarks/benchmark.py --context --precision fp32 --steps 5
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmark_moe import REFERENCE, Contenders, compare, table
from benchmark_sides import Shape
from figures import write_figures

FIXED = ("train.compile=false",)
LONG = ("model.vocab_size=4096", "model.num_layers=1", "train.seq_length=8192")
SHAPES = {"tiny": Shape(("model=tiny", "model.hidden_size=128", "model.num_attention_heads=2", *LONG), 2, 2)}
CONTENDERS: Contenders = {
    REFERENCE: (2, ()),
    **{
        f"cp 2, {comm}": (1, ("parallel.cp=2", f"parallel.cp_comm={comm}"))
        for comm in ("ring", "allgather", "alltoall")
    },
}


def run(names: Sequence[str], precisions: Sequence[str], *, rounds: int, batch: int | None, file: Path | None) -> int:
    """Measure, compare and print: the exit status is 1 where contenders do different work."""
    report, faults = [], []
    for name, precision in itertools.product(names, precisions):
        shape = SHAPES[name]
        comparison = compare(shape, precision, rounds, batch or shape.cpu_batch, CONTENDERS, FIXED)
        print(f"{name} {precision}, two ranks of one thread, sequences of 8,192 tokens")
        print(table(comparison))
        print("\n".join(f"wrong: {fault}" for fault in comparison.faults) or "losses agree", flush=True)
        report.append({"model": name} | asdict(comparison))
        faults += comparison.faults
    if file is not None:
        write_figures(file, report)
    return int(bool(faults))
