"""Builds what a rank trains with: its place among the ranks, its part of the model, and all that updates it.

The model is built without values. They come from the seed, an import or a checkpoint, and are whole on every rank
before a step. Settings that depend on the device are refused or chosen here.
"""

import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from megalite.config.clashes import clashes
from megalite.config.layout import exchange_of, layout_of, local_heads, stage_settings
from megalite.config.nccl_options import read_nccl_options
from megalite.config.schedule_request import ScheduleRequest
from megalite.config.schema import Config, ModelConfig
from megalite.config.settings import SETTINGS, value_of, with_values, yaml_value
from megalite.context_parallel.exchange import CpGroups, Waiting
from megalite.data.batches import DataShare
from megalite.errors.problems import Problem, UserError, collect
from megalite.kernels.grouped import is_one_kernel
from megalite.launch.context import CPU, ParallelContext
from megalite.launch.device import PRECISIONS, check_fp8, choose_device, choose_precision, fix_order, use_attention
from megalite.launch.process import ProcessEnvironment
from megalite.launch.startup import join, meet
from megalite.launch.watchdog import after_report_s
from megalite.layout.buffer_layout import Kind
from megalite.layout.ranks import GroupNeeds
from megalite.layout.sequence import CpShard
from megalite.layout.stages import stages_of
from megalite.model.gpt import GPT, Routers
from megalite.model.init import start_values
from megalite.moe.dispatch import ExpertRanks
from megalite.optim.buffers import TrainingBuffers, dtype_of
from megalite.optim.layer_norms import LayerNorms
from megalite.optim.loss_scale import LossScale
from megalite.optim.optimizer import Optimizer, make_optimizer
from megalite.optim.rank_buffers import rank_buffers, records_of
from megalite.optim.spikes import SpikeWindow
from megalite.optim.update_sizes import UpdateSizes
from megalite.optim.zero import GradientSync, ParameterGather, ReplicaGroups
from megalite.pipeline.actions import Direction
from megalite.pipeline.executor import Executor
from megalite.pipeline.schedules import build_schedule, forward_only
from megalite.tensor_parallel.collectives import TensorGroup, share_memory, why_products_cannot_send
from megalite.train.metrics import StepClock

# Settings that may differ between machines: a name for people, numbers of cores, places whose content is compared.
OF_A_MACHINE = (
    *("run_name", "tokenizer", "data.path", "data.validation", "data.cache_dir", "data.workers"),
    *("checkpoint.init_from", "parallel.nccl_options"),
)

# (folder, model, names) -> (logical name, logical tensor) of these parameters, of all where `names` is None.
# It raises UserError before it reads the first tensor if the folder does not fit the model.
ReadWeights = Callable[[str, ModelConfig, Container[str] | None], Iterator[tuple[str, Tensor]]]

Fit = Callable[[Config, ParallelContext], Config]
MICRO = "train.micro_batch_size"


@dataclass(frozen=True)
class Training:
    """All that a training step works on."""

    chunks: list[GPT]  # of the model: the stages that are this rank's; the pipeline ends on the last one, if here
    executor: Executor
    buffers: TrainingBuffers
    optimizer: Optimizer
    replicas: dict[Kind, ReplicaGroups]
    sync: GradientSync
    gather: ParameterGather
    loss_scale: LossScale | None  # in fp16
    spikes: SpikeWindow | None  # with train.skip_spikes
    update_sizes: UpdateSizes | None  # with log.update_sizes
    layer_norms: LayerNorms | None  # with log.layer_norms_interval
    clock: StepClock
    embeds: bool  # this rank's stages embed tokens

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Meanwhile the model computes without dropout."""
        for chunk in self.chunks:
            chunk.eval()
        yield
        for chunk in self.chunks:
            chunk.train()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Meanwhile masters are their averages, which the model computes with, rounded. Afterwards all is as before, to
        the bit; where an error ends it, all but the parameters of other ranks. Collective."""
        self.gather.finish()
        self.optimizer.before_change()
        self.buffers.exchange_averages()
        try:
            self.cast_and_gather_params()
            yield
        finally:
            self.buffers.exchange_averages()
            self.buffers.round_masters()
        self.cast_and_gather_params()

    def cast_and_gather_params(self) -> None:
        """Parameters become the masters of all ranks, rounded to the model's dtype; collective."""
        self.buffers.round_masters()
        self.gather.start()
        self.gather.finish()


