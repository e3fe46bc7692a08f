"""The state of a run: what a checkpoint holds, the saver, which writes it when it is due, and what keeps it sound.

A checkpoint holds named logical tensors (masters, the optimizer's state, parameters where they differ from the masters)
and a handful of numbers. Learning rate, data order and dropout masks are functions of the step.

When a save fails, training goes on, and the last checkpoint stays. A run whose weights or moments are not finite has
failed and is not saved. Finite weights are trusted only after a later step was applied, because that step's loss was
computed with them. The newest checkpoint of trusted weights is never deleted. Ranks that drift apart (bad memory, a
collective gone wrong) train on silently with a loss curve that looks normal, so now and then they compare hashes of
what they should hold alike.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint.commit import STATE, committed, step_name
from megalite.checkpoint.manifest import Piece, boxes
from megalite.checkpoint.reading import Found, inspect
from megalite.checkpoint.run_folder import OF_STATE, RunFolder
from megalite.checkpoint.store import BackgroundSaves, CheckpointError, Saved, save
from megalite.checkpoint.uploads import Uploads
from megalite.config.files import as_record
from megalite.config.settings import as_plain, leaves
from megalite.data.samples import Position
from megalite.errors.problems import Problem, UserError, several
from megalite.launch.context import ParallelContext, rank0_broadcast
from megalite.layout.buffer_layout import Kind, OwnedRange, slice_ranges
from megalite.layout.parameters import is_replicated
from megalite.model.gpt import Routers
from megalite.optim.buffers import EMA, ranges_of
from megalite.optim.optimizer import slices_of
from megalite.train.build import Training
from megalite.train.history import seals
from megalite.train.phases import take_up_phases

if TYPE_CHECKING:
    from megalite.train.loop import Job

CHUNK = 1 << 22  # elements hashed at a time: bounds the int64 copy
MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as a signed 64-bit number: Fibonacci hashing
ROUNDED = "parameter"  # kind of the tensors that are masters in the model's dtype: a resume rounds masters anew
ROUTERS = "blocks"  # what routers keep beside their parameters
OF_OPTIMIZER = "optimizer"  # kind of its numbers, which are the step count
OF_MODEL = {"master", EMA, ROUNDED, ROUTERS}  # kinds that no optimizer has


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0  # steps done, skipped ones and those of train.skip_steps included
    samples: int = 0  # consumed: the whole state of the data
    tokens: int = 0  # unmasked tokens of the steps that were applied
    bad_steps: int = 0  # steps that were skipped, in all
    empty_steps: int = 0  # steps without an unmasked token, which are not applied either
    bad_steps_in_a_row: int = 0  # but for those of fp16 that look for a loss scale
    last_applied: int = 0  # the newest step that changed weights; those before it have led to a finite loss
    rolled_back: int = 0  # the step after which the run went back to a checkpoint (train.rollback_after), the newest


@dataclass(frozen=True)
class SavedState:
    """A checkpoint's state.json. Fields with a default may be missing there."""

    progress: Progress
    data: dict[str, str]  # that the run was trained on: its fingerprint and description
    config: dict[str, Any]
    loss_scale: list[float] | None = None
    spikes: list[list[float]] = field(default_factory=list)  # SpikeWindow.known
    tokenizer: dict[str, str] = field(default_factory=dict)  # hash of each file of its folder
    record: dict[str, Any] = field(default_factory=dict)  # seals of the files of the record, as they were then
    layout: dict[str, int] = field(default_factory=dict)
    position: Position = field(default_factory=Position)  # in the data
    phases: list[dict[str, Any]] = field(default_factory=list)  # that have begun: `begun_phase` of each
    torch: str = torch.__version__

    @classmethod
    def of(cls, found: Found) -> "SavedState":
        return as_record(cls, found.state, found.path / STATE)


