"""Performs any schedule on one pipeline rank: computes its actions, exchanges tensors as its instructions say.

The instructions (transfers.py) hold all decisions; here is only how each is done. Activations travel on one
communicator and gradients on another, so that the two directions between neighbours never wait for each other, also
where both neighbours are the same rank (pp = 2). An output is freed once it is sent: backward needs only its edge in
the graph, not its values. A single rank is a pipeline without transfers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from time import perf_counter
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.data.batch import Batch
from megalite.model.gpt import GPT
from megalite.pipeline.actions import Action, Direction, Place, Schedule
from megalite.pipeline.simulator import Span
from megalite.pipeline.transfers import Instruction, Transfer, Wait, instructions
from megalite.tensor_parallel.deferred import Later

ScheduleOf = Callable[[int], Schedule]  # the schedule of a number of microbatches
Phase = Literal["forward", "backward", "communication"]  # of a step
FIRST = 2  # microbatches before a graph's capture: they compile, choose kernels and fill caches, which no capture can
MEASURED = 2  # microbatches after them by which a graph is chosen: the least time counts, as a host may be held up
WORTH = 4  # a graph pays up to this many times the host's time: at 3 it saved 1.2 % on an H100 and 1.4 % on an H200
FORWARD_PART = 4  # a microbatch has at most this many times the launches of its forward pass: 3.6 times in GPT-2


class Executor:
    """Runs whole batches through the chunks of one rank, together with the other ranks of the pipeline.

    `groups`: the communicators of all ranks of the pipeline, in their order, for each direction; empty for a `rank`
    alone. `expect_last_gradients` is called before the backward that brings a chunk's last gradients, with a function
    that runs work after the weight gradients that this backward has deferred so far. `switch` is called when another
    phase of a training step begins. With `graph` a microbatch of a rank alone is one CUDA graph; None: if the first
    ones show that it pays, which is then told by `say`.
    """

    def __init__(
        self,
        chunks: Sequence[GPT],
        rank: int,
        groups: Mapping[Direction, dist.ProcessGroup],
        training: ScheduleOf,
        evaluation: ScheduleOf,
        expect_last_gradients: Callable[[int, Later], None],
        switch: Callable[[Phase], object] = lambda phase: None,
        graph: bool | None = False,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.chunks, self.rank, self.groups, self.device = chunks, rank, groups, chunks[0].device
        self.expect_last_gradients, self._switch = expect_last_gradients, switch
        self._graph = None if graph is False else MicrobatchGraph(chunks[0], graph, say)
        self._training, self._evaluation = training, evaluation
        self._plan = cache(lambda schedule_of, microbatches: instructions(schedule_of(microbatches))[rank])
        self._recorded: list[Span] | None = None
        # Waits for what was sent: nothing that is computed needs to.
        self.aside = torch.cuda.Stream(self.device) if self.device.type == "cuda" and groups else None
        self.at: Instruction | None = None  # the newest that was begun
        self.performed = 0  # instructions so far
        self.profiled = False  # in a step that is, no time chooses a graph: the host is slow
        self._open_links()

    def forward_backward(self, batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """Forward and backward of all microbatches. The sum of their losses (`GPT.loss`), 0 where the loss is not."""
        taken = {True} if self.profiled else {True, None}
        if self._graph is not None and self._graph.wanted in taken and self._recorded is None:
            self._switch("forward")
            self.performed += len(batches)
            return sum((self._graph(batch, scale) for batch in batches), start=torch.zeros_like(scale))
        return sum(self._run(self._training, batches, scale), start=torch.zeros_like(scale))

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """Forward alone; the sum of the losses as in `forward_backward`."""
        return sum(self._run(self._evaluation, batches, scale), start=torch.zeros_like(scale))

    @torch.no_grad()
    def hidden(self, batch: Batch) -> Tensor | None:
        """The final hidden states of a microbatch (`GPT.forward`), where the pipeline ends; None elsewhere."""
        return next(iter(self._run(self._evaluation, [batch], None)), None)

    @contextmanager
    def recording(self) -> Iterator[list[Span]]:
        """Collects when each action began and ended (`time.perf_counter`); the device is waited for around each."""
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def _open_links(self) -> None:
        """Send one number over every link, in one order on all ranks: NCCL connects a pair of ranks when they first
        speak, which blocks the host; the schedule does not allow for that wait."""
        token = torch.zeros(1, device=self.device)
        for direction, group in self.groups.items():
            for sender in range(group.size()):
                receiver = (sender + (1 if direction == "forward" else -1)) % group.size()
                if self.rank == sender:
                    dist.send(token, group=group, group_dst=receiver)
                elif self.rank == receiver:
                    dist.recv(token, group=group, group_src=sender)

    def _run(self, schedule_of: ScheduleOf, batches: Sequence[Batch], scale: Tensor | None) -> list[Tensor]:
        """What the pipeline's end makes of each microbatch: its loss, or without a `scale` its hidden states."""
        run = _Run(self, batches, scale)
        for instruction in self._plan(schedule_of, len(batches)):
            self.at, self.performed = instruction, self.performed + 1
            if torch.is_grad_enabled():  # in training
                self._switch(instruction.place[0] if isinstance(instruction, Action) else "communication")
            if isinstance(instruction, Transfer):
                run.post(instruction)
            elif isinstance(instruction, Wait):
                run.wait(instruction.transfer)
            else:
                begin = self._now()
                run.compute(instruction)
                if self._recorded is not None:
                    self._recorded.append(Span(instruction, begin, self._now()))
        return run.results

    def _now(self) -> float:
        if self._recorded is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()


