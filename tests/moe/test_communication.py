"""What the dispatchers send, counted on real ranks, is what the formulas of docs/moe.md say, byte for byte; and the
host waits for the device as often as it says."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.config.schema import Config, MoEConfig
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.moe.dispatch import ExpertRanks
from tests.model.small import random_batch, training_config
from tests.moe.loop import Problem, layer_of, masks_of
from tests.pipeline.stages import started
from tests.ranks import run_ranks
from tests.tensor_parallel.operations import Operations

S, B, H, EXPERTS, K = 16, 2, 32, 8, 3
FP32, INT64 = 4, 8  # bytes
Counts = Counter[tuple[str, int]]  # by collective and width of a row in bytes, how many rows one rank gives to it
WAIT = ("host waits", 0)  # a key as well
WITH_VALUES = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")  # operations that wait on CUDA


@dataclass
class Recorder(TorchDispatchMode):
    """Rows that this rank gives to collectives, by what these are and the bytes of a row; and how often the host asks
    for values, which on a CPU are there."""

    seen: Counts = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("_c10d_functional", "c10d") and name != "wait_tensor":
            rows, width = args[0], prod(args[0].shape[1:]) * args[0].itemsize
            self.seen[name.removesuffix("_out"), width] += len(rows)
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        by_mask = any(one is not None and one.dtype == torch.bool for one in indices)
        of_unknown_size = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        self.seen[WAIT] += by_mask or of_unknown_size or name in WITH_VALUES
        return func(*args, **(kwargs or {}))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """`Tensor.tolist` is no operation."""
        tolist = Tensor.tolist

        def counted(tensor: Tensor) -> Any:
            self.seen[WAIT] += 1
            return tolist(tensor)

        with self, patch.object(Tensor, "tolist", counted):
            yield


def config_of(dispatcher: str, layers: int, recompute: str, settings: dict[str, Any]) -> Config:
    moe = MoEConfig(num_experts=EXPERTS, top_k=K, dispatcher=dispatcher, **settings)
    sizes = {"num_layers": layers, "hidden_size": H, "num_attention_heads": 4, "vocab_size": 64, "moe": moe}
    return training_config(sizes, S, parallel={"sequence_parallel": True}, recompute=recompute)


def count(context: ParallelContext, configs: list[Config]) -> list[list[Counts]]:
    """Of each config, forward and backward of one microbatch on its real model."""
    found = []
    for config in configs:
        training, dp = started(context, config), context.index("dp")
        batch = random_batch(config.model, b=B, s=S, first_sample=dp * B, seed=dp)
        forward, backward = Recorder(), Recorder()
        with forward.recording():
            loss = training.chunks[0].loss(batch, torch.ones(()))
        with backward.recording():
            loss.backward()
        assert training.clock.lap()()["exchange"] > 0, "waiting for tokens is a part of the step's time"
        found.append([forward.seen, backward.seen])
    return found


def of_a_layer(context: ParallelContext, kinds: list[tuple[str, str, dict[str, Any]]]) -> list[list[Counts]]:
    """Forward and backward of one layer, by (dispatcher, recompute, other settings): what a second one adds."""
    found = []
    for dispatcher, recompute, settings in kinds:
        configs = [config_of(dispatcher, layers, recompute, settings) for layers in (1, 2)]
        one, two = count(context, configs)
        found.append([more - less for less, more in zip(one, two, strict=True)])
    return found


LAYOUTS = [
    pytest.param(ParallelLayout(dp=2, ep=2, etp=1), id="ep 2", marks=pytest.mark.long),
    pytest.param(ParallelLayout(dp=2, ep=1, etp=2), id="etp 2", marks=pytest.mark.long),
    pytest.param(ParallelLayout(dp=4, ep=2, etp=2), id="ep 2, etp 2"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_sends_what_the_formulas_say(layout: ParallelLayout) -> None:
    """All ranks together, since on the way back a rank sends rows of others. Half of all rows that travel by
    all-to-all are tokens on their way to experts, one for each of the etp ranks of each of their experts."""
    n, etp, t = layout.ep * (layout.etp or 1), layout.etp or 1, S * B
    kinds = [("alltoall", "none", {}), ("alltoall", "full", {}), ("allgather", "none", {})]
    each_rank = run_ranks(of_a_layer, n, kinds, layout=layout)
    total = [[sum((rank[kind][way] for rank in each_rank), Counts()) for way in (0, 1)] for kind in range(len(kinds))]
    rows = n * t * K * etp
    to_experts_and_back = Counts({("all_to_all_single", FP32 * H): 2 * rows, ("all_to_all_single", FP32): rows})
    forward = to_experts_and_back + Counts({("all_gather_into_tensor", INT64): n * EXPERTS, WAIT: n})
    assert total[0] == [forward, to_experts_and_back]
    assert total[1] == [forward, forward + to_experts_and_back]
    tokens = Counts({("all_gather_into_tensor", FP32 * H): n * t, ("reduce_scatter_tensor", FP32 * H): n * n * t})
    chosen = Counts({("all_gather_into_tensor", FP32 * K): n * t, ("all_gather_into_tensor", INT64 * K): n * t})
    back = Counts({("reduce_scatter_tensor", FP32 * K): n * n * t})
    assert total[2] == [tokens + chosen + Counts({WAIT: n}), tokens + back]


def test_a_capacity_costs_a_gather_of_choices_where_sequences_are_divided() -> None:
    """And the balancing loss a sum of one number per expert; without a coefficient none."""
    layout, settings = ParallelLayout(tp=2, ep=2, etp=1), [{}, {"capacity_factor": 1.0}, {"aux_loss_coeff": 0.0}]
    kinds = [("alltoall", "none", one) for one in settings]
    for without, capped, unbalanced in run_ranks(of_a_layer, 2, kinds, layout=layout):
        assert without[0]["all_reduce", FP32 * EXPERTS] == 1
        assert without[0] - unbalanced[0] == Counts({("all_reduce", FP32 * EXPERTS): 1})
        more = Counts(
            {("all_gather_into_tensor", INT64 * K): S * B // 2, ("all_gather_into_tensor", FP32 * K): S * B // 2}
        )
        everywhere = {key: rows for key, rows in (capped[0] - without[0]).items() if key[0] != "all_to_all_single"}
        assert everywhere == more
        assert capped[0][WAIT] == without[0][WAIT] == 1
        assert capped[0]["all_to_all_single", FP32] < without[0]["all_to_all_single", FP32] == S * B // 2 * K


def order_of_a_layer(context: ParallelContext) -> list[list[str]]:
    problem = Problem.drawn({})
    layer, x = layer_of(problem, ExpertRanks.of(context)), problem.x.clone().requires_grad_()
    masks = masks_of(problem.mask, torch.ones(()))
    names = ("all_to_all_single", "wait_tensor", "tanh", "tanh_backward")
    forward, backward = (Operations(lambda name, *_: name if name in names else None) for _ in range(2))
    with forward:
        y, _ = layer(x, masks, torch.tanh)
    with backward:
        y.sum().backward()
    return [forward.noted, backward.noted]


def test_shared_experts_compute_while_rows_are_on_their_way() -> None:
    """Rows and weights are sent, the shared expert computes, then is waited; in backward, too."""
    send, wait = "all_to_all_single", "wait_tensor"
    for forward, backward in run_ranks(order_of_a_layer, 2, layout=ParallelLayout(dp=2, ep=2, etp=1)):
        assert forward == [wait, send, send, "tanh", wait, wait, send, wait]
        assert backward == [send, wait, send, send, "tanh_backward", wait, wait]
