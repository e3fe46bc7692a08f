"""Mixtures of experts between here and transformers: what config.json says of them, and dense models made into some."""

import weakref
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from megalite.config.compose import load_config
from megalite.config.schema import ModelConfig, MoEConfig
from megalite.config.settings import leaves
from megalite.errors.problems import UserError
from megalite.hf.export import export_model, family_of
from megalite.hf.families import FAMILIES
from megalite.hf.families.family import differences
from megalite.hf.saved_model import import_model
from megalite.model.gpt import GPT
from megalite.model.parameters import gpt_parameters
from tests.hf.peers import GROUPED, batch_of, imported, largest_error, matching_config, save_peer, small

QWEN3_30B = transformers.Qwen3MoeConfig(num_hidden_layers=48, head_dim=128, norm_topk_prob=True, rope_theta=1e6)
MIXTRAL_8X7B = transformers.MixtralConfig()  # the published model is their default
SMALL_QWEN = {**GROUPED, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
SMALL_QWEN |= {"moe_intermediate_size": 28, "num_hidden_layers": 6}


@pytest.mark.parametrize(
    ("published", "preset"), [(QWEN3_30B, "qwen3_30b_a3b"), (MIXTRAL_8X7B, "mixtral_8x7b")], ids=["qwen", "mixtral"]
)
def test_a_published_config_is_the_preset_of_its_name(published: Any, preset: str) -> None:
    words = [f"model={preset}", f"model.vocab_size={published.vocab_size}", "train.seq_length=8"]
    family, ours = FAMILIES[published.model_type], leaves(asdict(load_config(words, 1).model))
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
    assert FAMILIES["qwen3_moe"].other_settings(leaves(asdict(small("qwen3", num_layers=6, moe=moe)))) == {}


@pytest.mark.parametrize(
    ("changes", "named", "family"),
    [
        ({"capacity_factor": 1.5, "aux_loss": "global", "aux_loss_coeff": 0.0, "z_loss_coeff": 0.1}, {}, "mixtral"),
        ({"pre_softmax": True}, {}, "mixtral"),  # weights that add up to 1
        ({"pre_softmax": True}, {"qk_norm": True}, "qwen3_moe"),
        ({"pre_softmax": False}, {"qk_norm": True}, "qwen3_moe"),
        ({}, {"ffn_hidden_size": 99}, "mixtral"),  # the width of no layer
    ],
)
def test_what_makes_no_other_model_is_not_compared(changes: Any, named: Any, family: str) -> None:
    assert family_of(small("mixtral", moe=MoEConfig(4, 2, 20, **changes), **named)).model_type == family


def test_the_weight_of_one_expert_is_its_probability() -> None:
    ours = leaves(asdict(small("mixtral", moe=MoEConfig(4, 1, 20, pre_softmax=True))))
    assert FAMILIES["mixtral"].other_settings(ours) == {"moe.pre_softmax": False}


def test_an_export_holds_one_tensor_of_all_experts_at_a_time(tmp_path: Path) -> None:
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

    export_model(values(), config, tmp_path / "ours", torch.bfloat16, context_length=32, max_shard_size="2KB")
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
        ("llama", {"num_experts": 4, "ffn_hidden_size": 20}, {"ffn_hidden_size": "40"}),
        ("qwen3", {"num_experts": 4, "ffn_hidden_size": 40, "num_shared_experts": 1}, {"num_shared_experts": "0"}),
        ("gpt2", {"num_experts": 4, "ffn_hidden_size": 40}, {"num_experts": "0"}),
        ("mixtral", {"num_experts": 4, "first_dense_layers": 1}, {"num_experts": "5", "first_dense_layers": "0"}),
        ("mixtral", {"num_experts": 0}, {"num_experts": "5"}),
    ],
)
def test_other_experts_are_refused_with_the_remedy(
    name: str, moe: dict[str, Any], remedies: dict[str, str], tmp_path: Path
) -> None:
    save_peer(name, tmp_path)
    config = matching_config(tmp_path, **{f"moe.{key}": value for key, value in moe.items()})
    with pytest.raises(UserError) as refused:
        import_model(tmp_path, config)
    told = {one.hint for one in refused.value.problems if one.setting.startswith("model.moe.")}
    assert told == {f"model.moe.{key}={value}" for key, value in remedies.items()}