def open_context(config: Config, environment: ProcessEnvironment, store: Store | None = None) -> ParallelContext:
    """This rank's place among the ranks (launch/startup.py). All ranks must call it; all refuse alike."""
    problems: list[Problem] = []
    axes, heads = config.parallel, (*local_heads(config), config.model.head_size)
    device = collect(lambda: choose_device(config.device, environment), problems) or CPU
    dtype = collect(lambda: choose_precision(config.precision, device), problems) or torch.float32
    # Nobody can do anything about these of torch: on the first product in autograd's thread, and that fp32 is fp32.
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current|TensorFloat32 tensor cores")
    collect(lambda: check_fp8(config.train.fp8, device), problems)
    if device.type == "cuda" and config.train.deterministic:
        fix_order()
    collect(lambda: use_attention(config.train.attention, device, dtype, heads), problems)
    problems += device_problems(config, device, PRECISIONS[dtype], environment)
    nccl = collect(lambda: read_nccl_options(Path(axes.nccl_options)) if axes.nccl_options else {}, problems)
    values = {name: value_of(config, name) for name in SETTINGS if name not in OF_A_MACHINE}
    plan = {name: yaml_value(value) for name, value in values.items() if value != SETTINGS[name].default}
    plan |= {"device": device.type, "precision": PRECISIONS[dtype], "parallel.nccl_options": str(nccl)}
    timeout_s, layout = axes.startup_timeout_s, layout_of(config, environment.world_size)
    store = meet(environment, device, problems, plan, timeout_s=timeout_s, store=store)
    assert layout is not None, "a rank with problems has been refused"
    place = ParallelContext(layout, environment.rank, device, dtype, store=store)
    return join(place, timeout_s=after_report_s(timeout_s), needs=needs_of(fill_by_device(config, device)), nccl=nccl)


def needs_of(config: Config) -> GroupNeeds:
    """The process groups that the config asks for."""
    return GroupNeeds(
        tied_embeddings=config.model.tie_embeddings,
        kv_heads=config.model.num_key_value_heads,
        optimizer_instances=config.optimizer.instances if config.optimizer.zero else 1,
        context_ring=exchange_of(config).ring,
        background_saving=bool(config.checkpoint.asynchronous),
    )


def build_training(
    config: Config, context: ParallelContext, say: Callable[[str], object] = lambda line: None
) -> Training:
    """The model on its buffers and its optimizer, with no values in them yet. `config` is resolved. `say` is told what
    is chosen later, by what is measured."""
    settings, clock = config.optimizer, StepClock(context.device)
    replicas = ReplicaGroups.of_rank(context, zero=settings.zero > 0, instances=settings.instances)
    own = rank_buffers(config, context.layout, context.rank)
    buffers = TrainingBuffers(
        own.layout,
        dtype=context.dtype,
        device=context.device,
        dense=own.index["dense"],
        expert=own.index["expert"],
        gradient_dtype=dtype_of(settings.gradient_dtype, context.dtype),
        ema=settings.ema_half_life_steps is not None,
    )
    waiting = partial(clock.within, "communication")
    gather = ParameterGather(buffers, replicas, overlap=settings.overlap, waiting=waiting)
    chunks, sync, executor = build_model(config, context, buffers, replicas, gather, clock, say)
    scale = LossScale(settings, context.device) if context.dtype == torch.float16 else None
    spikes = SpikeWindow(config.train, context.device) if config.train.skip_spikes else None
    optimizer = make_optimizer(buffers, config, context)
    embeds, world = any(chunk.embeds for chunk in chunks), context.group("world")
    sizes = UpdateSizes(buffers, replicas, config, embeds=embeds, world=world) if config.log.update_sizes else None
    measures = scale, spikes, sizes, layer_norms(chunks, buffers, replicas, config, context), clock, embeds
    return Training(chunks, executor, buffers, optimizer, replicas, sync, gather, *measures)