def restore(job: "Job", found: Found) -> None:
    """The state of a checkpoint, whatever layout wrote it; collective."""
    branches = job.base.checkpoint.branch_from is not None and found.path.is_symlink()
    if (origin := found.manifest.about.get("run_id", job.folder.run_id)) != job.folder.run_id and not branches:
        rule = f"it is of run {origin}, and the folder is that of run {job.folder.run_id}"
        remedy = "take it out of this folder; to continue its run, copy the whole run folder and set run_dir to it"
        raise UserError(Problem(str(found.path), "of another run", rule, remedy))
    state = read_state(job, found)
    job.resumed_from, job.progress, job.tokenizer_files = found.manifest.step, state.progress, state.tokenizer
    job.seals = {} if branches else state.record
    take_up_phases(job, state)


def read_state(job: "Job", found: Found) -> SavedState:
    """All that training has changed becomes what a checkpoint holds, but for the job's progress; collective."""
    state, training = SavedState.of(found), job.training
    kinds, pieces, buffers = (
        {kind_of(name) for name in found.manifest.tensors},
        training_pieces(training),
        training.buffers,
    )
    unread, before, now = {ROUNDED}, leaves(state.config), leaves(as_plain(job.config))
    if any(before.get(name, now[name]) != now[name] for name in OF_STATE):
        dropped, begun = kinds - OF_MODEL, {kind_of(piece.name) for piece in pieces} - OF_MODEL
        named = ", ".join(["step count" if kind == OF_OPTIMIZER else kind for kind in sorted(dropped)])
        job.log.note(f"the optimizer's state begins anew: {named} of the checkpoint are dropped")
        unread |= dropped | begun
        for piece in (piece for piece in pieces if kind_of(piece.name) in begun):
            piece.tensor.zero_()  # a rollback finds what later steps have left
    if other := (EMA in kinds) != (EMA in buffers.kept):
        unread.add(EMA)
        words = "of the checkpoint is dropped" if EMA in kinds else "begins with those of the checkpoint"
        job.log.note(f"optimizer.ema_half_life_steps: the average of the weights {words}")
    found.read_into(pieces, unread=lambda name: kind_of(name) in unread)
    if other and EMA in buffers.kept:
        buffers.average(torch.ones((), device=buffers.device))
    training.cast_and_gather_params()
    if training.loss_scale is not None and state.loss_scale is not None:  # not if it was no fp16 run
        training.loss_scale.state.copy_(torch.tensor(state.loss_scale))
    if training.spikes is not None:
        same = before["train.seq_length"] == now["train.seq_length"]  # else its losses say nothing
        training.spikes.fill(state.spikes if same else [])
    return state


def roll_back(job: "Job") -> None:
    """The run goes on from the newest good checkpoint, with the samples after the newest step; collective. Raises
    TrainingStoppedError where there is none since it went back the last time: these weights would fail again."""
    now, context, folder = job.progress, job.context, job.folder.checkpoints
    job.saver.wait()
    job.phase = "in a rollback"
    job.training.gather.finish()
    steps = rank0_broadcast(context, lambda: [step for step, _ in committed(folder)])
    good = (folder / step_name(step) for step in steps if now.rolled_back < step < now.last_applied)
    found = next((it for it in (inspect(path, context) for path in good) if isinstance(it, Found)), None)
    bad = f"{several(now.bad_steps_in_a_row, 'step')} in a row until step {now.step} were not applied"
    if found is None:
        since = f"since step {now.rolled_back}, where the run went back," if now.rolled_back else "so far"
        words = f"{bad}, and no good checkpoint was written {since} to go back to (train.rollback_after)"
        raise TrainingStoppedError(f"{words}. {advice(job.folder, context, now.last_applied)}.")
    state, back = read_state(job, found), found.manifest.step
    over = f"steps {back + 1} to {now.step}, samples {state.progress.samples:,} to {now.samples - 1:,}, are passed over"
    words = f"{bad}; from the state of step {back} on, {over}"
    job.log.event("rolled_back", now.step, checkpoint=back, message=words)
    went_back = {"rolled_back": now.step, "last_applied": back + 1, "bad_steps_in_a_row": 0}
    job.progress, job.phase = replace(now, tokens=state.progress.tokens, **went_back), "training"


