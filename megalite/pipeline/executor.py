"""Performs the table of any schedule on one pipeline rank: computes its actions, exchanges tensors as its records say.

The records (transfers.py) hold all decisions; here is only how each is done. Activations travel on one communicator and
gradients on another, so that the two directions between neighbours never wait for each other, also where both
neighbours are the same rank (pp = 2). An output is let go once it is sent: backward starts from its edge in the graph,
which needs no values. A single rank is a pipeline without transfers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from time import perf_counter
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.data.batch import Batch
from megalite.model.gpt import GPT
from megalite.pipeline.actions import Action, Schedule
from megalite.pipeline.timeline import Span
from megalite.pipeline.transfers import Direction, Program, Record, Transfer, Wait, programs

TableOf = Callable[[int], Schedule]  # the table for so many microbatches
Part = Literal["forward", "backward", "communication"]
Switch = Callable[[Part], object]  # told in training when another part of a step begins
Later = Callable[[Callable[[], None]], None]  # does what it is given: now, or after the work that has been put off
LastGradients = Callable[[int, Later], None]  # hears that the next backward brings a chunk's last gradients, each Later
End = Callable[[GPT, Batch, Tensor | None], Tensor]  # what becomes of a microbatch in the chunk with the loss


@dataclass(frozen=True)
class Links:
    """A rank's place in its pipeline and the communicators of all its ranks, in their order, for each direction."""

    rank: int = 0
    groups: Mapping[Direction, dist.ProcessGroup] = field(default_factory=dict)  # empty: one rank alone

    def patience(self, way: Direction, device: torch.device) -> timedelta | None:
        """How long a transfer may take: the time-out of its group now. gloo's transfers know only the one with which
        the group was made. None: NCCL watches over its own, and a wait with a time-out would hold its host."""
        if device.type == "cuda":
            return None
        timeout: timedelta = self.groups[way]._get_backend(device).options._timeout
        return timeout

    def told(self, transfer: Transfer) -> str:
        """A transfer for whoever reads why a run has ended."""
        what = "activations" if transfer.direction == "forward" else "gradients"
        way = "to" if transfer.role == "send" else "from"
        return f"pipeline rank {self.rank}, {what} of microbatch {transfer.microbatch} {way} rank {transfer.peer}"


@dataclass
class _InFlight:
    """What a microbatch leaves in a chunk between its forward and its backward pass."""

    received: Tensor | None  # the chunk's input; None where tokens enter
    output: GradientEdge  # of the activation that was sent, or of the loss


