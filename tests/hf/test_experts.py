"""Mixtures of experts between here and transformers: what config.json says of them, and dense models made into some."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from megalite.config.model_folder import settings_of
from megalite.config.schema import Config, ModelConfig, MoEConfig
from megalite.config.settings import with_values
from megalite.errors.problems import UserError
from megalite.hf import export
from megalite.hf.export import export_model, family_of
from megalite.hf.families import FAMILIES
from megalite.hf.families.family import differences
from megalite.hf.import_model import import_model
from megalite.model.gpt import GPT
from megalite.model.parameters import gpt_parameters
from tests.hf.peers import GROUPED, batch_of, imported, largest_error, matching_config, save_peer, small

QWEN3_30B = transformers.Qwen3MoeConfig(num_hidden_layers=48, head_dim=128, norm_topk_prob=True, rope_theta=1e6)
MIXTRAL_8X7B = transformers.MixtralConfig()  # the published model is their default
SMALL_QWEN = {**GROUPED, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
SMALL_QWEN |= {"moe_intermediate_size": 28, "num_hidden_layers": 6}


def of_preset(name: str, vocab_size: int) -> ModelConfig:
    from megalite.config.compose import load_config

    return load_config([f"model={name}", f"model.vocab_size={vocab_size}", "train.seq_length=8"], 1).model


@pytest.mark.parametrize(
    ("published", "preset"), [(QWEN3_30B, "qwen3_30b_a3b"), (MIXTRAL_8X7B, "mixtral_8x7b")], ids=["qwen", "mixtral"]
)
def test_a_published_config_is_the_preset_of_its_name(published: Any, preset: str) -> None:
    config = of_preset(preset, published.vocab_size)
    family, ours = FAMILIES[published.model_type], settings_of(config)
    assert differences(family.settings(published.to_dict()), ours) == {}
    assert family.other_settings(ours) == {}


@pytest.mark.parametrize(
    ("said", "first", "step"),
    [
        ({}, 0, 1),
        ({"decoder_sparse_step": 2}, 1, 2),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, 5, 1),
        ({"mlp_only_layers": [0, 1]}, 2, 1),
        ({"mlp_only_layers": [1, 3, 5]}, 0, 2),
        ({"mlp_only_layers": [0, 2, 3, 5]}, 1, 3),
        ({"mlp_only_layers": [0, 2, 3, 4, 5]}, 1, 5),
    ],
)
def test_layers_with_experts_are_found_and_said_again(said: dict[str, Any], first: int, step: int) -> None:
    settings = FAMILIES["qwen3_moe"].settings(SMALL_QWEN | said)
    assert (settings["moe.first_dense_layers"], settings["moe.layer_freq"]) == (first, step)
    moe = MoEConfig(8, 2, 28, first_dense_layers=first, layer_freq=step)
    assert FAMILIES["qwen3_moe"].other_settings(settings_of(small("qwen3", num_layers=6, moe=moe))) == {}


def test_how_experts_are_trained_makes_no_other_model() -> None:
    training = {"capacity_factor": 1.5, "aux_loss": "global", "aux_loss_coeff": 0.0, "z_loss_coeff": 0.1}
    moe = MoEConfig(4, 2, 20, dispatcher="allgather", **training)  # type: ignore[arg-type]
    assert family_of(small("mixtral", moe=moe)).model_type == "mixtral"


def test_a_softmax_before_or_after_the_choice_is_one_model_where_weights_add_up_to_1() -> None:
    for name, changes in (("mixtral", {}), ("qwen3_moe", {"qk_norm": True})):
        for pre_softmax in (True, False):
            moe = MoEConfig(4, 2, 20, pre_softmax=pre_softmax)
            assert family_of(small("mixtral", moe=moe, **changes)).model_type == name
    ours = small("mixtral", moe=MoEConfig(4, 1, 20, pre_softmax=True))
    others = FAMILIES["mixtral"].other_settings(settings_of(ours))
    assert others == {"moe.pre_softmax": False}  # of one expert, whose weight is its probability
    width_of_no_layer = small("mixtral", ffn_hidden_size=99)
    assert family_of(width_of_no_layer).model_type == "mixtral"


def test_an_export_holds_one_tensor_of_all_experts_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small("mixtral")
    alive: list[weakref.ref[Any]] = []

    def values() -> Iterator[tuple[str, Tensor]]:
        for record in gpt_parameters(config):
            assert not any(one() is not None for one in alive), record.name
            array = np.zeros(record.shape, dtype=np.float32)
            alive.append(weakref.ref(array))
            value = torch.from_numpy(array)
            del array
            yield record.name, value
            del value

    monkeypatch.setattr(export, "MAX_FILE", "2KB")
    export_model(values(), config, tmp_path / "ours", torch.bfloat16, context_length=32)
    assert len(alive) == len(gpt_parameters(config))


# --- experts made of a dense model -----------------------------------------------------------------------------------


def upcycled(folder: Path, **moe: Any) -> tuple[ModelConfig, GPT]:
    """The folder's dense model with its MLP as every expert, and routers as the seed draws them."""
    settings = {"num_experts": 4, "ffn_hidden_size": 40, **moe}
    return imported(folder, **{f"moe.{name}": value for name, value in settings.items()})


