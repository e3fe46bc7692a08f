"""Settings that depend on the device: refused where they cannot be, chosen where nobody has."""

from collections.abc import Callable

import torch

from megalite.config.device_rules import graph_obstacles, precision_clashes
from megalite.config.schema import Config, ParallelConfig
from megalite.config.settings import SETTINGS, value_of, with_values, yaml_value
from megalite.errors.problems import Problem, UserError
from megalite.launch.context import ParallelContext
from megalite.launch.device import name_of
from megalite.launch.environment import ProcessEnvironment
from megalite.model.flops import flops_per_token, peak_flops
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.shared_memory import why_products_cannot_send

ASYNC_TP, CUDA_GRAPH = "parallel.async_tp", "train.cuda_graph"
OF_CUDA = {ASYNC_TP: None, "train.attention": "auto", CUDA_GRAPH: None}  # and what leaves the choice to the device
HOST_S = 1.9e-3  # a step of one microbatch of GPT-2, by its blocks, beside an H200: docs/performance.md
USUAL_MFU = 0.4


def precision_problems(config: Config, precision: str) -> list[Problem]:
    """Settings that do not go with the precision that the device has chosen (fp64, fp32, bf16 or fp16)."""
    return [
        Problem(name, value_of(config, name), rule, f"{name}={yaml_value(SETTINGS[name].default)}")
        for name, rule in precision_clashes(config, precision)
    ]


def cuda_problems(config: Config, device: torch.device, environment: ProcessEnvironment) -> list[Problem]:
    """Settings for CUDA on a CPU, and parallel.async_tp where the ranks of tp cannot share memory."""
    asked = [name for name, auto in OF_CUDA.items() if value_of(config, name) not in (auto, False)]
    rule = "needs CUDA, and this run is on a CPU"
    if device.type == "cuda":
        rule = no_shared_memory(config.parallel, device, environment) if config.parallel.async_tp else ""
        asked = [ASYNC_TP] if rule else []
    return [Problem(name, value_of(config, name), rule, f"{name}={yaml_value(OF_CUDA[name])}") for name in asked]


def no_shared_memory(axes: ParallelConfig, device: torch.device, environment: ProcessEnvironment) -> str:
    """Why the GPUs of the ranks of tp cannot share memory; empty: as far as a rank can see, they can."""
    local, own = environment.local_world_size, device.index or 0
    if local % axes.tp or not axes.order.startswith("tp"):
        return f"needs all ranks of tp on one host, and {local} processes of this one do not fit"
    if torch.cuda.device_count() < local:  # a rank sees its own GPU alone
        return ""
    first = own - own % axes.tp
    far = [n for n in range(first, first + axes.tp) if n != own and not torch.cuda.can_device_access_peer(own, n)]
    return f"needs GPUs that reach each other's memory, and GPU {own} does not reach {far}" if far else ""


def derive_device(
    config: Config,
    context: ParallelContext,
    environment: ProcessEnvironment | None = None,
    report: Callable[[str], None] = lambda words: None,
) -> Config:
    """Settings that follow from the device; collective. Compiling pays on CUDA, on a CPU it costs more than it brings.

    Raises UserError, alike on all ranks, where the ranks find that parallel.async_tp=true does not work here.
    """
    is_cuda, group = context.device.type == "cuda", TensorGroup.of(context.group("tp"))
    if config.parallel.async_tp and group is not None:
        why = no_shared_memory(config.parallel, context.device, environment or ProcessEnvironment())
        if not any(context.gather_json([why] if why else [])):  # else ranks would wait for each other's memory in vain
            report(f"trying products that send ({ASYNC_TP})")
            why = why_products_cannot_send(group, context.dtype, context.device)
        if reasons := [reason for of_rank in context.gather_json([why] if why else []) for reason in of_rank]:
            rule = f"products that send do not work here: {reasons[0]}"
            raise UserError(Problem(ASYNC_TP, True, rule, f"{ASYNC_TP}=false"))
    compiles = is_cuda if config.train.compile is None else config.train.compile
    chosen = {
        "precision": name_of(context.dtype),
        "train.compile": compiles,
        ASYNC_TP: bool(config.parallel.async_tp) and group is not None,
    }
    graph = value_of(config, CUDA_GRAPH)
    if graph is None:
        cannot = any(wrong for wrong, *_ in graph_obstacles(config, context.layout.world_size))
        graph = is_cuda and not cannot and is_small(config, context)
    return with_values(config, {**chosen, CUDA_GRAPH: graph})


def is_small(config: Config, context: ParallelContext) -> bool:
    """Whether the host takes longer to start a microbatch than the device to compute one."""
    train = config.train
    peak = peak_flops(torch.cuda.get_device_name(context.device), str(context.dtype).removeprefix("torch."))
    flops = train.micro_batch_size * train.seq_length * flops_per_token(config.model, train.seq_length, causal=True)
    # Four times the host's time: at three times it a graph saved 1.2 % on an H100, and 1.4 % on an H200.
    return peak is not None and flops / (USUAL_MFU * peak) < 4 * HOST_S * config.model.num_layers
