"""A training that cannot fit into the memory of this machine is refused before anything is allocated.

The rule counts only what is certain: weights, gradients, the optimizer's state, and one microbatch's activations in one
layer. It does not judge GPUs: their size is not known before torch is imported, and torch says at once what they lack.
"""

import os
from collections.abc import Iterator

from megalite.config.schema import OPTIMIZERS, Config, ModelConfig
from megalite.errors.problems import Problem

GIB = 2**30
GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA's, AMD's, and any under WSL2
SMALLER = "a smaller one, or a smaller train.seq_length"
TOKEN = 8 + 8 + 1  # bytes of a batch: the token, its label, and whether it counts in the loss


def fits_this_machine(config: Config, world_size: int, local_world_size: int) -> Iterator[Problem]:
    """On CPUs. `config` is derived."""
    memory = _memory()
    if memory is None or config.device == "cuda" or (config.device == "auto" and any(map(os.path.exists, GPUS))):
        return
    model, axes, train = config.model, config.parallel, config.train
    micro, length, batch = train.micro_batch_size or 1, train.seq_length, train.global_batch_size
    width, (rest, experts) = model.hidden_size, _weights(model)
    # In bytes at least: weights and gradients in bf16, 2 + 2; sharded at best over all ranks, masters in fp32 and the
    # optimizer's state, of which moment_dtype may be bf16. precision=fp32 never needs less: 4 + 4, and the state.
    state = sum(2 if dtype == "moment_dtype" else 4 for dtype in OPTIMIZERS[config.optimizer.name][0])
    held = (rest / axes.tp + experts / (axes.ep * (axes.etp or axes.tp))) * 4 / axes.pp
    held += (rest + experts) * (4 + state) / world_size
    ranks = world_size // (axes.tp * axes.cp * axes.pp)  # that share a batch
    steps = min(3, train.steps)  # in memory: the one that trains and those read ahead
    shape = f"{model.num_layers} layers of {width}, vocabulary of {model.vocab_size or 'the tokenizer'}"
    if model.moe.num_experts:
        shape += f", {model.moe.num_experts} experts of {model.moe.ffn_hidden_size}"
    for name, value, size, less in (
        ("model", shape, held, "a smaller model, or more machines"),
        ("train.micro_batch_size", micro, micro * length * width * 2 / (axes.tp * axes.cp), SMALLER),
        ("train.global_batch_size", batch, steps * TOKEN * batch * length / ranks, SMALLER),
    ):
        if size * local_world_size > memory:
            needed, there = (f"{bytes_ / GIB:,.0f} GiB" for bytes_ in (size * local_world_size, memory))
            yield Problem(name, value, f"needs {needed} at least, and this machine has {there}", less, here=True)


def _weights(model: ModelConfig) -> tuple[int, int]:
    """At least those of tables and matrices: of all but the experts, and of the experts. `model` is derived."""
    width, inner, moe = model.hidden_size, (model.head_size or 1) * model.num_attention_heads, model.moe
    of_mlp = (3 if model.gated else 2) * width  # for each unit of its inner width
    mixed = len(model.expert_layers)
    beside = of_mlp * moe.num_shared_experts * (moe.ffn_hidden_size or 1) + width * moe.num_experts  # and the router
    table = width * ((model.vocab_size or 1) + (model.max_positions or 0) * (model.position == "learned"))
    dense = (model.num_layers - mixed) * of_mlp * (model.ffn_hidden_size or 1)
    rest = table + model.num_layers * 2 * width * inner + dense + mixed * beside
    return rest, mixed * moe.num_experts * of_mlp * (moe.ffn_hidden_size or 1)


def _memory() -> int | None:
    """Of this machine in bytes, swap left aside; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