@pytest.mark.parametrize("name", ["llama", "qwen3_tied"])
@pytest.mark.parametrize("moe", [{}, {"first_dense_layers": 1}, {"top_k": 3, "pre_softmax": True}], ids=str)
def test_a_dense_model_with_its_mlp_in_every_expert_computes_what_it_did(
    name: str, moe: dict[str, Any], tmp_path: Path
) -> None:
    save_peer(name, tmp_path)
    (config, model), (_, dense) = upcycled(tmp_path, **moe), imported(tmp_path)
    batch = batch_of(torch.randint(53, (2, 21), generator=torch.Generator().manual_seed(1)))
    assert largest_error(model.eval().logits(batch), dense.eval().logits(batch), 1e-12) <= 1
    routers = [value for key, value in model.named_parameters() if "router" in key]
    assert len(routers) == 2 - moe.get("first_dense_layers", 0)
    assert all(router.any() for router in routers)
    parameters = dict(model.named_parameters())  # an export of it is a mixture
    values = ((record.name, parameters[record.name].detach()) for record in gpt_parameters(config))
    if name == "llama" and not moe:
        export_model(values, config, tmp_path / "ours", torch.float64, context_length=32)
        again = dict(import_model(tmp_path / "ours", matching_config(tmp_path / "ours")))
        assert all(torch.equal(again[key], value) for key, value in parameters.items())


@pytest.mark.parametrize(
    ("name", "moe", "remedies"),
    [
        ("llama", {"ffn_hidden_size": 20}, {"model.moe.ffn_hidden_size": "model.moe.ffn_hidden_size=40"}),
        ("qwen3", {"num_shared_experts": 1}, {"model.moe.num_shared_experts": "model.moe.num_shared_experts=0"}),
        ("gpt2", {}, {"model.moe.num_experts": "model.moe.num_experts=0"}),
    ],
)
def test_what_cannot_be_every_expert_is_refused_with_the_remedy(
    name: str, moe: dict[str, Any], remedies: dict[str, str], tmp_path: Path
) -> None:
    save_peer(name, tmp_path)
    with pytest.raises(UserError) as refused:
        upcycled(tmp_path, **moe)
    assert {problem.setting: problem.hint for problem in refused.value.problems} == remedies


def test_a_mixture_of_other_experts_is_refused(tmp_path: Path) -> None:
    save_peer("mixtral", tmp_path)
    for changes, named in (
        ({"num_experts": 4, "first_dense_layers": 1, "pre_softmax": True}, {"num_experts", "first_dense_layers"}),
        ({"num_experts": 0}, {"num_experts"}),
    ):
        config = with_values(Config(model=matching_config(tmp_path)), {f"model.moe.{k}": v for k, v in changes.items()})
        with pytest.raises(UserError) as refused:
            import_model(tmp_path, config.model)
        assert {problem.setting.removeprefix("model.moe.") for problem in refused.value.problems} >= named
