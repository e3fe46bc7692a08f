"""What nobody has set follows from the device: products that send, and microbatches as graphs."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric

from megalite.config.derive import derive, derive_vocabulary
from megalite.config.schema import Config, DataConfig, MoEConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.tensor_parallel import collectives
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.train.build import derive_device, graph_of
from tests.model.small import ALL_DROPOUTS, small
from tests.ranks import run_ranks

CUDA = torch.device("cuda", 0)
DETERMINISTIC, NEVER = TrainConfig(deterministic=True), TrainConfig(cuda_graph=False)
DOCUMENTS, MOE = DataConfig(cross_document_attention=False), MoEConfig(num_experts=4, ffn_hidden_size=16)


@pytest.mark.parametrize(
    ("config", "device", "graph"),
    [
        (Config(model=small()), CUDA, None),
        (Config(model=small(), train=NEVER), CUDA, False),
        (Config(model=small(), train=DETERMINISTIC), CUDA, False),
        (Config(model=small(), data=DOCUMENTS), CUDA, False),
        (Config(model=small(moe=MOE)), CUDA, False),
        (Config(model=small(), optimizer=OptimizerConfig(qk_clip=100.0)), CUDA, False),
        (Config(model=small(), train=TrainConfig(attention="flex")), CUDA, False),
        *((Config(model=small(**{name: 0.1})), CUDA, False) for name in ALL_DROPOUTS),
        (Config(model=small(dropout=0.1), train=TrainConfig(cuda_graph=True)), CUDA, True),
        (Config(model=small()), torch.device("cpu"), False),
    ],
)
def test_a_graph_is_tried_unasked_where_gpus_have_run_it(
    config: Config, device: torch.device, graph: bool | None
) -> None:
    """The settings of the run keep what was asked: the next start decides anew."""
    context = ParallelContext(device=device, dtype=torch.bfloat16)
    ready = derive_device(derive(derive_vocabulary(config, 257)), context)
    assert (graph_of(ready, context), ready.parallel.async_tp) == (graph, False)
    assert ready.train.cuda_graph is config.train.cuda_graph


def chosen(context: ParallelContext, asked: bool | None, fails: int | None) -> str:
    """What async_tp becomes with torch's own fallbacks, where a product of rank `fails` comes out twice as large."""
    factor = 2.0 if context.rank == fails else 1.0
    ops = SimpleNamespace(
        fused_all_gather_matmul=lambda x, weights, dim, name: symmetric._fused_all_gather_matmul_fallback(
            x, weights, dim, name
        ),
        fused_matmul_reduce_scatter=lambda *given: factor * symmetric._fused_matmul_reduce_scatter_fallback(*given),
    )
    config = Config(model=small(), parallel=ParallelConfig(tp=2, async_tp=asked), train=TrainConfig(compile=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops, "symm_mem", ops)
        try:
            return str(derive_device(derive(config, 2), context).parallel.async_tp)
        except UserError as error:
            return str(error)


@pytest.mark.parametrize(
    ("asked", "fails", "words"),
    [
        (None, 1, "False"),  # no GPUs have run it
        (False, 1, "False"),
        (True, None, "True"),
        (True, 1, "products that send do not work here: a product of ones came out as [1536.0, 1536.0"),
    ],
)
def test_products_send_where_all_ranks_find_that_they_can(asked: bool | None, fails: int | None, words: str) -> None:
    for found in run_ranks(chosen, 2, asked, fails, layout=ParallelLayout(tp=2)):
        assert words in found


def test_what_torch_raises_is_the_reason() -> None:
    reason = collectives.why_products_cannot_send(TensorGroup("no group", 2, 0), torch.float32, torch.device("cpu"))
    assert "Error: " in reason
