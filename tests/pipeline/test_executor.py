"""The executor does what the records say and nothing else, keeps nothing longer than they need it, and computes what
one process computes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from megalite.config.schedule_request import ScheduleRequest
from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.model.gpt import GPT
from megalite.pipeline import executor as executor_module
from megalite.pipeline.actions import Action, Direction, Schedule
from megalite.pipeline.executor import Executor
from megalite.pipeline.schedules import build_schedule, forward_only
from megalite.pipeline.transfers import Instruction, Transfer, Wait, instructions
from megalite.tensor_parallel.deferred import Later
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.train.evaluate import evaluate as evaluate_batches
from megalite.train.evaluate import sample
from tests.model.small import gpt, zero_main_grads
from tests.pipeline.stages import microbatches, run_pipeline, stages_config, started

SCHEDULES = [(2, "1f1b", 1), (4, "1f1b", 1), (2, "gpipe", 1), (4, "zb-h1", 1), (2, "interleaved", 2)]
ONE = torch.ones((), dtype=torch.float64)


# --- records ---------------------------------------------------------------------------------------------------------


@dataclass
class FakeNetwork:
    """In the place of torch.distributed for one rank alone: writes down what is asked of it, and delivers numbers
    that tell where and when they were received."""

    events: list[Any] = field(default_factory=list)
    posted: int = 0
    sent: list[StorageWeakRef] = field(default_factory=list)  # what was sent, in order
    received: list[StorageWeakRef] = field(default_factory=list)
    left: list[int] = field(default_factory=list)  # at each action: of what was sent and has arrived, how many live
    arrived: list[StorageWeakRef] = field(default_factory=list)
    breaks_at: int | None = None  # the transfer that does not end

    Work = ProcessGroup = SimpleNamespace  # of torch.distributed: their types alone are used

    def groups(self, pp: int) -> dict[Direction, Any]:
        return {way: SimpleNamespace(way=way, size=lambda: pp) for way in ("forward", "backward")}

    def send(self, tensor: Tensor, **_: Any) -> None:
        """Links are opened, of which the records say nothing."""

    recv = send

    def isend(self, tensor: Tensor, *, group: Any, group_dst: int) -> Any:
        assert not tensor.requires_grad, "what travels is no part of a graph"
        assert tensor.is_contiguous()
        self.sent.append(StorageWeakRef(tensor.untyped_storage()))
        return self._post(("send", group.way, group_dst), self.sent[-1])

    def irecv(self, tensor: Tensor, *, group: Any, group_src: int) -> Any:
        tensor.fill_(0.01)
        self.received.append(StorageWeakRef(tensor.untyped_storage()))
        return self._post(("receive", group.way, group_src), None)

    def _post(self, event: tuple[str, Direction, int], sent: StorageWeakRef | None) -> Any:
        number, self.posted = self.posted, self.posted + 1
        self.events.append((number, *event))

        def wait() -> None:
            if number == self.breaks_at:
                raise RuntimeError("[third_party/gloo] connection closed")
            self.events.append(("wait", number))
            if sent is not None:
                self.arrived.append(sent)

        return SimpleNamespace(wait=wait)

    def computed(self, action: Action) -> None:
        self.events.append(action)
        self.left.append(sum(not each.expired() for each in self.arrived))


def as_events(program: tuple[Instruction, ...]) -> Iterator[Any]:
    """What the network and the model see of the records."""
    numbers: dict[Transfer, int] = {}
    for record in program:
        if isinstance(record, Transfer):
            numbers[record] = len(numbers)
            yield numbers[record], record.role, record.direction, record.peer
        elif isinstance(record, Wait):
            yield "wait", numbers[record.transfer]
        else:
            yield record


def table_of(pp: int, name: str, vpp: int, count: int) -> Schedule:
    return build_schedule(ScheduleRequest(name, pp, count, vpp))


def run_alone(
    patch: pytest.MonkeyPatch,
    pp: int,
    name: str,
    vpp: int,
    rank: int,
    count: int,
    *,
    training: bool = True,
    breaks_at: int | None = None,
) -> tuple[FakeNetwork, list[tuple[str, int, Action | None]]]:
    """One rank of a pipeline whose others do not exist; what it told of its last gradients, at which action."""
    network = FakeNetwork(breaks_at=breaks_at)
    patch.setattr(executor_module, "dist", network)
    config = stages_config(pp, name, vpp)
    chunks = [chunk_of(config, rank, chunk) for chunk in range(vpp)]
    told: list[tuple[str, int, Action | None]] = []
    nodes: list[Node] = []  # hooks live as long as these

    def tell(what: str, chunk: int) -> None:
        told.append((what, chunk, next((e for e in reversed(network.events) if isinstance(e, Action)), None)))

    def coming(chunk: int, later: Later) -> None:
        tell("coming", chunk)
        for parameter in chunks[chunk].parameters():  # as the sums of gradients hear of each
            nodes.append(get_gradient_edge(parameter).node)
            nodes[-1].register_hook(lambda *_: later(lambda: tell("there", chunk)))

    executor = Executor(
        chunks,
        rank,
        network.groups(pp),
        lambda count: table_of(pp, name, vpp, count),
        lambda count: forward_only(pp, vpp, count),
        coming,
    )
    compute = executor_module._Run.compute

    def computed(run: Any, action: Action) -> None:
        network.computed(action)
        compute(run, action)

    with patch.context() as counted:
        counted.setattr(executor_module._Run, "compute", computed)
        (executor.forward_backward if training else executor.evaluate)(microbatches(config, count), ONE)
    network.computed(Action("forward", 0, count))  # after all: what is left
    network.events.pop()
    return network, told


def chunk_of(config: Config, rank: int, chunk: int) -> GPT:
    """Two layers, with values and main gradients."""
    stage, stages = chunk * config.parallel.pp + rank, config.parallel.pp * config.parallel.vpp
    ends = {"embeds": stage == 0, "has_loss": stage == stages - 1}
    part = gpt(config.model, layers=range(2 * stage, 2 * stage + 2), **ends)
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    zero_main_grads(part)
    return part


@pytest.mark.parametrize(("pp", "name", "vpp"), SCHEDULES)
def test_the_executor_does_exactly_the_records_in_their_order_and_keeps_nothing_longer(
    pp: int, name: str, vpp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receives are posted and sends waited for when the records say. What was sent is freed when it has arrived. Last
    gradients are announced before the last microbatch's backward pass, and there in it or in its weight pass."""
    begin, end = ("backward-input", "backward-weight") if name == "zb-h1" else ("backward", "backward")
    for rank in range(pp):
        network, told = run_alone(monkeypatch, pp, name, vpp, rank, count=6)
        assert network.events == list(as_events(instructions(table_of(pp, name, vpp, 6))[rank]))
        assert network.sent
        assert {*network.left} == {0}, f"rank {rank} keeps outputs after their send was waited for"
        assert all(each.expired() for each in network.sent + network.received)
        for chunk in range(vpp):
            of_chunk = [(what, action) for what, other, action in told if other == chunk]
            assert of_chunk[0] == ("coming", Action(begin, chunk, 5))  # type: ignore[arg-type]
            assert {*of_chunk[1:]} == {("there", Action(end, chunk, 5))}  # type: ignore[arg-type]
        network, told = run_alone(monkeypatch, pp, name, vpp, rank, count=3, training=False)
        assert network.events == list(as_events(instructions(forward_only(pp, vpp, 3))[rank]))
        assert told == []


