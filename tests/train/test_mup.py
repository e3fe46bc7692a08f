"""model.mup_base_width: training equals a model that has the multipliers of muP and CompleteP in its forward pass."""

from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.derive import derive_vocabulary
from megalite.config.schema import Config
from megalite.config.step_plan import planned_steps
from megalite.data.batches import train_batches
from megalite.data.open import open_data
from megalite.launch.context import CPU, ParallelContext
from megalite.layout.parameters import ParameterRecord, Role
from megalite.model import scaling
from megalite.model.init import start_values
from megalite.model.parameters import gpt_parameters
from megalite.prepare.prepare import prepare
from tests.layouts.training import GLOBAL_BATCH, STEPS, Overrides, assembled, merged, small_config, train
from tests.train.plain_mup import Weights, loss_of, multiplier, recipe

MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "aux_loss_coeff": 0.0, "num_shared_experts": 1}
DEEP = {"num_layers": 3, "mup_base_layers": 1}
# A large eps is felt, and no clipping: it would see other gradients.
USUAL: Overrides = {
    "optimizer": {"eps": 1e-3, "clip_grad": 0.0},
    "lr": {"schedule": "constant", "warmup_steps": 0},
    "train": {"micro_batch_size": GLOBAL_BATCH},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("gpt2", {"mup_base_width": 8, **DEEP}),
    "untied": ("llama", {"mup_base_width": 16, **DEEP}),
    "smaller": ("llama", {"mup_base_width": 64, "num_layers": 2, "mup_base_layers": 5}),
    "experts": ("llama", {"mup_base_width": 16, "moe": MOE, **DEEP}),
    # All roles of parameters:
    "all": (
        "llama",
        {"mup_base_width": 16, "moe": MOE | {"first_dense_layers": 1}, "bias": True, "qk_norm": True, **DEEP},
    ),
}


def config_of(folder: Path, model: str) -> Config:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("\n\n".join(f"{number * 7919 % 1013} and {number} are numbers" for number in range(3000)))
    family, settings = MODELS[model]
    config = small_config(text, folder / "cache", family, **merged({"model": settings}, USUAL))
    return derive_vocabulary(config, 257)  # of bytes


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mup")


@cache
def plainly_trained(folder: Path, model: str) -> Weights:
    """What the papers' model becomes in five steps of torch's AdamW, with its multipliers in its weights. It starts
    from our values, whose fp32 numbers are rounded elsewhere."""
    config = config_of(folder, model)
    factors = {record.name: multiplier(record.name, config.model) for record in gpt_parameters(config.model)}
    start = start_values(gpt_parameters(config.model), config.seed)
    weights = {name: (values.double() / factors[name]).requires_grad_() for name, values in start}
    recipes = {name: recipe(name, config) for name in weights}
    groups = [
        {"params": [weights[name]], "lr": rate, "eps": eps, "weight_decay": decay}
        for name, (_, rate, eps, decay) in recipes.items()
    ]
    first, second = config.optimizer.betas
    optimizer, data = torch.optim.AdamW(groups, betas=(first, second)), open_data(config, prepare(config)).train
    with train_batches(data, config, planned_steps(config.train, done=0, samples=0), CPU) as batches:
        for step in islice(batches, STEPS):
            [batch] = step.microbatches
            assert bool(batch.loss_mask.all())
            optimizer.zero_grad()
            loss_of(weights, config.model, batch.tokens, batch.labels).backward()
            optimizer.step()
    return {name: weight.detach() * factors[name] for name, weight in weights.items()}


def assert_as_in_the_papers(folder: Path, model: str) -> None:
    config = config_of(folder, model)
    for record in gpt_parameters(config.model):
        # Normal numbers that no setting has scaled get the papers' deviation.
        unit = ParameterRecord(record.name, record.shape, "normal", 1.0, True)
        [(_, values)] = (
            start_values([unit], config.seed) if record.init == "normal" else [("", torch.ones(record.shape))]
        )
        wanted = values * (recipe(record.name, config).start * multiplier(record.name, config.model))
        [(_, found)] = start_values([record], config.seed)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0, msg=f"start of {record.name}")
    wanted = plainly_trained(folder, model)
    trained = assembled(train(ParallelContext(dtype=torch.float64), config).parameters)
    assert {*trained} == {*wanted}
    for record in gpt_parameters(config.model):
        [(name, start)] = start_values([record], config.seed)
        moved = float((wanted[name] - start).abs().max())
        assert moved > 0, name
        assert float((trained[name] - wanted[name]).abs().max()) < 1e-10 * moved, name


@pytest.mark.parametrize("model", MODELS)
def test_training_is_that_of_the_papers_model(folder: Path, model: str) -> None:
    assert_as_in_the_papers(folder, model)


def altered() -> list[Any]:
    """Each number of the table; a bias starts at 0."""
    pairs = product(scaling.TABLE, scaling.Factors._fields)
    return [pytest.param(*pair, id=" ".join(pair)) for pair in pairs if pair != ("residual_bias", "start")]


@pytest.mark.parametrize(("role", "field"), altered())
def test_every_number_of_the_table_matters(
    folder: Path, role: Role, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plainly_trained(folder, "all")  # of the right start values
    right = scaling.TABLE[role]

    def wrong(width: float, depth: float) -> scaling.Factors:
        factors = right(width, depth)
        return factors._replace(**{field: 1.1 * getattr(factors, field)})

    monkeypatch.setitem(scaling.TABLE, role, wrong)
    with pytest.raises(AssertionError):
        assert_as_in_the_papers(folder, "all")