def training_pieces(training: Training) -> list[Piece]:
    """Every tensor that a resumed run needs, as pieces over this rank's slices of the live buffers."""
    buffers, state = training.buffers, training.optimizer.state()
    kinds = {**buffers.kept, **slices_of(state)}
    if any(part is not master for part, master in zip(buffers.parameters, buffers.masters, strict=True)):
        kinds[ROUNDED] = buffers.parameters
    pieces = [piece for kind, slices in kinds.items() for piece in owned_pieces(f"{kind}.", buffers.owned, slices)]
    pieces += [Piece(name, (len(value),), (0,), value) for name, value in Routers(training.chunks).state()]
    numbers = [(name, number) for name, number in state.items() if isinstance(number, Tensor)]
    return pieces + [Piece(f"{OF_OPTIMIZER}.{name}", (1,), (0,), number) for name, number in numbers]


def kind_of(name: str) -> str:
    """What a saved tensor is of its parameter: master, exp_avg, ..."""
    return name.partition(".")[0]


@torch.no_grad()
def not_finite(pieces: Sequence[Piece]) -> list[str]:
    """Names of the tensors that hold an infinity or no number: one pass over the memory, one wait for the device."""
    extremes = torch.stack([torch.stack(piece.tensor.aminmax()).double() for piece in pieces])  # [pieces, 2]
    return [piece.name for piece, fine in zip(pieces, extremes.isfinite().all(dim=1).tolist(), strict=True) if not fine]


def state_bytes(training: Training, context: ParallelContext) -> int:
    """On rank 0 the bytes that a checkpoint needs on disk, but for a few KiB; collective."""
    own = [[piece.name, prod(piece.logical_shape) * piece.tensor.element_size()] for piece in training_pieces(training)]
    whole = {name: size for of_rank in context.gather_json(own, to_first=True) for name, size in of_rank}
    return sum(whole.values())


def owned_pieces(prefix: str, owned: Iterable[OwnedRange], slices: Sequence[Tensor]) -> Iterator[Piece]:
    """The elements of each parameter in the slices (one flat tensor per bucket), as boxes of logical tensors."""
    for each in (each for each in owned if len(slices[each.bucket])):
        record = each.slot.record
        for at, sizes, first in boxes(each.in_box.start, each.in_box.stop, each.box.sizes):
            begin = each.in_slice.start - each.in_box.start + first
            offsets = tuple(outer + inner for outer, inner in zip(each.box.offsets, at, strict=True))
            tensor = slices[each.bucket][begin : begin + prod(sizes)].view(sizes)
            yield Piece(f"{prefix}{record.name}", record.shape, offsets, tensor)


class TrainingStoppedError(RuntimeError):
    """The run cannot go on; the message, the same on all ranks, says why and what to try."""