def rebuilt(
    training: Training, config: Config, context: ParallelContext, say: Callable[[str], object] = lambda line: None
) -> Training:
    """The same parameters, optimizer and routers under a model that is built for another phase of the run."""
    training.gather.finish()
    of_model = training.buffers, training.replicas, training.gather, training.clock
    chunks, sync, executor = build_model(config, context, *of_model, say)
    for (_, value), (_, before) in zip(Routers(chunks).state(), Routers(training.chunks).state(), strict=True):
        value.copy_(before)
    norms = layer_norms(chunks, training.buffers, training.replicas, config, context)
    return replace(training, chunks=chunks, sync=sync, executor=executor, layer_norms=norms)


def build_model(
    config: Config,
    context: ParallelContext,
    buffers: TrainingBuffers,
    replicas: Mapping[Kind, ReplicaGroups],
    gather: ParameterGather,
    clock: StepClock,
    say: Callable[[str], object],
) -> tuple[list[GPT], GradientSync, Executor]:
    """This rank's parts of the model, whose parameters are in the buffers, and what runs them."""
    settings, axes = config.optimizer, config.parallel
    comm_dtype = dtype_of(settings.communication_dtype or settings.gradient_dtype, context.dtype)
    chunks = build_chunks(config, context, partial(clock.within, "exchange"))
    buffers.attach(*chunks)
    sync = GradientSync(buffers, chunks, replicas, comm_dtype=comm_dtype, overlap=settings.overlap)
    for chunk in chunks:
        chunk.before_use = gather.wait_for
    ways = {way: group for way in get_args(Direction) if (group := context.group(f"pp-{way}")) is not None}
    request = partial(ScheduleRequest, axes.schedule, axes.pp, vpp=axes.vpp, group_size=axes.microbatch_group_size)
    executor = Executor(
        chunks,
        context.coordinates["pp"],
        ways,
        lambda microbatches: build_schedule(request(microbatches)),
        partial(forward_only, axes.pp, axes.vpp),
        sync.expect_last,
        clock.switch,
        graph=graph_of(config, context),
        say=say,
    )
    return chunks, sync, executor


def layer_norms(
    chunks: list[GPT],
    buffers: TrainingBuffers,
    replicas: Mapping[Kind, ReplicaGroups],
    config: Config,
    context: ParallelContext,
) -> LayerNorms | None:
    """What measures activations and gradients, where it is asked for."""
    if not config.log.layer_norms_interval:
        return None
    counts = context.index("tp") == 0 or bool(config.parallel.sequence_parallel)
    embeds, world = any(chunk.embeds for chunk in chunks), context.group("world")
    return LayerNorms(chunks, buffers, replicas, config, counts=counts, embeds=embeds, world=world)


def build_chunks(config: Config, context: ParallelContext, waiting: Waiting) -> list[GPT]:
    """This rank's parts of the model, whose parameters have no storage of their own: the buffers will be it."""
    tp = TensorGroup.of(context.group("tp"))
    if config.parallel.async_tp and tp is not None:
        share_memory(tp)
    alltoall, ring, sharing = (TensorGroup.of(context.group(name)) for name in ("cp-alltoall", "cp-ring", "tp-cp"))
    cp = CpGroups(alltoall, ring, exchange_of(config).gathers, sharing, waiting) if context.size("cp") > 1 else None
    experts = ExpertRanks.of(context, waiting)
    build = partial(GPT, config, dtype=context.dtype, device=context.device, tp=tp, context=cp, expert_ranks=experts)
    chunks = [build(stage=stage) for stage in stages_of(stage_settings(config), context.coordinates["pp"])]
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        parameter.untyped_storage().resize_(0)
    return chunks


def data_share(context: ParallelContext) -> DataShare:
    """The part of each global batch that this rank reads."""
    sequence = CpShard(context.index("cp"), context.size("cp-ring"), context.size("cp-alltoall"))
    return DataShare(context.index("dp"), context.size("dp"), sequence)


def fill_with_start_values(
    buffers: TrainingBuffers, config: Config, context: ParallelContext, read_weights: ReadWeights | None = None
) -> None:
    """Parameters of a run without a checkpoint; each rank fills what it holds. They are those of the folder of
    checkpoint.init_from, read one by one, or as the seed draws them, like routers, which a dense model lacks."""
    records, folder = records_of(config, context.coordinates["pp"]), config.checkpoint.init_from
    drawn = [record for record in records if folder is None or record.precision == "master"]
    buffers.fill(start_values(drawn, config.seed, held=lambda record: buffers.places[record.name][0].shard))
    if folder is not None:
        assert read_weights is not None
        buffers.fill(read_weights(folder, config.model, {record.name for record in records}))


