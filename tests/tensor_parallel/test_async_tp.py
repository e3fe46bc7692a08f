"""parallel.async_tp: inductor's pass finds the products around the collectives of a block, in forward and backward."""

from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule

from megalite.config.schema import Config, ParallelConfig
from megalite.launch.context import ParallelContext
from megalite.launch.environment import ProcessEnvironment
from megalite.layout.ranks import ParallelLayout
from megalite.model.attention import BlockInputs
from megalite.model.gpt import compile_options
from megalite.tensor_parallel import collectives
from megalite.tensor_parallel.collectives import TensorGroup, share_memory
from megalite.train.build import device_problems
from tests.model.small import FAMILIES, gpt, small, zero_main_grads
from tests.ranks import run_ranks

KINDS = ("all_gather_into_tensor", "reduce_scatter_tensor", "fused_all_gather_matmul", "fused_matmul_reduce_scatter")


def fused(context: ParallelContext, name: str) -> list[Counter[str]]:
    """The collectives of a block's forward and backward graph after inductor's pass; what runs is as it was."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import remove_noop_ops, view_to_reshape
    from torch.distributed._symmetric_memory import _test_mode

    found: list[Counter[str]] = []

    def keep(graph: GraphModule, inputs: Any) -> Any:
        copy = deepcopy(graph)
        remove_noop_ops(copy.graph)  # what inductor does before
        view_to_reshape(copy)
        with _test_mode():  # as if they shared memory
            micro_pipeline_tp_pass(copy.graph)
        parts = [part for node in copy.graph.nodes for part in str(node.target).split(".")]
        found.append(Counter(part for part in parts if part in KINDS))
        return graph.forward

    collectives.NAMED_GATHER_COMPILES = False  # the op that CUDA has
    dist.is_nccl_available = lambda: True  # the pass does nothing in a torch without it
    config = small(**{**FAMILIES[name], "num_layers": 1})
    model = gpt(config, tp=TensorGroup.of(context.group("tp")), sequence_parallel=True)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    zero_main_grads(model)
    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    block = torch.compile(model.blocks["0"], fullgraph=True, dynamic=False, backend=backend)
    x = torch.randn(8, 2, config.hidden_size, dtype=torch.float64, requires_grad=True)
    block(x, BlockInputs()).sum().backward()
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_collectives_of_a_block_become_parts_of_its_products(name: str) -> None:
    """All four of forward, but for gathers before a product with a bias; of backward's six, not those of the inputs,
    which weight gradients need."""
    gathers = "fused_all_gather_matmul" if name == "llama" else "all_gather_into_tensor"
    for forward, backward in run_ranks(fused, 2, name, layout=ParallelLayout(tp=2)):
        assert forward == {gathers: 2, "fused_matmul_reduce_scatter": 2}
        assert backward == {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2, "all_gather_into_tensor": 2}


def enabled(context: ParallelContext) -> list[bool]:
    """Whether inductor finds that the group shares memory, before and after."""
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    group = TensorGroup.of(context.group("tp"))
    assert group is not None
    found = [is_symm_mem_enabled_for_group(group.name)]
    share_memory(group)
    return [*found, is_symm_mem_enabled_for_group(group.name)]


def test_inductor_finds_that_a_group_shares_memory() -> None:
    assert run_ranks(enabled, 2, layout=ParallelLayout(tp=2)) == [[False, True]] * 2


def test_only_what_is_asked_for_compiles_products_that_send() -> None:
    options = [compile_options(TensorGroup("tp", 2, 0), async_tp=async_tp) or {} for async_tp in (False, True)]
    assert ["_micro_pipeline_tp" in each for each in options] == [False, True]
    assert compile_options(None, async_tp=True) is None


@pytest.mark.parametrize(
    ("device", "local", "order", "words"),
    [
        ("cpu", 2, "tp-cp-ep-dp-pp", "device=auto, which is cpu here"),
        ("cuda", 3, "tp-cp-ep-dp-pp", "one host"),
        ("cuda", 2, "dp-tp-cp-ep-pp", "one host"),
        ("cuda", 4, "tp-cp-ep-dp-pp", ""),
    ],
)
def test_ranks_that_cannot_share_memory_are_refused(device: str, local: int, order: str, words: str) -> None:
    config = Config(parallel=ParallelConfig(tp=2, async_tp=True, order=order))
    problems = device_problems(config, torch.device(device), "fp32", ProcessEnvironment(local_world_size=local))
    assert words in "".join(map(str, problems))
    assert bool(problems) == bool(words)
