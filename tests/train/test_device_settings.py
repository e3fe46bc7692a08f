"""What nobody has set follows from the device: products that send, and graphs of small microbatches."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric

from megalite.config.derive import derive, derive_vocabulary
from megalite.config.schema import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.tensor_parallel import shared_memory
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.train import build
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
    ],
)
def test_small_microbatches_are_graphs(monkeypatch: pytest.MonkeyPatch, config: Config, gpu: str, graph: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    context = ParallelContext(device=CUDA, dtype=torch.bfloat16)
    ready = derive_device(derive(derive_vocabulary(config, 257)), context)
    assert (ready.train.cuda_graph, ready.parallel.async_tp) == (graph, False)


def test_a_cpu_has_neither() -> None:
    ready = derive_device(derive(Config(model=small())), ParallelContext())
    assert (ready.train.cuda_graph, ready.parallel.async_tp) == (False, False)


def chosen(context: ParallelContext, asked: bool | None, fails: int | None) -> str:
    """What async_tp becomes where rank `fails` fails; how many tried."""
    tried: list[int] = []

    def why(group: TensorGroup, *_: object) -> str:
        tried.append(group.index)
        return "no NVLink" if group.index == fails else ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "why_products_cannot_send", why)
        config = Config(model=small(), parallel=ParallelConfig(tp=2, async_tp=asked), train=TrainConfig(compile=True))
        ready = derive(config, 2)
        try:
            found = str(derive_device(ready, replace(context, device=CUDA)).parallel.async_tp)
        except UserError as error:
            found = str(error)
    return f"{found} {len(tried)}"


@pytest.mark.parametrize(
    ("asked", "fails", "words"),
    [
        (None, None, "False 0"),  # no GPUs have run it
        (False, None, "False 0"),
        (True, None, "True 1"),
        (True, 1, "products that send do not work here: no NVLink"),
    ],
)
def test_products_send_where_all_ranks_find_that_they_can(asked: bool | None, fails: int | None, words: str) -> None:
    for found in run_ranks(chosen, 2, asked, fails, layout=ParallelLayout(tp=2)):
        assert words in found


def tried(context: ParallelContext, factor: float) -> str:
    """Products by torch's own fallbacks, of which one comes out `factor` times as large."""
    group = TensorGroup.of(context.group("tp"))
    assert group is not None
    ops = SimpleNamespace(
        fused_all_gather_matmul=lambda x, weights, dim, name: symmetric._fused_all_gather_matmul_fallback(
            x, weights, dim, name
        ),
        fused_matmul_reduce_scatter=lambda *given: factor * symmetric._fused_matmul_reduce_scatter_fallback(*given),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops, "symm_mem", ops)
        return shared_memory.why_products_cannot_send(group, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize(("factor", "words"), [(1.0, ""), (2.0, "came out as [1536.0, 1536.0")])
def test_a_try_compares_what_comes_out(factor: float, words: str) -> None:
    for found in run_ranks(tried, 2, factor, layout=ParallelLayout(tp=2)):
        assert found.startswith("a product of ones") == bool(words)
        assert words in found


def test_what_torch_raises_is_the_reason() -> None:
    reason = shared_memory.why_products_cannot_send(TensorGroup("no group", 2, 0), torch.float32, torch.device("cpu"))
    assert "Error: " in reason