class _Run:
    """One batch on its way through the pipeline."""

    def __init__(self, executor: Executor, batches: Sequence[Batch], scale: Tensor | None) -> None:
        self._executor, self._chunks, self._batches, self._scale = executor, executor.chunks, batches, scale
        self.results: list[Tensor] = []  # of each microbatch, where the pipeline ends
        self._received: dict[Place, Tensor] = {}  # and not used yet
        self._computed: dict[Place, Tensor] = {}  # and not sent yet
        self._travelling: dict[Transfer, tuple[dist.Work, Tensor]] = {}  # it uses its tensor until it is waited for
        # Between forward and backward, by chunk and microbatch: the chunk's input (None where tokens enter), and the
        # edge of the activation that was sent, or of the loss.
        self._in_flight: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}

    def post(self, transfer: Transfer) -> None:
        group = self._executor.groups[transfer.direction]
        if transfer.role == "send":
            tensor = self._computed.pop(transfer.place)
            work = dist.isend(tensor, group=group, group_dst=transfer.peer)
        else:
            chunk, batch = self._chunks[transfer.chunk], self._batches[transfer.microbatch]
            tensor = torch.empty(chunk.activation_shape(batch), dtype=chunk.dtype, device=chunk.device)
            work = dist.irecv(tensor, group=group, group_src=transfer.peer)
        assert work is not None, "this rank is in the group"
        self._travelling[transfer] = work, tensor

    def wait(self, transfer: Transfer) -> None:
        work, tensor = self._travelling.pop(transfer)
        aside = self._executor.aside if transfer.role == "send" else None
        try:
            with torch.cuda.stream(aside):  # None: where it is
                work.wait()
        except RuntimeError as error:
            raise type(error)(f"pipeline rank {self._executor.rank} could not {transfer}: {error}") from error
        if transfer.role == "receive":
            self._received[transfer.place] = tensor
        elif aside is not None:
            tensor.record_stream(aside)  # its memory is free for others once it is sent

    def compute(self, action: Action) -> None:
        if action.kind == "forward":
            self._forward(action)
        elif action.kind == "backward-weight":
            self._chunks[action.chunk].deferred.run_next()
        else:
            self._backward(action)

    def _forward(self, action: Action) -> None:
        chunk, batch = self._chunks[action.chunk], self._batches[action.microbatch]
        received = self._received.pop(action.place, None)
        if received is not None and torch.is_grad_enabled():
            received.requires_grad_()
        output = chunk(batch, received) if self._scale is None else chunk.loss(batch, self._scale, received)
        if torch.is_grad_enabled():
            self._in_flight[action.chunk, action.microbatch] = received, get_gradient_edge(output)
        if chunk.has_loss:
            self.results.append(output.detach())
        else:
            self._computed[action.place] = output.detach().contiguous()

    def _backward(self, action: Action) -> None:
        """The whole backward pass, or all but the weight gradients of the linears."""
        received, output = self._in_flight.pop((action.chunk, action.microbatch))
        gradient = self._received.pop(action.place, None)  # None: the output is the loss
        deferred = self._chunks[action.chunk].deferred
        if action.microbatch == len(self._batches) - 1:
            self._executor.expect_last_gradients(action.chunk, deferred.put)
        with deferred.collecting() if action.kind == "backward-input" else nullcontext():
            torch.autograd.backward((output,), (gradient,))
        if received is not None:
            assert received.grad is not None
            self._computed[action.place] = received.grad.contiguous()


