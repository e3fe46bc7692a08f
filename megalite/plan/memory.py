"""Refuses, before anything is allocated, a model that cannot fit into the memory of this machine.

Only what is certain counts: parameters, gradients and the leanest state of an optimizer. GPUs are not judged: torch
says at once what they lack.
"""

import os
from collections.abc import Iterator
from dataclasses import replace

from megalite.config.derive import derive_vocabulary
from megalite.config.schema import Config
from megalite.errors.problems import Problem
from megalite.model.parameters import gpt_parameters
from megalite.optim.rank_buffers import bytes_of_element

GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA's, AMD's, and any under WSL2


def fits_this_machine(config: Config, world_size: int, local_world_size: int) -> Iterator[Problem]:
    """What the ranks of this machine cannot hold on CPUs. `config` is derived. Masters and moments are at best sharded
    over all ranks. bf16 throughout needs least; precision=fp32 never needs less."""
    if config.device == "cuda" or (config.device == "auto" and any(map(os.path.exists, GPUS))):
        return
    axes, records = config.parallel, gpt_parameters(derive_vocabulary(config, 1).model)
    rest, experts = (sum(one.numel for one in records if one.of_experts == of) for of in (False, True))
    least = bytes_of_element("bf16", replace(config.optimizer, gradient_dtype="bf16", moment_dtype="bf16"))
    part = (rest / axes.tp + experts / (axes.ep * axes.etp)) / axes.pp
    shared = (rest + experts) * (least.masters + least.optimizer) / world_size
    needed, memory = (part * (least.parameters + least.gradients) + shared) * local_world_size, memory_bytes()
    if needed > memory:
        shape = f"{config.model.num_layers} layers of {config.model.hidden_size}"
        rule = f"needs {needed / 2**30:,.0f} GiB at least, and this machine has {memory / 2**30:,.0f} GiB"
        yield Problem("model", shape, rule, "a smaller model, or more machines", here=True)


def memory_bytes() -> int:
    """The machine's memory without swap."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