class Saver:
    """Writes the checkpoints of one run. With `checkpoint.async` a save goes on behind the training until the next one,
    or the end of the run, waits for it: an error that ends the run is raised only there, at the same step on all ranks.
    """

    def __init__(self, job: "Job") -> None:
        self._job, self._seals = job, seals(job.folder.path)
        self.saved_step = self._tried_step = job.resumed_from  # the newest complete one, once no save is under way
        self._background = BackgroundSaves(job.context) if job.config.checkpoint.asynchronous else None
        if self._background is not None:
            job.training.optimizer.before_change = self._background.before_change
        self._under_way: tuple[int, Future[Saved]] | None = None  # the newest save, and of which step
        self.uploads = Uploads(job.remote, job.folder, job.context, job.config.checkpoint.keep)
        if job.resumed_from is not None:
            self.uploads.offer(job.resumed_from, job.progress.last_applied)

    def save(self, step: int) -> None:
        """Write the state after `step`, or begin to; a failure is reported, not raised."""
        begun, job = time.perf_counter(), self._job
        self.wait()
        self._tried_step, job.phase = step, "in a save"
        folder, applied, keep = job.folder, job.progress.last_applied, job.config.checkpoint.keep
        scale, layout, pieces = job.training.loss_scale, job.context.layout, training_pieces(job.training)
        spikes = job.training.spikes
        plain = asdict(  # of this very step, whenever it is written
            SavedState(
                job.progress,
                {"fingerprint": job.data.fingerprint, "description": job.data.description},
                as_plain(job.config),
                loss_scale=None if scale is None else scale.state.tolist(),
                spikes=[] if spikes is None else spikes.known(),
                tokenizer=job.tokenizer_files,
                record=next(self._seals) if job.context.rank == 0 else {},
                position=job.position,
                phases=job.begun,
                layout={axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "vpp", "dp", "world_size")},
            )
        )
        how: dict[str, Any] = {"labels": folder.labels, "lost": folder.lost, "good_before": applied}
        how["spared"] = lambda: self.uploads.step

        def write(pieces: Sequence[Piece], context: ParallelContext) -> Saved:
            ruined = [name for of_rank in context.gather_json(not_finite(pieces)[:1]) for name in of_rank]
            if ruined:
                words = f"the state after step {step} is not finite ({ruined[0]}), so it is not saved"
                raise TrainingStoppedError(f"{words}. {advice(folder, context, applied)}.")
            try:
                return save(folder.checkpoints, step, pieces, plain, context, keep, **how)
            except CheckpointError:
                if why := rank0_broadcast(context, folder.lost):
                    words = f"the checkpoint of step {step} was not saved, and this job has ended"
                    raise TrainingStoppedError(f"{words}: {why}") from None
                raise

        if self._background is not None:
            self._under_way = step, self._background.begin(pieces, write, begun=begun)
        else:
            self._finish(step, lambda: write(pieces, job.context))
        job.phase = "training"

    def save_last(self) -> None:
        """Save the state in which the run ends, unless the loop has tried that, and wait for it."""
        if self._tried_step != self._job.progress.step:
            self.save(self._job.progress.step)
        self.wait()

    def wait(self) -> None:
        """Wait for the save under way: then `saved_step` is what is on disk. All ranks call it at the same point."""
        if self._under_way is not None:
            (step, future), self._under_way, self._job.phase = self._under_way, None, "in a save"
            self._finish(step, future.result)
            self._job.phase = "training"

    def report(self) -> None:
        """Report the save under way if it has ended: this rank alone, which may know before others."""
        future = None if self._under_way is None else self._under_way[1]
        if future is not None and future.done() and not isinstance(future.exception(), TrainingStoppedError):
            self.wait()
        self.uploads.report(self._job.log.event)

    def close(self) -> None:
        """The run ends for another reason, which is the one that is reported. A save under way comes to its end, unless
        it takes longer than ranks wait for each other: its disk may hang for good."""
        if self._under_way is not None:
            futures.wait([self._under_way[1]], self._job.config.parallel.timeout_s)
            with suppress(Exception):
                self.report()
        self.end_uploads(hasty=True)

    def end_uploads(self, *, hasty: bool) -> str:
        """Wait for the upload under way, for less where the run does not end by itself; what is not uploaded then."""
        job = self._job
        return self.uploads.end(lambda: hasty or job.stop.requested, job.log.note, job.log.event)

    def advise(self) -> str:
        """`advice` once no save is under way; collective."""
        self.wait()
        return advice(self._job.folder, self._job.context, self._job.progress.last_applied)

    def _finish(self, step: int, result: Callable[[], Saved]) -> None:
        """Report what became of the save of `step`."""
        log = self._job.log
        try:
            saved = result()
        except CheckpointError as error:
            log.event("checkpoint_failed", self._job.progress.step, message=str(error))
            return
        self.saved_step = step
        self._job.status.write("running", step)
        self.uploads.offer(step, self._job.progress.last_applied)
        seconds, stall_s = round(saved.seconds, 3), round(saved.stall_s, 3)
        log.event("checkpoint", step, bytes=saved.bytes, seconds=seconds, stall_s=stall_s)


