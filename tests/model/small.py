"""Small models and batches that the tests of this folder share."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config.derive import derive_model
from megalite.config.schema import Config, ModelConfig, ParallelConfig, TrainConfig
from megalite.data.batch import Batch, whole_batch
from megalite.kernels.embed import set_main_grad
from megalite.layout.parameters import shard
from megalite.layout.stages import StageLayers
from megalite.model.gpt import GPT
from megalite.model.init import fill
from megalite.model.parameters import gpt_parameters
from megalite.tensor_parallel.collectives import TensorGroup
from tests.layout.shards import cut

CPU = torch.device("cpu")


def small(**changes: Any) -> ModelConfig:
    """A resolved shape whose sizes all differ, so that a mixed-up dim cannot pass."""
    shape: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_size": 10,
        "ffn_hidden_size": 36,
        "vocab_size": 53,
        "vocab_multiple": 32,
        "max_positions": 32,
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "init_std": 0.3,
        "loss_chunk_tokens": 16,
    }
    return ModelConfig(**{**shape, **changes})


GPT2_LIKE: dict[str, Any] = {
    "position": "learned",
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "bias": True,
    "num_key_value_heads": 4,
}
LLAMA_LIKE: dict[str, Any] = {"tie_embeddings": False, "rope_scaling_factor": 8.0, "rope_original_positions": 64}
QWEN3_LIKE: dict[str, Any] = {"qk_norm": True}
FAMILIES = {"gpt2": GPT2_LIKE, "llama": LLAMA_LIKE, "qwen3": QWEN3_LIKE}
ALL_DROPOUTS = {"dropout": 0.2, "attention_dropout": 0.3, "embedding_dropout": 0.1}


def training_config(
    model: dict[str, Any],
    seq_length: int,
    *,
    precision: str = "fp32",
    parallel: dict[str, Any] | None = None,
    **train: Any,
) -> Config:
    """A config for `build_training`: of these sizes, derived for sequences of this length; on CPUs, not compiled."""
    config = Config(precision=precision, device="cpu", seed=7)
    config.model = derive_model(replace(config.model, **{"vocab_multiple": 4, **model}), seq_length)
    config.train = replace(config.train, compile=False, seq_length=seq_length, **train)
    config.parallel = replace(config.parallel, **(parallel or {}))
    return config


def gpt(
    model: ModelConfig,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device = CPU,
    seed: int = 1,
    layers: range | None = None,
    embeds: bool | None = None,
    has_loss: bool | None = None,
    tp: TensorGroup | None = None,
    sequence_parallel: bool = False,
    compile: bool = False,
    **train: Any,
) -> GPT:
    """A GPT of this shape, or those of its layers; `train` are settings of TrainConfig."""
    stage = None
    if layers is not None:
        embeds = layers.start == 0 if embeds is None else embeds
        has_loss = layers.stop == model.num_layers if has_loss is None else has_loss
        stage = StageLayers(0, 0, 0, layers.start, len(layers), embeds, has_loss)
    parallel = ParallelConfig(sequence_parallel=sequence_parallel)
    config = Config(model=model, seed=seed, train=TrainConfig(compile=compile, **train), parallel=parallel)
    return GPT(config, dtype=dtype, device=device, stage=stage, tp=tp)


def set_main_grads(module: nn.Module, main_grads: Mapping[str, Tensor]) -> None:
    """Give the parameters of these names main gradients, of their shape."""
    for name, main_grad in main_grads.items():
        set_main_grad(module.get_parameter(name), main_grad, name)


def zero_main_grads(module: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """New main gradients of all parameters, which have them from now on."""
    main_grads = {name: torch.zeros_like(own.detach(), dtype=dtype) for name, own in module.named_parameters()}
    set_main_grads(module, main_grads)
    return main_grads


def perturbed(config: ModelConfig, *, dtype: torch.dtype = torch.float64, **settings: Any) -> GPT:
    """A model whose every parameter, norms and biases too, is random: no zero or one hides a mistake."""
    model = gpt(config, dtype=dtype, **settings)
    generator = torch.Generator().manual_seed(7)
    fill(
        model,
        (
            (record.name, (record.init == "ones") + 0.3 * torch.randn(record.shape, generator=generator))
            for record in gpt_parameters(config)
        ),
    )
    return model


def rank_of(whole: GPT, group: TensorGroup, **settings: Any) -> GPT:
    """The model of one tensor-parallel rank, with its shards of the values of `whole`."""
    model = gpt(whole.config, dtype=whole.dtype, tp=group, **settings)
    records = {record.name: record for record in gpt_parameters(whole.config)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(cut(whole.get_parameter(name), shard(records[name], group.size, group.index)))
    return model


def random_batch(config: ModelConfig, *, b: int = 3, s: int = 20, first_sample: int = 5, seed: int = 0) -> Batch:
    """Random tokens and labels, a quarter of them masked out of the loss."""
    generator = torch.Generator().manual_seed(seed)
    assert config.vocab_size is not None
    tokens = torch.randint(config.vocab_size, (b, s + 1), generator=generator)
    return whole_batch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        loss_mask=torch.rand(b, s, generator=generator) > 0.25,
        positions=torch.arange(s).expand(b, s),
        documents=None,
        first_sample=first_sample,
    )


def loss_and_gradients(model: GPT, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean loss of the batch and every parameter's gradient."""
    model.zero_grad()
    loss = model.loss(batch, torch.tensor(1.0, dtype=torch.float64) / batch.loss_mask.sum())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss.detach(), gradients