class MicrobatchGraph:
    """Forward and backward of a microbatch of a whole model as one CUDA graph: the host starts all kernels by one call.

    All microbatches must have the shape of the first. A graph repeats the launches of its capture, on the same
    addresses and with the same numbers from the host. So what differs between microbatches is copied to tensors of its
    own, and gradients are added to main gradients, which stay in place. Whatever the host decides anew in each
    microbatch (exchanges between ranks, rows of experts that no kernel reads on the device) cannot be in it: such
    settings are refused. `wanted` None: two microbatches are timed, and decide.
    """

    def __init__(self, model: GPT, wanted: bool | None, say: Callable[[str], object]) -> None:
        self._model, self.wanted, self._say = model, wanted, say
        self._seen, self._shape, self._times = 0, torch.Size(), list[tuple[float, float]]()
        self._repeat: Callable[[], None] | None = None

    def __call__(self, batch: Batch, scale: Tensor) -> Tensor:
        """Adds the microbatch's gradients; its loss, as `GPT.loss` scales it."""
        if batch.tokens.shape != self._shape:  # of the first, or the loop has halved them
            self._shape, self._seen, self._repeat = batch.tokens.shape, 0, None
            self._times.clear()
        self._seen += 1
        if self._seen <= FIRST or self.wanted is False:
            return self._compute(batch, scale)
        if self.wanted is None:
            loss, times = timed(partial(self._model.loss, batch, scale))
            self._decide(times)
            return loss
        self._repeat = self._repeat or self._capture(batch, scale)
        self._batch.fill(batch)
        self._scale.copy_(scale)
        self._repeat()
        return self._loss.clone()

    def _decide(self, times: tuple[float, float]) -> None:
        self._times.append(times)
        if len(self._times) < MEASURED:
            return
        host, device = map(min, zip(*self._times, strict=True))
        self.wanted = device < WORTH * host
        words = "one call starts each microbatch from now on" if self.wanted else "kernels are started one by one"
        took = f"a microbatch takes {device * 1e3:.1f} ms, and the host {host * 1e3:.1f} ms to start it"
        self._say(f"train.cuda_graph=null: {words}, as {took}")

    def _capture(self, batch: Batch, scale: Tensor) -> Callable[[], None]:
        self._batch, self._scale = batch.map(torch.clone), scale.clone()
        try:
            self._loss, repeat = captured(lambda: self._compute(self._batch, self._scale))
        except Exception as error:  # whatever a kernel's own compiler raises
            # torch is left on the capture's stream and, up to 2.11, with its memory (pytorch#180395): no way goes on.
            advice = "train.cuda_graph=false starts kernels one by one"
            if isinstance(error, torch.OutOfMemoryError):
                advice = f"memory is short: {advice}, and a smaller train.micro_batch_size needs less"
            raise RuntimeError(f"microbatches cannot be a CUDA graph here: {advice}") from error
        return repeat

    def _compute(self, batch: Batch, scale: Tensor) -> Tensor:
        loss = self._model.loss(batch, scale)
        loss.backward()
        return loss.detach()


def timed(forward: Callable[[], Tensor]) -> tuple[Tensor, tuple[float, float]]:
    """The loss of `forward`, whose backward is run, and seconds: how long the host takes to start both, and how long
    they take from an empty queue on. On CUDA a host that is 1,024 launches ahead waits, as in backward of a deep model,
    so the host's time is counted by the forward pass where that says less."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    begin = perf_counter()
    loss = forward()
    forward_s = perf_counter() - begin
    loss.backward()
    host_s = min(perf_counter() - begin, FORWARD_PART * forward_s)
    end.record()
    end.synchronize()
    return loss.detach(), (host_s, start.elapsed_time(end) / 1e3)


def captured(body: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """The tensor that `body` returns, and a function that fills it. Nothing is run yet."""
    graph = torch.cuda.CUDAGraph()
    # "global", the default, breaks the capture where another thread pins memory, as the reader of batches does.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = body()
    return found, graph.replay
