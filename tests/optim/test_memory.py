"""What training keeps in memory is what the formula says, and a step makes no copy of parameters or gradients.

Counted is all that torch allocates on the CPU, on all threads: also what a kernel or gloo takes and frees within one
call. Whoever only keeps needs no other ranks (torch's fake ones do not exist); steps are those of real gloo ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

from megalite.config.derive import derive
from megalite.config.schema import Config, MuonConfig, OptimizerConfig
from megalite.data.batch import whole_batch
from megalite.launch.context import ParallelContext
from megalite.launch.device import DTYPES
from megalite.launch.startup import join
from megalite.layout.buffer_layout import buffer_layout
from megalite.layout.parameters import ParameterRecord
from megalite.layout.ranks import GroupNeeds, ParallelLayout
from megalite.optim import adamw, muon, zero
from megalite.optim.buffers import TrainingBuffers
from megalite.optim.optimizer import slices_of
from megalite.optim.rank_buffers import StateBytes, bytes_of_element, bytes_of_rank, bytes_of_update
from megalite.train import step as step_module
from megalite.train.build import Training, build_training, derive_device
from megalite.train.step import TrainStep
from tests.optim.allocations import allocations_of
from tests.ranks import run_ranks

SMALL = 1 << 16  # bytes: rotary tables, step count, loss scale, the profiler's own
PART = 0.1  # of the gradients' bytes: what a step may take beside what is kept
MOMENTS = {"moment_dtype": "bf16"}
NARROW = {"gradient_dtype": "bf16", **MOMENTS}
AVERAGED: dict[str, Any] = {"ema_half_life_steps": 9.0}


# --- the formula -----------------------------------------------------------------------------------------------------


def per_parameter(element: StateBytes, shards: int) -> float:
    """What a rank keeps for each parameter, where `shards` ranks share masters and moments."""
    return element.parameters + element.gradients + (element.masters + element.optimizer) / shards


@pytest.mark.parametrize("shards", [1, 2, 3, 64])
def test_bytes_per_parameter_are_megatrons_for_the_same_dtypes(shards: int) -> None:
    """Its docs/user-guide/features/dist_optimizer.md, with bf16 and with fp32 parameters, and fp32 gradients."""
    assert per_parameter(of_element("bf16"), shards) == 6 + 12 / shards
    assert per_parameter(of_element("fp32"), shards) == 8 + 8 / shards


def of_element(precision: str, **settings: Any) -> StateBytes:
    return bytes_of_element(precision, OptimizerConfig(**settings))


def test_settings_change_only_what_they_name() -> None:
    assert of_element("bf16") == StateBytes(parameters=2, gradients=4, masters=4, optimizer=8)
    assert of_element("fp16") == of_element("bf16")
    assert of_element("bf16", gradient_dtype="bf16") == StateBytes(2, 2, 4, 8)
    assert of_element("bf16", moment_dtype="bf16") == StateBytes(2, 4, 4, 6)
    assert of_element("fp32") == StateBytes(4, 4, 0, 8)
    assert of_element("fp64") == StateBytes(8, 8, 0, 16)
    assert bytes_of_element("bf16", OptimizerConfig(), master_precision=True) == of_element("fp32")
    assert of_element("bf16", **AVERAGED) == StateBytes(2, 4, 4, 12)
    assert of_element("fp64", **AVERAGED) == StateBytes(8, 8, 0, 24)
    assert of_element("bf16", name="muon", **AVERAGED) == StateBytes(2, 4, 4, 8)


def test_a_layout_takes_its_padding_and_its_routers_precision_into_account() -> None:
    matrix = ParameterRecord("matrix", (10, 7), "normal", 1.0, decay=True, place=0)  # 70 elements: 128 in its slot
    router = replace(matrix, name="router", shape=(3, 5), precision="master")  # 64
    layout = buffer_layout([matrix, router], dense_shards=3)
    assert bytes_of_rank(layout, "bf16", OptimizerConfig()) == StateBytes(
        parameters=2 * 192 + 4 * 192, gradients=4 * (192 + 192), masters=4 * 64, optimizer=8 * (64 + 64)
    )


# --- what is kept ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """What one rank keeps, in bytes: by the formula for its layout, in its tensors, and by all that was allocated."""

    layout: StateBytes
    tensors: StateBytes
    allocated: int
    shards: int
    parameters: int  # their number, without padding


def config_of(*, hidden: int, vocabulary: int, layers: int = 1, tp: int = 1, **optimizer: Any) -> Config:
    config = Config(device="cpu", tokenizer="byte", seed=7)
    sizes: dict[str, Any] = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": 4}
    config.model = replace(config.model, **sizes, vocab_size=vocabulary, tie_embeddings=False)
    config.train = replace(
        config.train, steps=4, global_batch_size=192, micro_batch_size=1, seq_length=8, compile=False
    )
    config.parallel = replace(config.parallel, tp=tp)
    config.optimizer = replace(config.optimizer, **optimizer)
    return config


@contextmanager
def rank_of(dp: int, *, tp: int = 1, instances: int = 1) -> Iterator[ParallelContext]:
    """The last of so many ranks; the others do not exist."""
    world, layout, needs = dp * tp, ParallelLayout(tp=tp, dp=dp), GroupNeeds(optimizer_instances=instances)
    if world == 1:
        yield ParallelContext()
        return
    dist.init_process_group("fake", rank=world - 1, world_size=world, store=FakeStore())
    try:
        yield join(ParallelContext(layout, world - 1), timeout_s=10, needs=needs)
    finally:
        dist.destroy_process_group()


def keep(context: ParallelContext, config: Config) -> Kept:
    config = derive_device(derive(config, context.world_size), context)
    training, allocations = allocations_of(lambda: build_training(config, context))
    number = sum(parameter.numel() for parameter in training.chunks[0].parameters())
    group = training.replicas["dense"].shard_group
    shards = 1 if group is None else group.size()
    return Kept(by_layout(training, config), in_tensors(training), allocations.left, shards, number)


def by_layout(training: Training, config: Config) -> StateBytes:
    return bytes_of_rank(training.buffers.layout, config.precision, config.optimizer)


def in_tensors(training: Training) -> StateBytes:
    """Of whole storages, each counted where it is met first."""
    buffers, state = training.buffers, slices_of(training.optimizer.state())
    beside = [*chain(*state.values()), *buffers.averages]
    seen: set[int] = set()

    def new(tensors: Iterable[Tensor]) -> int:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        found = storages.keys() - seen
        seen.update(found)
        return sum(storages[each] for each in found)

    parameters = new([*buffers.parameter_buckets, *training.chunks[0].parameters()])
    gradients = new([*buffers.gradient_buckets, *buffers.gradients])
    return StateBytes(parameters, gradients, new(buffers.masters), new(beside))


def assert_kept(kept: Kept, config: Config, precision: str, replicas: int) -> None:
    assert kept.tensors == kept.layout
    assert kept.layout.total <= kept.allocated <= kept.layout.total + SMALL
    assert kept.shards == (replicas // config.optimizer.instances if config.optimizer.zero else 1)
    each = bytes_of_element(precision, config.optimizer)
    assert kept.allocated == pytest.approx(kept.parameters * per_parameter(each, kept.shards), rel=0.02)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(
    ("dp", "tp", "options"),
    [
        (1, 1, {}),
        (3, 1, {}),
        (64, 1, {}),
        (4, 1, {"bucket_size": 1}),
        (4, 1, {"zero": 0}),
        (4, 1, {"instances": 2}),
        (2, 2, {}),
        (3, 1, AVERAGED),
    ],
)
def test_a_rank_keeps_what_the_formula_says(dp: int, tp: int, options: dict[str, Any], precision: str) -> None:
    narrower: dict[str, list[dict[str, Any]]] = {"bf16": [NARROW], "fp16": [MOMENTS], "fp32": [MOMENTS]}
    with rank_of(dp, tp=tp, instances=options.get("instances", 1)) as context:
        for dtypes in ({}, *narrower.get(precision, [])):
            config = config_of(hidden=128, vocabulary=1003, tp=tp, **options, **dtypes)
            assert_kept(keep(replace(context, dtype=DTYPES[precision]), config), config, precision, dp)


def masters_beside_the_parameters(patch: pytest.MonkeyPatch) -> None:
    init = TrainingBuffers.__init__

    def and_copy(self: TrainingBuffers, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.masters = [part.clone() for part in self.masters]

    patch.setattr(TrainingBuffers, "__init__", and_copy)


def test_a_second_copy_that_stays_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(hidden=128, vocabulary=1003)
    masters_beside_the_parameters(monkeypatch)
    with rank_of(2) as context:
        kept = keep(context, config)
    with pytest.raises(AssertionError):
        assert_kept(kept, config, "fp32", 2)


# --- what a step takes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taken:
    """Bytes of one rank that trains."""

    kept: StateBytes
    peak: int  # the most at any moment of the step
    left: int  # after it
    slices: int  # of this rank's slices of the parameters or of the gradients, whichever are less
    update: int  # what the formula allows an update


def many_matrices(**optimizer: Any) -> Config:
    """A model of which most is matrices of few shapes, eight of each, and a stack of Muon's one or two of them."""
    return config_of(hidden=256, vocabulary=512, layers=8, name="muon", **optimizer)