def test_a_deferred_gradient_is_told_when_it_is_there_and_not_when_all_are() -> None:
    """So that its bucket travels while the rest of the weight gradients is computed."""
    config = stages_config(2, "zb-h1", 1)
    chunk = chunk_of(config, 0, 0)
    main_grads = zero_main_grads(chunk)
    del main_grads["embedding.position.weight"]  # autograd's
    seen: dict[str, tuple[Tensor, int]] = {}  # the gradient when it was told, and how many others were still to come

    def tell(name: str) -> None:
        seen[name] = main_grads[name].clone(), sum(not other.any() for other in main_grads.values())

    nodes = [get_gradient_edge(chunk.get_parameter(name)).node for name in main_grads]
    for name, node in zip(main_grads, nodes, strict=True):
        node.register_hook(lambda *_, name=name: chunk.deferred.put(partial(tell, name)))
    output = chunk(microbatches(config, 1)[0])
    with chunk.deferred.collecting():
        output.sum().backward()
    assert seen == {}
    chunk.deferred.run_next()
    assert seen.keys() == main_grads.keys()
    assert all(torch.equal(seen[name][0], main_grad) and main_grad.any() for name, main_grad in main_grads.items())
    assert max(missing for _, missing in seen.values()) > len(main_grads) / 2


