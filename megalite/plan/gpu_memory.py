"""The memory that one rank's training takes on a GPU, from the config alone, and the microbatch that fits.

What stays is known to the byte (rank_buffers.py). What forward keeps for backward are the tensors that compiled blocks
were seen to keep, with attention that stores no probabilities. At the peak all of it is there, and the largest of what
comes and goes: the logits of a chunk, or what the last block's backward works on. An update has the room of both, but
not of CUDA graphs, which keep it. Ranks of experts are taken to have equal shares of the rows.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.config.derive import derive, micro_batch_sizes, schedule_request
from megalite.config.files import read_yaml
from megalite.config.layout import exchange_of, local_heads, stage_settings
from megalite.config.rules import schedule_flaws
from megalite.config.schema import Config
from megalite.config.settings import with_values
from megalite.config.step_plan import batch_sizes, micro_batch_is_fixed
from megalite.errors.problems import UserError
from megalite.layout.ranks import ParallelLayout
from megalite.layout.stages import stages_of
from megalite.model.parameters import padded_vocabulary, shared_width
from megalite.optim.rank_buffers import BYTES, bytes_of_rank, bytes_of_update, rank_buffers
from megalite.pipeline.actions import in_flight
from megalite.pipeline.schedules import SCHEDULES

if TYPE_CHECKING:
    from megalite.launch.context import ParallelContext

GROUP = "parallel.microbatch_group_size"
OUTSIDE = 1 << 30  # bytes of kernels' code, of cuDNN and of NCCL, which torch's allocator does not see
MARGIN = 0.1  # of the memory: gaps between tensors, and what the formula does not know
MOST_TOKENS = 1 << 16  # in a microbatch, the most that were measured: GPT-2 of 124M gained 6 % from 32,768 on
WORKSPACES = 80 << 20  # bytes that cuBLAS and cuBLASLt take from torch's allocator


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by what they are for."""

    state: int  # parameters, gradients, masters, moments
    activations: int  # of all microbatches in flight
    passing: int  # the largest that comes and goes
    outside: int = OUTSIDE

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def fit_micro_batch(config: Config, context: "ParallelContext") -> Config:
    """The micro-batch size becomes the largest that all GPUs have room for, the smallest where none has; a run that
    goes on keeps what it had, if that suits and fits. It stays where memory must not decide. Collective."""
    import torch

    from megalite.launch.context import all_ranks_or_raise, rank0_broadcast

    if micro_batch_is_fixed(config):
        return config
    world = context.layout
    sizes = [size for size in micro_batch_sizes(config, world.world_size) if _suits(config, size, world.world_size)]
    kept = rank0_broadcast(context, lambda: _recorded(config))

    def own() -> tuple[int, bool, str]:
        room = torch.cuda.mem_get_info(context.device)[0] + torch.cuda.memory_reserved(context.device)
        largest = largest_that_fits(config, sizes, world, context.rank, room)
        needed = _needed(config, largest, world, context.rank)
        keeps = kept in sizes and _needed(config, kept, world, context.rank) <= room
        words = f"{needed / 2**30:,.1f} GiB by the formula, and {room / 2**30:,.1f} are free on rank {context.rank}"
        return largest, keeps, f"even train.micro_batch_size={largest} needs {words}" if needed > room else ""

    largest, keep, short = zip(*context.gather_json([*all_ranks_or_raise(context, own)]), strict=True)
    less = "train.recompute=full, or a larger parallel.tp or parallel.pp, needs less"
    warning = [f"warning: {words}: {less}" for words in short if words][:1]
    size = kept if all(keep) else min(largest)
    return replace(with_size(config, size, world.world_size), told=(*config.told, *warning))