ASYNC_TP, CUDA_GRAPH = "parallel.async_tp", "train.cuda_graph"
GROUPS_ON_HOST = (
    "with experts needs their one kernel, whose groups no host knows: bf16, a GPU of compute capability 9 or 10, at "
    "most 1,023 experts, and model.hidden_size and model.moe.ffn_hidden_size multiples of 8"
)


def device_problems(
    config: Config, device: torch.device, precision: str, environment: ProcessEnvironment
) -> list[Problem]:
    """Settings that do not go with the device, or the precision (fp64, fp32, bf16 or fp16), that `auto` has chosen, and
    parallel.async_tp where the ranks of tp are on several hosts."""
    chosen, found = {"device": device.type, "precision": precision}, dict[str, str]()
    for (name, other, *_), rule in clashes(with_values(config, chosen)):
        if other in chosen and value_of(config, other) == "auto":  # else the rules have judged it
            found.setdefault(name, rule.replace("{1}", f"{other}=auto, which is {chosen[other]} here"))
    local, axes = environment.local_world_size, config.parallel
    if axes.async_tp and device.type == "cuda" and (local % axes.tp or not axes.order.startswith("tp")):
        found[ASYNC_TP] = f"needs all ranks of tp on one host, and {local} processes of this one do not fit"
    experts, sizes = config.model.moe.num_experts, (config.model.hidden_size, config.model.moe.ffn_hidden_size or 0)
    one_kernel = precision == "bf16" and is_one_kernel(device, torch.bfloat16, experts, *sizes)
    if config.train.cuda_graph and device.type == "cuda" and experts and not one_kernel:
        found[CUDA_GRAPH] = GROUPS_ON_HOST
    hints = {name: f"{name}={yaml_value(SETTINGS[name].default)}" for name in found}
    return [Problem(name, value_of(config, name), rule, hints[name]) for name, rule in found.items()]


def fill_by_device(config: Config, device: torch.device) -> Config:
    """Settings that follow from the kind of device alone. Compiling pays on CUDA, and costs a CPU more than it brings.
    A save behind the training takes cores, which a CPU trains with."""
    names = [name for name in ("train.compile", "checkpoint.async") if value_of(config, name) is None]
    return with_values(config, dict.fromkeys(names, device.type == "cuda"))


def derive_device(config: Config, context: ParallelContext, fit: Fit = lambda config, context: config) -> Config:
    """Settings that follow from the device; collective. UserError, alike on all ranks, where parallel.async_tp=true
    does not work on one. `fit` chooses the micro-batch size for a GPU, where nobody has set it."""
    group = TensorGroup.of(context.group("tp")) if config.parallel.async_tp else None
    if group is not None:
        why = why_products_cannot_send(group, context.dtype, context.device)
        if whys := [why for of_rank in context.gather_json([why] if why else []) for why in of_rank]:
            rule = f"products that send do not work here: {whys[0]}"
            raise UserError(Problem(ASYNC_TP, True, rule, f"{ASYNC_TP}=false"))
    config = fill_by_device(config, context.device)
    config = with_values(config, {"precision": PRECISIONS[context.dtype], ASYNC_TP: group is not None})
    return fit(config, context) if context.device.type == "cuda" and MICRO in config.derived else config


def graph_of(config: Config, context: ParallelContext) -> bool | None:
    """Whether microbatches are CUDA graphs; None: if it is measured that this pays. Unasked they are none with what has
    never been one on a GPU, nor where runs must repeat: a time that is measured may choose otherwise the next time."""
    asked: bool | None = value_of(config, CUDA_GRAPH)
    model, documents = config.model, not config.data.cross_document_attention
    new = (
        documents,
        config.train.attention == "flex",
        config.optimizer.qk_clip,
        model.moe.num_experts,
        model.dropout,
        model.attention_dropout,
        model.embedding_dropout,
        config.log.layer_norms_interval,
    )
    if asked is None and (any(new) or config.train.deterministic or context.world_size > 1 or context.device == CPU):
        return False
    return asked