class Executor:
    """Runs whole batches through the chunks of one rank, together with the other ranks of the pipeline."""

    def __init__(
        self,
        chunks: Sequence[GPT],
        links: Links,
        table: TableOf,
        evaluation_table: TableOf,
        gradients: LastGradients,
        switch: Switch = lambda part: None,
    ) -> None:
        self._chunks, self._links, self._gradients, self._switch = chunks, links, gradients, switch
        self._tables = {"training": table, "evaluation": evaluation_table}
        self._plans: dict[tuple[str, int], tuple[Schedule, Program]] = {}
        self._recorded: list[Span] | None = None
        self._open_links()

    def train(self, batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """Forward and backward of all microbatches. The sum of their losses (`GPT.loss`), 0 where the loss is not."""
        return sum(self._run("training", batches, _loss(scale)), start=torch.zeros_like(scale))

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """Forward alone; the sum of the losses as in `train`."""
        return sum(self._run("evaluation", batches, _loss(scale)), start=torch.zeros_like(scale))

    @torch.no_grad()
    def hidden(self, batch: Batch) -> Tensor | None:
        """The final hidden states of a microbatch (`GPT.forward`), where the pipeline ends; None elsewhere."""
        found = self._run("evaluation", [batch], lambda chunk, batch, received: chunk(batch, received))
        return found[0] if found else None

    @contextmanager
    def recording(self) -> Iterator[list[Span]]:
        """Collects when each action began and ended (`time.perf_counter`); the device is waited for around each."""
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def _run(self, table: str, batches: Sequence[Batch], end: End) -> list[Tensor]:
        schedule, program = self._plan(table, len(batches))
        run = _Run(self._chunks, self._links, schedule, batches, end, self._gradients)
        for record in program:
            if table == "training":
                self._switch(_part(record))
            if isinstance(record, Transfer):
                run.issue(record)
            elif isinstance(record, Wait):
                run.wait(record.transfer)
            elif self._recorded is None:
                run.compute(record)
            else:
                self._recorded.append(_timed(run.compute, record, self._chunks[0].device))
        return run.results

    def _plan(self, table: str, microbatches: int) -> tuple[Schedule, Program]:
        """Made once for each number of microbatches."""
        if (table, microbatches) not in self._plans:
            schedule = self._tables[table](microbatches)
            self._plans[table, microbatches] = schedule, programs(schedule)[self._links.rank]
        return self._plans[table, microbatches]

    def _open_links(self) -> None:
        """One message over every link, in one order on all ranks: NCCL connects a pair of ranks when they first speak,
        and its host waits for that, which no order of records allows for."""
        rank = self._links.rank
        for way, group in self._links.groups.items():
            step = 1 if way == "forward" else -1
            token = torch.zeros(1, device=self._chunks[0].device)
            for sender in range(group.size()):
                receiver = (sender + step) % group.size()
                if rank == sender:
                    dist.send(token, group=group, group_dst=receiver)
                elif rank == receiver:
                    dist.recv(token, group=group, group_src=sender)


def _at_once(work: Callable[[], None]) -> None:
    work()


def _loss(scale: Tensor) -> End:
    return lambda chunk, batch, received: chunk.loss(batch, scale, received)


def _part(record: Record) -> Part:
    if not isinstance(record, Action):
        return "communication"
    return "forward" if record.kind == "forward" else "backward"


def _timed(compute: Callable[[Action], None], action: Action, device: torch.device) -> Span:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = perf_counter()
    compute(action)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Span(action, begin, perf_counter())


class _Run:
    """One batch on its way through the pipeline."""

    def __init__(
        self,
        chunks: Sequence[GPT],
        links: Links,
        schedule: Schedule,
        batches: Sequence[Batch],
        end: End,
        gradients: LastGradients,
    ) -> None:
        self._chunks, self._links, self._schedule = chunks, links, schedule
        self._batches, self._end, self._gradients = batches, end, gradients
        self.results: list[Tensor] = []  # of each microbatch, where the pipeline ends
        self._here: dict[int, Tensor] = {}  # by number: received and not used yet, or made and not sent yet
        self._travelling: dict[int, tuple[dist.Work, Tensor]] = {}  # a transfer reads or writes its tensor until waited
        self._in_flight: dict[tuple[int, int], _InFlight] = {}  # by chunk and microbatch

    # --- transfers ---------------------------------------------------------------------------------------------------

    def issue(self, transfer: Transfer) -> None:
        group = self._links.groups[transfer.direction]
        if transfer.role == "send":
            tensor = self._here.pop(transfer.number)
            work = dist.isend(tensor, group=group, group_dst=transfer.peer)
        else:
            chunk, batch = self._chunks[transfer.chunk], self._batches[transfer.microbatch]
            tensor = torch.empty(chunk.activation_shape(batch), dtype=chunk.dtype, device=chunk.device)
            work = dist.irecv(tensor, group=group, group_src=transfer.peer)
        assert work is not None, "this rank is in the group"
        self._travelling[transfer.number] = work, tensor

    def wait(self, transfer: Transfer) -> None:
        work, tensor = self._travelling.pop(transfer.number)
        patience = self._links.patience(transfer.direction, tensor.device)
        try:
            work.wait() if patience is None else work.wait(patience)
        except RuntimeError as error:
            raise type(error)(f"{self._links.told(transfer)}: {error}") from error
        if transfer.role == "receive":
            self._here[transfer.number] = tensor

    # --- actions -----------------------------------------------------------------------------------------------------

    def compute(self, action: Action) -> None:
        if action.kind == "forward":
            self._forward(action)
        elif action.kind == "backward-weight":
            self._backward_weight(action)
        else:
            self._backward(action)

    def _forward(self, action: Action) -> None:
        chunk, batch = self._chunks[action.chunk], self._batches[action.microbatch]
        received = self._input(action)
        if received is not None and torch.is_grad_enabled():
            received.requires_grad_()
        if chunk.has_loss:
            output = self._end(chunk, batch, received)
            self.results.append(output.detach())
        else:
            output = chunk(batch, received)
        if torch.is_grad_enabled():
            self._in_flight[action.chunk, action.microbatch] = _InFlight(received, get_gradient_edge(output))
        self._output(action, output.detach())

    def _backward(self, action: Action) -> None:
        """The whole of it, or all but the weight gradients of the linears."""
        in_flight = self._in_flight.pop((action.chunk, action.microbatch))
        gradient = self._input(action)  # None: the output is the loss
        split = action.kind == "backward-input"
        deferred = self._chunks[action.chunk].deferred
        if action.microbatch == self._schedule.microbatches - 1:
            self._gradients(action.chunk, deferred.put if split else _at_once)
        with deferred.collecting() if split else nullcontext():
            torch.autograd.backward((in_flight.output,), (gradient,))
        if in_flight.received is not None:
            assert in_flight.received.grad is not None
            self._output(action, in_flight.received.grad)

    def _backward_weight(self, action: Action) -> None:
        self._chunks[action.chunk].deferred.run_next()

    def _input(self, action: Action) -> Tensor | None:
        number = self._schedule.needed(self._links.rank, action)
        return None if number is None else self._here.pop(number)

    def _output(self, action: Action, tensor: Tensor) -> None:
        number = self._schedule.made(self._links.rank, action)
        if number is not None:
            self._here[number] = tensor.contiguous()
