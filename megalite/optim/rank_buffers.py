"""The buffers of any rank of any world and the memory that they take, from the config alone. No torch import.

Parameters and gradients are whole on every rank of a model; of masters and of the optimizer's state each of the ranks
that share it has its part. Activations and what travels come on top. With AdamW the sums are those of Megatron-LM's
distributed optimizer: 6 + 12/d bytes in bf16, 8 + 8/d in fp32 (in fp16, where it sums gradients in fp16, 4 + 16/d).
"""

from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from megalite.config.layout import stage_settings
from megalite.config.schema import OPTIMIZERS, Config, OptimizerConfig
from megalite.layout.buffer_layout import BufferLayout, Kind, buffer_layout
from megalite.layout.parameters import ParameterRecord, is_held
from megalite.layout.ranks import GroupNeeds, ParallelLayout, groups_of
from megalite.layout.stages import stages_of
from megalite.model.parameters import gpt_parameters

KINDS: tuple[Kind, ...] = ("dense", "expert")
# Elements of matrices that Muon updates together: few enough for a CPU core's cache, and enough to fill a GPU.
STACK = {"cpu": 1 << 18, "cuda": 1 << 24}
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class RankBuffers:
    """Buffers of `rank`. `owners`: the ranks that share the optimizer's state with it, in the order of their slices."""

    rank: int
    layout: BufferLayout
    owners: dict[Kind, tuple[int, ...]]

    @property
    def index(self) -> dict[Kind, int]:
        """Which slice of every bucket is the rank's own, by kind of parameters."""
        return {kind: ranks.index(self.rank) for kind, ranks in self.owners.items()}


def rank_buffers(config: Config, world: ParallelLayout, rank: int) -> RankBuffers:
    """`config` is resolved for `world`, its vocabulary included."""
    zero, instances, at = config.optimizer.zero > 0, config.optimizer.instances, world.coordinates(rank)
    groups = groups_of(world, rank, GroupNeeds(optimizer_instances=instances if zero else 1))
    whole = config.optimizer.ownership == "whole" or config.optimizer.name == "muon"
    owners: dict[Kind, tuple[int, ...]] = {}
    for kind in KINDS:
        shard, _ = replica_groups(kind, zero=zero, instances=instances)
        owners[kind] = (groups[shard].ranks if shard else ()) or (rank,)
    layout = buffer_layout(
        records_of(config, at["pp"]),
        tp=(world.tp, at["tp"]),
        etp=(world.etp or 1, at.get("etp", 0)),
        ep=(world.ep, at.get("ep", 0)),
        dense_shards=len(owners["dense"]),
        expert_shards=len(owners["expert"]),
        bucket_size=config.optimizer.bucket_size,
        ownership="whole" if whole else "even",
    )
    return RankBuffers(rank, layout, owners)


def records_of(config: Config, pp_rank: int) -> list[ParameterRecord]:
    """The records of what one pipeline rank holds, chunk by chunk."""
    records, stages = records_of_model(config), stages_of(stage_settings(config), pp_rank)
    return [record for stage in stages for record in records if is_held(record, stage)]


def records_of_model(config: Config) -> list[ParameterRecord]:
    """All parameters; `stacked` are those that are matrices to the optimizer."""
    records = gpt_parameters(config.model, sequence_parallel=bool(config.parallel.sequence_parallel))
    if config.optimizer.name == "muon":
        routers = config.optimizer.muon.router
        records = [one if _is_matrix(one, routers=routers) else replace(one, stacked=None) for one in records]
    return records


def _is_matrix(record: ParameterRecord, *, routers: bool) -> bool:
    """Whether Muon has the parameter: no vector, and a router, in the masters' precision, only with `routers`."""
    if record.stacked is None:
        return False
    *rows, columns = record.shape[record.stacked :]
    return min(prod(rows), columns) >= 2 and (routers or record.precision == "model")


def replica_groups(kind: Kind, *, zero: bool, instances: int) -> tuple[str | None, str | None]:
    """The groups whose ranks each own a slice of the optimizer's state, and whose ranks own the same slices."""
    replicas = "dp-cp" if kind == "dense" else "edp"
    if not zero:
        return None, replicas
    return (replicas, None) if instances == 1 else (f"{replicas}-shard", f"{replicas}-replicate")


class StateBytes(NamedTuple):
    """Bytes of what training keeps: of one element of each kind, or of all that one rank holds."""

    parameters: int
    gradients: int
    masters: int  # 0 where the parameters are the masters
    optimizer: int  # its state beside the masters, and their averages

    @property
    def total(self) -> int:
        return sum(self)


def bytes_of_element(
    precision: str, optimizer: OptimizerConfig, *, matrix: bool = True, master_precision: bool = False
) -> StateBytes:
    """Bytes of one element of a matrix, or of another parameter. In fp64 everything that is fp32 elsewhere is fp64.

    `master_precision` is for parameters that have the masters' dtype in every precision (`ParameterRecord.precision`).
    """
    wide = "fp64" if precision == "fp64" else "fp32"
    stored = wide if master_precision else precision
    kept = OPTIMIZERS[optimizer.name][0 if matrix else 1]
    named = [optimizer.moment_dtype if dtype == "moment_dtype" else dtype for dtype in kept]
    named += [] if optimizer.ema_half_life_steps is None else ["fp32"]
    gradients, *state = (BYTES[wide if dtype == "fp32" else dtype] for dtype in (optimizer.gradient_dtype, *named))
    return StateBytes(BYTES[stored], gradients, 0 if stored == wide else BYTES[wide], sum(state))


def bytes_of_rank(layout: BufferLayout, precision: str, optimizer: OptimizerConfig) -> StateBytes:
    """The bytes that one rank keeps, padding included; the same for all ranks that exchange the layout's buckets."""
    kept = StateBytes(0, 0, 0, 0)
    for bucket in layout.buckets:
        wide = bucket.precision == "master"
        element = bytes_of_element(precision, optimizer, matrix=bucket.whole, master_precision=wide)
        counts = [bucket.size] * 2 + [bucket.slice_size] * 2
        kept = StateBytes(*(sum_ + count * size for sum_, count, size in zip(kept, counts, element, strict=True)))
    return kept


def bytes_of_update(config: Config, world: ParallelLayout, layout: BufferLayout, device: str = "cuda") -> int:
    """The most that an update by Muon (muon.py) works on beside what is kept: gradients, momentum and U of a stack, or
    five tensors of products. Where ranks share matrices, their parts leave, arrive and return, too: gloo holds what has
    left until it next sends."""
    wide, muon = BYTES["fp64" if config.precision == "fp64" else "fp32"], config.optimizer.muon
    of_products = muon.dtype or ("fp32" if config.precision == "fp32" else "bf16")
    narrow = wide if config.precision == "fp64" else BYTES[of_products]
    most = [0]
    for kind in KINDS if config.optimizer.name == "muon" else ():
        buckets = [bucket for bucket in layout.buckets if bucket.whole and bucket.kind == kind]
        matrices = [slot.record.shape[slot.record.stacked :] for bucket in buckets for slot in bucket.slots]
        shared = (world.tp if kind == "dense" else world.etp or 1) > 1
        travelling = 3 * narrow * sum(bucket.slice_size for bucket in buckets) if shared else 0
        stack = max(STACK[device], *map(prod, matrices)) if matrices else 0
        most.append(travelling + max(2 * wide + narrow, 5 * narrow) * stack)
    return max(most)