def advice(folder: RunFolder, context: ParallelContext, applied: int) -> str:
    """For a run that ends with bad steps, the newest good one being `applied`: which checkpoint holds good weights, and
    what to try; collective."""

    def kept() -> str:
        steps = [step for step, _ in committed(folder.checkpoints)]
        good, doubtful = ([step for step in steps if (step < applied) is is_good] for is_good in (True, False))
        words = f"The checkpoint of step {good[0]} is intact" if good else "No checkpoint holds earlier weights"
        moved = f"move those of steps {doubtful} out of {folder.checkpoints}" if good else "set another run_dir"
        return f"{words}; to go on from there, {moved}" if doubtful else words

    words = "Try a lower optimizer.lr, a longer lr.warmup_steps, a smaller optimizer.clip_grad, precision=fp32"
    return f"{rank0_broadcast(context, kept)}. {words}, or look at the data of these steps"


def check_replicas(training: Training, context: ParallelContext, step: int) -> None:
    """TrainingStoppedError, the same on all ranks of the world, unless all replicas hold equal state; collective."""
    found = {rank for parts, group in _replicas(training, context) for rank in different_ranks(parts, group)}
    different = sorted({rank for of_rank in context.gather_json(sorted(found)) for rank in of_rank})
    if different:
        raise TrainingStoppedError(
            f"step {step}: parameters or moments of ranks {different} differ from those of ranks that should hold the "
            "same. Something changed them outside of training (bad memory, a faulty collective). Start again to "
            "continue from the newest checkpoint, without the hosts of these ranks if it happens again."
        )


def _replicas(training: Training, context: ParallelContext) -> Iterator[tuple[list[Tensor], dist.ProcessGroup | None]]:
    """Tensors that all ranks of a group hold alike, by group. Data-parallel ranks share parameters, and those of
    different optimizer replicas also masters and state; tensor-parallel ranks what is not split, and some of them
    key-value heads; the ends of a pipeline a tied embedding; the ranks of a layer what balances its experts; all ranks
    the window of spikes."""
    buffers = training.buffers
    training.gather.finish()
    if training.spikes is not None:
        yield [training.spikes.values], context.group("world")
    slices = [*buffers.kept.values(), *slices_of(training.optimizer.state()).values()]
    axes_of: dict[Kind, str] = {"dense": "dp-cp", "expert": "edp"}
    for kind, axes in axes_of.items():
        numbers = [at for at, bucket in enumerate(buffers.layout.buckets) if bucket.kind == kind]
        if numbers:
            yield [buffers.parameter_buckets[at] for at in numbers], context.group(axes)
            yield [kept[at] for kept in slices for at in numbers], training.replicas[kind].replicate_group
    shared = {
        "tp": slice_ranges(buffers.owned, lambda record, _: record.split is None),
        "kv-replicas": slice_ranges(buffers.owned, is_replicated),
        "word-embedding": slice_ranges(buffers.owned, lambda record, _: "word-embedding" in record.partial_over),
    }
    for axes, ranges in shared.items():
        yield [part for kept in slices for part in ranges_of(kept, ranges)], context.group(axes)
    for axes in ("dp-cp", "tp"):
        yield [value for _, value in Routers(training.chunks).state()], context.group(axes)


def different_ranks(parts: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[int]:
    """The global ranks of `group` whose `parts` differ from what most of its ranks hold; all, where no such is. None
    where there is no group. The answer is the same on all ranks of the group."""
    if group is None or not parts:
        return []
    mine = torch.stack([content_hash(part.flatten()) for part in parts])
    hashes = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(hashes, mine, group=group)
    values = [tuple(value.tolist()) for value in hashes]
    (common, votes), *others = Counter(values).most_common(2)
    undecided = any(count == votes for _, count in others)  # of two that differ, either may be the wrong one
    return [dist.get_global_rank(group, at) for at, value in enumerate(values) if undecided or value != common]


def content_hash(tensor: Tensor) -> Tensor:
    """An int64 hash (0-d, on the tensor's device) of the bits of a 1-D tensor; position and value both count."""
    bits = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        position = torch.arange(start, start + part.numel(), device=tensor.device)
        mixed = (part ^ (position * MULTIPLIER)) * MULTIPLIER
        total += (mixed ^ (mixed >> 29)).sum()  # sums wrap around: exact, and independent of their order
    return total