def large(**optimizer: Any) -> Config:
    """A model next to whose gradients the activations of a few tokens, tiles, pieces and messages are small."""
    return config_of(hidden=512, vocabulary=20480, **optimizer)


def take(context: ParallelContext, config: Config) -> Taken:
    """Of a step with two microbatches and its gather, counted from the building of the model on: nothing is older."""
    config = derive_device(derive(config, context.world_size), context)
    tokens = torch.arange(config.train.seq_length).view(1, -1)
    batch = whole_batch(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool), tokens, None, 0)

    def build_and_train() -> Training:
        training = build_training(config, context)
        for master in training.buffers.masters:
            master.fill_(0.01)
        training.cast_and_gather_params()
        step = TrainStep(training, config.optimizer, context)
        with record_function("step"):
            figures = step([batch, batch], 2 * tokens.numel(), 1e-3).read()
            training.gather.finish()
        assert not figures.skipped
        return training

    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN copies what a CPU without bf16 multiplies
        training, allocations = allocations_of(build_and_train)
    buffers = training.buffers
    slices = min(sum(part.nbytes for part in parts) for parts in (buffers.gradients, buffers.parameters))
    update = bytes_of_update(config, context.layout, buffers.layout, "cpu")
    return Taken(by_layout(training, config), allocations.peak("step"), allocations.left, slices, update)