def test_a_link_that_breaks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an error of the same type, whose words still tell that a link broke (`watchdog.is_broken_link`)."""
    found = []
    for number in range(4):
        with pytest.raises(RuntimeError, match="third_party/gloo") as broken:
            run_alone(monkeypatch, 2, "1f1b", 1, rank=0, count=2, breaks_at=number)
        found.append(str(broken.value).partition(":")[0])
    assert sorted(found) == [
        "pipeline rank 0 could not receive the gradient for 0B0 from rank 1",
        "pipeline rank 0 could not receive the gradient for 0B1 from rank 1",
        "pipeline rank 0 could not send the activation of 0F0 to rank 1",
        "pipeline rank 0 could not send the activation of 0F1 to rank 1",
    ]


# --- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(context: ParallelContext, config: Config) -> dict[str, Any]:
    """What does not depend on how many ranks computed it; hidden states only where the pipeline ends."""
    training = started(context, config)
    for chunk in training.chunks:
        chunk.eval()
    executor, batches = training.executor, microbatches(config, 5)
    losses = [executor.evaluate(batches[:count], ONE).item() for count in (1, 2, 5)]
    hidden = [executor.hidden(batch) for batch in batches]
    assert all((each is not None) == training.chunks[-1].has_loss for each in hidden)
    assert not any(each is not None and each.requires_grad for each in hidden)
    return {
        "losses": losses if training.chunks[-1].has_loss else None,
        "hidden": hidden if training.chunks[-1].has_loss else None,
        "figures": vars(evaluate_batches(training, context, iter([batches[:2], batches[2:]]), np.arange(61))),
        "text": sample(training, context, [[3, 1, 4]], 12, seq_length=config.train.seq_length, seed=2)[0],
        "trained": executor.forward_backward(batches, ONE).item(),
    }


@pytest.mark.parametrize(("pp", "schedule", "vpp"), [(2, "1f1b", 1), (4, "zb-h1", 1), (2, "interleaved", 2)])
def test_evaluation_and_sampling_are_those_of_one_process(pp: int, schedule: str, vpp: int) -> None:
    """With fewer microbatches than ranks, as many, and a number that is no multiple."""
    config = stages_config(pp, schedule, vpp)
    alone = evaluate(ParallelContext(dtype=torch.float64), stages_config(1, num_layers=2 * pp * vpp))
    found = run_pipeline(evaluate, config)
    assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
    for rank in found:
        assert_close(rank["figures"], alone["figures"])
        assert rank["text"] == alone["text"]
    assert [rank["trained"] for rank in found[:-1]] == [0] * (pp - 1), "the loss is where the pipeline ends"
    assert len({*alone["text"]}) > 3, "a text that can differ"
    for what in ("losses", "hidden", "trained"):
        assert_close(found[-1][what], alone[what])


# --- work ------------------------------------------------------------------------------------------------------------


def flops_of_addition(total: tuple[int, int], left: tuple[int, int], right: tuple[int, int], **_: Any) -> int:
    return 2 * prod(total) * right[0]


def counting() -> FlopCounterMode:
    """torch's counter knows no addition in place."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: flops_of_addition})


def count_flops(context: ParallelContext, config: Config) -> tuple[int, dict[Action, int], int]:
    """Of a whole batch; of each action; and those of all products that give gradients of a microbatch's linears."""
    training = started(context, config)
    batches = microbatches(config, 5)
    with counting() as whole:
        training.executor.forward_backward(batches, ONE)
    by_action: dict[Action, int] = {}
    compute = executor_module._Run.compute

    def counted(run: Any, action: Action) -> None:
        with counting() as flops:
            compute(run, action)
        by_action[action] = flops.get_total_flops()

    executor_module._Run.compute = counted  # type: ignore  # this process ends soon
    training.executor.forward_backward(batches, ONE)
    modules = training.chunks[0].modules()
    layers = [each for each in modules if isinstance(each, ColumnParallelLinear | RowParallelLinear)]
    weights = sum(layer.weight.numel() for layer in layers)
    return whole.get_total_flops(), by_action, 2 * batches[0].tokens.numel() * weights


def test_zb_h1_computes_as_much_as_1f1b_and_no_weight_product_before_its_turn() -> None:
    plain = run_pipeline(count_flops, stages_config(4, "1f1b"))
    split = run_pipeline(count_flops, stages_config(4, "zb-h1"))
    for (whole, parts, _), (split_whole, split_parts, products) in zip(plain, split, strict=True):
        assert whole == sum(parts.values()) == split_whole == sum(split_parts.values()) > 0
        for microbatch in range(5):
            backward = parts[Action("backward", 0, microbatch)]
            assert split_parts[Action("backward-weight", 0, microbatch)] == products > 0
            assert split_parts[Action("backward-input", 0, microbatch)] == backward - products
