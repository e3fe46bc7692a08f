"""A training that cannot fit into the memory of this machine is refused before anything is allocated.

Judged is what is certain: the weights with their gradients and optimizer's state, and one microbatch on its way through
one layer. What a GPU holds is not known before torch is imported: it says itself, and at once, what it lacks.
"""

import os
from collections.abc import Iterator

from megalite.config.derive import derive_model
from megalite.config.schema import Config
from megalite.errors.problems import Problem

GIB = 2**30
GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA's, AMD's, and any under WSL2
TOKEN = 8 + 8 + 1  # bytes of a batch: the token, its label, and whether it counts in the loss


def fits_this_machine(config: Config, world_size: int, local_world_size: int) -> Iterator[Problem]:
    """On CPUs. `config` is derived."""
    memory = _memory()
    if memory is None or config.device == "cuda" or (config.device == "auto" and any(map(os.path.exists, GPUS))):
        return
    model, axes, train = derive_model(config.model, config.train.seq_length), config.parallel, config.train
    micro = train.micro_batch_size or 1
    width, inner = model.hidden_size, (model.head_size or 1) * model.num_attention_heads
    layer = 2 * width * inner + (3 if model.gated else 2) * width * (model.ffn_hidden_size or 1)
    table = width * ((model.vocab_size or 1) + (model.max_positions or 0) * (model.position == "learned"))
    weights = (model.num_layers * layer + table) / (axes.tp * axes.pp)
    # In bytes at least: weights and gradients in bf16, 2 + 2; sharded at best over all ranks, masters in fp32, first
    # moments in bf16 and second ones in fp32, 4 + 2 + 4. precision=fp32 never needs less: 4 + 4, and 0 + 2 + 4.
    held = weights * 4 + (weights * axes.tp * axes.pp / world_size) * 10
    passing = micro * train.seq_length * width * 2 / (axes.tp * axes.cp)
    ranks = world_size // (axes.tp * axes.cp * axes.pp)  # that share a batch
    steps = min(3, train.steps)  # in memory: the one that trains and those read ahead
    tokens = max(1, steps * TOKEN * train.global_batch_size * train.seq_length / ranks)
    batch = int(memory / local_world_size * train.global_batch_size / tokens) // (micro * ranks) * micro * ranks
    one = passing * local_world_size <= memory * micro  # would fit
    smaller_micro = "train.micro_batch_size=1" if one else "a smaller train.seq_length"
    smaller_batch = f"train.global_batch_size={batch}, or less" if batch else "a smaller train.seq_length"
    for name, value, size, less in (
        (
            "model",
            f"{model.num_layers} layers of {width}, vocabulary of {model.vocab_size or 'the tokenizer'}",
            held,
            "a smaller model, or more machines",
        ),
        ("train.micro_batch_size", micro, passing, smaller_micro),
        ("train.global_batch_size", train.global_batch_size, tokens, smaller_batch),
    ):
        if size * local_world_size > memory:
            rule = (
                f"needs {size * local_world_size / GIB:,.0f} GiB at least, and this machine has {memory / GIB:,.0f} GiB"
            )
            yield Problem(name, value, rule, less, here=True)


def _memory() -> int | None:
    """Of this machine in bytes, swap left aside; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