def assert_no_copy(taken: Taken) -> None:
    assert taken.left <= taken.kept.total + SMALL
    assert taken.peak <= taken.kept.total + taken.update + PART * taken.kept.gradients


MORE = pytest.mark.long


@pytest.mark.parametrize(
    ("ranks", "dtype", "options"),
    [
        (1, torch.bfloat16, NARROW),
        (1, torch.float32, {"cautious": True}),
        (2, torch.float32, {}),
        (2, torch.bfloat16, MOMENTS),
        (2, torch.float32, {"zero": 0}),
        (2, torch.bfloat16, AVERAGED),
        (4, torch.float32, {"instances": 2}),
        pytest.param(2, torch.bfloat16, NARROW, marks=MORE),
        pytest.param(2, torch.float32, {"overlap": False}, marks=MORE),
        pytest.param(2, torch.float64, {"bucket_size": 1 << 22}, marks=MORE),
        pytest.param(4, torch.float16, {}, marks=MORE),
    ],
)
def test_a_step_copies_no_parameters_or_gradients(ranks: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    needs = GroupNeeds(optimizer_instances=options.get("instances", 1))
    for taken in run_ranks(take, ranks, large(**options), dtype=dtype, needs=needs):
        assert taken.slices > PART * taken.kept.gradients, "a copy of them would not be seen"
        assert_no_copy(taken)


@pytest.mark.parametrize(("tp", "optimizer"), [(1, {}), (2, {}), (1, {"muon": MuonConfig(nesterov=False)})])
def test_an_update_by_muon_works_on_a_stack_at_a_time(tp: int, optimizer: dict[str, Any]) -> None:
    config, layout = many_matrices(**optimizer), ParallelLayout(tp=tp, dp=2 // tp)
    config.parallel = replace(config.parallel, tp=tp)
    for taken in run_ranks(take, 2, config, layout=layout, dtype=torch.float32):
        if tp == 1:
            assert_no_copy(taken)
        else:  # what was sent stays until a thread of gloo lets it go
            assert taken.peak <= taken.kept.total + taken.update + PART * taken.kept.gradients


def gradients_copied_for_the_norm(context: ParallelContext, config: Config) -> Taken:
    norm = step_module.norm_of
    step_module.norm_of = lambda parts: norm([part.clone() for part in parts])
    return take(context, config)


def buckets_copied_for_the_sync(context: ParallelContext, config: Config) -> Taken:
    start = zero.bucket_reduce_scatter
    zero.bucket_reduce_scatter = lambda bucket, group, *, comm_dtype: start(
        bucket.clone(), group, comm_dtype=comm_dtype
    )
    return take(context, config)


def slices_copied_for_the_gather(context: ParallelContext, config: Config) -> Taken:
    start, sent = zero.bucket_all_gather, []

    def copy_and_start(bucket: Tensor, group: dist.ProcessGroup) -> Any:
        sent.append(bucket.chunk(group.size())[group.rank()].clone())
        return start(bucket, group)

    zero.bucket_all_gather = copy_and_start
    return take(context, config)


def moments_widened_at_once(context: ParallelContext, config: Config) -> Taken:
    adamw.PIECE = 1 << 60
    return take(context, config)


def matrices_updated_at_once(context: ParallelContext, config: Config) -> Taken:
    muon.STACK = {"cpu": 1 << 60}
    return take(context, config)


def test_matrices_that_are_updated_at_once_are_caught() -> None:
    taken, _ = run_ranks(matrices_updated_at_once, 2, many_matrices(), dtype=torch.float32)
    with pytest.raises(AssertionError):
        assert_no_copy(taken)


@pytest.mark.parametrize(
    ("mutant", "options"),
    [
        (gradients_copied_for_the_norm, {}),
        (buckets_copied_for_the_sync, {}),
        (slices_copied_for_the_gather, {}),
        (moments_widened_at_once, MOMENTS),
    ],
)
def test_a_copy_that_is_freed_again_is_caught(mutant: Callable[..., Taken], options: dict[str, Any]) -> None:
    taken, _ = run_ranks(mutant, 2, large(**options), dtype=torch.float32)
    with pytest.raises(AssertionError):
        assert_no_copy(taken)
