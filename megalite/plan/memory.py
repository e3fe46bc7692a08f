"""Refuse, before anything is allocated, a training that cannot fit into the memory of this machine.

Only what is certain counts: weights, gradients, the leanest state of an optimizer, one microbatch's activations in one
layer, and the batches read ahead. GPUs are not judged: their size is not known before torch is imported, and torch says
at once what they lack.
"""

import os
from collections.abc import Iterator
from dataclasses import replace

from megalite.config.derive import derive_vocabulary
from megalite.config.schema import Config
from megalite.errors.problems import Problem
from megalite.model.parameters import gpt_parameters
from megalite.optim.memory import bytes_of_element

GIB = 2**30
GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA's, AMD's, and any under WSL2
SMALLER = "a smaller one, or a smaller train.seq_length"
TOKEN = 8 + 8 + 1  # bytes of a batch: the token, its label, and whether it counts in the loss


def fits_this_machine(config: Config, world_size: int, local_world_size: int) -> Iterator[Problem]:
    """What the ranks of this machine cannot hold on CPUs. `config` is derived."""
    memory = memory_bytes()
    if memory is None or config.device == "cuda" or (config.device == "auto" and any(map(os.path.exists, GPUS))):
        return
    model, axes, train = config.model, config.parallel, config.train
    micro, length, batch, width = train.micro_batch_size, train.seq_length, train.global_batch_size, model.hidden_size
    ranks = world_size // (axes.tp * axes.cp * axes.pp)  # that share a batch
    steps = min(3, train.steps)  # in memory: the one that trains and those read ahead
    shape = f"{model.num_layers} layers of {width}, vocabulary of {model.vocab_size or 'the tokenizer'}"
    if model.moe.num_experts:
        shape += f", {model.moe.num_experts} experts of {model.moe.ffn_hidden_size}"
    for name, value, size, less in (
        ("model", shape, state_bytes(config, world_size), "a smaller model, or more machines"),
        ("train.micro_batch_size", micro, micro * length * width * 2 / (axes.tp * axes.cp), SMALLER),
        ("train.global_batch_size", batch, steps * TOKEN * batch * length / ranks, SMALLER),
    ):
        if size * local_world_size > memory:
            needed, there = (f"{bytes_ / GIB:,.0f} GiB" for bytes_ in (size * local_world_size, memory))
            yield Problem(name, value, f"needs {needed} at least, and this machine has {there}", less, here=True)


def state_bytes(config: Config, world_size: int) -> float:
    """What a rank keeps at least: parameters and gradients of its part of the model, masters and moments at best
    sharded over all ranks. bf16 throughout needs least; precision=fp32 never needs less."""
    axes = config.parallel
    records = gpt_parameters(derive_vocabulary(config, 1).model)
    rest, experts = (sum(one.numel for one in records if one.of_experts == of) for of in (False, True))
    least = bytes_of_element("bf16", replace(config.optimizer, gradient_dtype="bf16", moment_dtype="bf16"))
    part = (rest / axes.tp + experts / (axes.ep * axes.etp)) / axes.pp
    return (
        part * (least.parameters + least.gradients) + (rest + experts) * (least.masters + least.optimizer) / world_size
    )


def memory_bytes() -> int | None:
    """The machine's memory without swap; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
