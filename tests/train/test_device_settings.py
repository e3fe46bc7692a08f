"""What nobody has set follows from the device: products that send, and graphs of small microbatches."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric

from megalite.config.derive import derive, derive_vocabulary
from megalite.config.schema import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.tensor_parallel import collectives
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.train.build import derive_device
from tests.model.small import small
from tests.ranks import run_ranks

CUDA = torch.device("cuda", 0)
GPT2 = ModelConfig(num_layers=12, hidden_size=768, num_attention_heads=12, vocab_size=50257)


@pytest.mark.parametrize(
    ("config", "gpu", "graph"),
    [
        (Config(model=GPT2, train=TrainConfig(micro_batch_size=8, seq_length=1024)), "NVIDIA H100 80GB HBM3", True),
        # 32 x 1,024 tokens need 63 ms of a device that took 23.3 ms to start, launch by launch; 64 x 1,024 took 126.
        (Config(model=GPT2, train=TrainConfig(micro_batch_size=32, seq_length=1024)), "NVIDIA H100 80GB HBM3", True),
        (Config(model=GPT2, train=TrainConfig(micro_batch_size=64, seq_length=1024)), "NVIDIA H100 80GB HBM3", False),
        (Config(model=GPT2, train=TrainConfig(micro_batch_size=8, seq_length=1024)), "NVIDIA L4", False),
        (Config(model=GPT2, train=TrainConfig(micro_batch_size=1)), "a GPU of the future", False),
        (Config(model=small()), "NVIDIA L4", True),
        (Config(model=small(), train=TrainConfig(cuda_graph=False)), "NVIDIA L4", False),
        (Config(model=small(), data=DataConfig(cross_document_attention=False)), "NVIDIA L4", False),
        (Config(model=small()), "", False),
    ],
)
def test_small_microbatches_are_graphs(monkeypatch: pytest.MonkeyPatch, config: Config, gpu: str, graph: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    context = ParallelContext(device=CUDA, dtype=torch.bfloat16) if gpu else ParallelContext()
    ready = derive_device(derive(derive_vocabulary(config, 257)), context)
    assert (ready.train.cuda_graph, ready.parallel.async_tp) == (graph, False)


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
