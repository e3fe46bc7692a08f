"""Parts of the model, put in sequence by hand: together they are the whole, whoever holds which layers."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.schema import ModelConfig
from megalite.data.batch import Batch
from megalite.layout.stages import StageSettings, stage_layers
from megalite.model import gpt as module
from megalite.model.gpt import GPT
from tests.model.small import ALL_DROPOUTS, CPU, FAMILIES, gpt, loss_and_gradients, perturbed, random_batch, small

LAYERS = 4
SPLITS = {
    "one": StageSettings(LAYERS, 1),
    "even": StageSettings(LAYERS, 2),
    "chunks": StageSettings(LAYERS, 2, 2),
    "uneven": StageSettings(LAYERS, 3, first_layers=2, last_layers=1),
    "standalone embedding": StageSettings(LAYERS, 3, standalone_embedding=True),
    "standalone embedding, chunks": StageSettings(LAYERS, 2, 2, standalone_embedding=True),
    "standalone loss": StageSettings(LAYERS, 3, last_layers=0),
    "both": StageSettings(LAYERS, 6, count_embedding=True, count_loss=True),
    "layout": StageSettings(LAYERS, 2, 2, layout="Et|t|tt|L"),
}
TIED_WORD = "embedding.word.weight"


def parts(config: ModelConfig, split: StageSettings, **settings: Any) -> list[GPT]:
    return [
        perturbed(config, layers=stage.layers, embeds=stage.embedding, has_loss=stage.loss, **settings)
        for stage in stage_layers(split)
    ]


def in_sequence(stages: Sequence[GPT], batch: Batch) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """The mean loss and, by parameter, the gradients of its copies; between stages only tensors pass."""
    sent: list[Tensor] = []
    received: list[Tensor] = []
    for stage in stages[:-1]:
        sent.append(stage(batch, received[-1] if received else None))
        assert sent[-1].shape == stage.activation_shape(batch)
        received.append(sent[-1].detach().requires_grad_())
    scale = torch.tensor(1.0, dtype=torch.float64) / batch.loss_mask.sum()
    loss = stages[-1].loss(batch, scale, received[-1] if received else None)
    loss.backward()
    for output, entry in zip(reversed(sent), reversed(received), strict=True):
        output.backward(entry.grad)
    gradients = defaultdict(list)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None, f"{name} is held and not used"
            gradients[name].append(parameter.grad)
    return loss.detach(), gradients


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("tied", [True, False])
def test_stages_in_sequence_compute_every_bit_of_the_whole_model(split: StageSettings, tied: bool) -> None:
    """Dropout included: its masks belong to layers of the model, not of the stage. The sum of a tied embedding's copies
    alone is made in another order."""
    config = small(**{**FAMILIES["gpt2"], "tie_embeddings": tied}, num_layers=LAYERS, **ALL_DROPOUTS)
    batch = random_batch(config)
    loss, whole = loss_and_gradients(perturbed(config), batch)
    torch.manual_seed(99)  # whatever state the generator is in
    found_loss, found = in_sequence(parts(config, split), batch)
    assert torch.equal(found_loss, loss)
    assert found.keys() == whole.keys()
    for name, copies in found.items():
        if tied and name == TIED_WORD:
            torch.testing.assert_close(sum(copies), whole[name], rtol=1e-13, atol=1e-14)
            assert len(copies) == min(2, len(stage_layers(split)))
        else:
            assert torch.equal(*copies, whole[name]), name


def test_the_first_layers_of_the_model_are_recomputed_whichever_stage_has_them() -> None:
    ran: list[int] = []
    config = small(num_layers=LAYERS)
    stages = parts(config, SPLITS["even"], recompute="full", recompute_layers=3)
    for name, block in (pair for stage in stages for pair in stage.blocks.items()):
        block.register_forward_pre_hook(lambda *_, layer=int(name): ran.append(layer))
    in_sequence(stages, random_batch(config))
    assert ran == [0, 1, 2, 3, 2, 1, 0]


def test_unless_said_otherwise_the_first_layer_embeds_and_the_last_has_the_loss() -> None:
    ends = []
    for layers in (None, range(1), range(1, 2), range(2, 3)):
        model = gpt(small(num_layers=3), dtype=torch.float32, device=CPU, seed=0, layers=layers)
        ends.append((model.embeds, model.has_loss))
    assert ends == [(True, True), (True, False), (False, False), (False, True)]


def test_a_stage_without_layers_builds_nothing_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of packed documents has a number for each pair of tokens."""
    config = small(num_layers=LAYERS)
    monkeypatch.setattr(module, "attention_mask", None)
    monkeypatch.setattr(module, "rotary_tables", None)
    first, *_, last = parts(config, SPLITS["both"])
    batch = random_batch(config)
    last(batch, first(batch))


def test_stages_evaluate_to_the_logits_of_the_whole_model() -> None:
    config = small(num_layers=LAYERS, **ALL_DROPOUTS)
    batch = random_batch(config)
    x = None
    with torch.no_grad():
        for stage in (stages := parts(config, SPLITS["both"])):
            x = stage.eval()(batch, x)
        logits = stages[-1].head_logits(x).transpose(0, 1)
        assert torch.equal(logits, perturbed(config).eval().logits(batch))