def _suits(config: Config, size: int, world_size: int) -> bool:
    """Whether every batch of the run is a sound schedule of microbatches of that size."""
    request, batches = schedule_request(with_size(config, size, world_size), world_size), batch_sizes(config.train)
    counts = {request.microbatches * batch // batches[-1] for batch in batches}
    return not any([*schedule_flaws(replace(request, microbatches=count))] for count in counts)


def _recorded(config: Config) -> int:
    """The micro-batch size of the run that goes on; 0: no run is there, or a torn one, which is judged later."""
    with suppress(UserError, LookupError, TypeError, ValueError):
        return int(read_yaml(Path(config.run_dir, "config.yaml"))["train"]["micro_batch_size"])
    return 0


def largest_that_fits(config: Config, sizes: Sequence[int], world: ParallelLayout, rank: int, room: int) -> int:
    """The largest of the ascending micro-batch sizes that this rank has `room` for, in bytes; else the smallest."""
    most = MOST_TOKENS * config.parallel.cp // config.train.seq_length
    fitting = (size for size in reversed(sizes) if size <= most and _needed(config, size, world, rank) <= room)
    return next(fitting, sizes[0])


def _needed(config: Config, size: int, world: ParallelLayout, rank: int) -> float:
    """Free bytes that training with that micro-batch size needs, the margin among them."""
    return rank_memory(with_size(config, size, world.world_size), world, rank).total / (1 - MARGIN)


def with_size(config: Config, size: int, world_size: int) -> Config:
    """A copy with that micro-batch size, and what follows from it."""
    values = {"train.micro_batch_size": size} | ({GROUP: None} if GROUP in config.derived else {})
    return derive(with_values(config, values), world_size)


def rank_memory(config: Config, world: ParallelLayout, rank: int) -> Memory:
    """`config` is resolved for `world`, vocabulary, precision and train.compile included."""
    from megalite.model.loss import CHUNK_TOKENS, PIECE_ELEMENTS  # with torch

    model, train, axes, at = config.model, config.train, config.parallel, world.coordinates(rank)
    layout, width = rank_buffers(config, world, rank).layout, BYTES[config.precision]
    state = bytes_of_rank(layout, config.precision, config.optimizer).total
    tokens = train.micro_batch_size * train.seq_length // axes.cp
    stream = model.hidden_size * width
    local = stream / (axes.tp if axes.sequence_parallel else 1)
    layers = model.num_layers if train.recompute_layers is None else train.recompute_layers
    again = range(layers if train.recompute == "full" else 0)
    kept, passing, stages = 0.0, 0.0, stages_of(stage_settings(config), at["pp"])
    for stage in stages:
        kept += local  # what enters
        for layer in stage.layers:
            block, beside = _block(config, layer)
            kept += local if layer in again else block
            passing = max(passing, beside + (block if layer in again else 0))
    held = in_flight(SCHEDULES[str(axes.schedule)](schedule_request(config, world.world_size), at["pp"]))
    passing *= tokens
    if stages[-1].loss:
        chunk = min(tokens, model.loss_chunk_tokens or CHUNK_TOKENS["cuda"])
        logits = chunk * padded_vocabulary(model) // axes.tp * width
        logits += 0 if train.compile else 12 * min(PIECE_ELEMENTS["cuda"], logits // width)  # of three fp32 tensors
        passing = max(passing, logits + 2 * stream * tokens)  # beside it the hidden states and their gradient
    activations = int(tokens * kept * held / axes.vpp)
    update = bytes_of_update(config, world, layout)
    if config.log.update_sizes:  # a copy of masters
        update += max(width, 4) * sum(bucket.slice_size for bucket in layout.buckets)
    graphs = world.world_size == 1 and train.cuda_graph is not False
    passing = passing + update if graphs else max(passing, update - activations)
    return Memory(state, activations, int(passing) + WORKSPACES)


def _block(config: Config, layer: int) -> tuple[float, float]:
    """Bytes of a token in one block: what it keeps for its backward, and what that works on besides."""
    model, train, axes, width = config.model, config.train, config.parallel, BYTES[config.precision]
    again = frozenset(train.recompute_modules if train.recompute == "selective" else ())
    (heads, groups), size = local_heads(config), model.head_size
    stream = model.hidden_size / (axes.tp if axes.sequence_parallel else 1)
    queries, projected, rope = heads * size, (heads + 2 * groups) * size, model.position == "rope"
    kept = stream * (2 if "norm" in again else 4)  # the sums with attention and with the MLP; both norms
    kept += projected * (rope + (model.qk_norm or not rope))  # as they leave the product, and turned
    kept += stream if width > 2 else 0  # the product with attention, apart from its sum
    attended = queries + 4 * heads / width  # with the logarithm of each denominator
    attended += projected + queries if axes.cp > 1 else 0  # as they travel
    grouped = heads != groups and config.precision == "fp32"
    whole = model.attention_dropout or grouped or config.precision == "fp64"  # no kernel works in tiles
    probabilities = heads * train.seq_length / exchange_of(config).ring if whole else 0.0
    # Compiled blocks with turned heads that have no norm keep them whatever is asked for.
    kept += 0 if "attention" in again and (model.qk_norm or not rope) else attended
    kept += 0 if "attention" in again else probabilities * (2 if model.attention_dropout else 1)
    core = 2 * projected + stream + probabilities * (1 + 4 / width)
    core += attended + 2 * probabilities if "attention" in again else 0
    if model.has_experts(layer):
        mlp, work = _experts(config, again)
    else:
        mlp, work = _mlp(config, model.ffn_hidden_size, again, eager=not train.compile)
    return width * (kept + mlp), width * max(work, core - mlp)


def _mlp(config: Config, inner: int, again: frozenset[str], *, eager: bool) -> tuple[float, float]:
    """Numbers of a token in an MLP: kept, and what its backward works on. `eager`: it is not compiled."""
    inner, gates = inner // config.parallel.tp, 1 + config.model.gated
    kept = inner * (gates + ("activation" not in again) + (eager and gates == 2))
    return kept, inner * (gates + ("activation" in again or (eager and gates == 1)))


def _experts(config: Config, again: frozenset[str]) -> tuple[float, float]:
    """Numbers of a token in a router and its experts, where it is one row for each expert that it goes through."""
    moe, axes, width = config.model.moe, config.parallel, BYTES[config.precision]
    gates, etp, h = 1 + config.model.gated, axes.etp or axes.tp, config.model.hidden_size
    part = 1 / axes.tp if axes.sequence_parallel else 1.0
    rows, inner = moe.top_k * etp * part, moe.ffn_hidden_size / etp
    kept = rows * (h + inner * gates * ("moe" not in again))
    kept += part * (8 * moe.num_experts + 48 * moe.top_k) / width  # fp32 logits and probabilities; choices and places
    at_activation = h + (3 + gates * (2 if "moe" in again else 1)) * inner
    work = rows * max(at_activation, 2 * h + (1 + gates) * inner)
    shared, of_shared = _mlp(config, shared_width(config.model), again, eager=True)
    return kept + shared, max(work, of_shared)
