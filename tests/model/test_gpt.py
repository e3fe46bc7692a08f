"""The model as a whole: who attends to whom, where gradients go, and what recompute must not change."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.schema import ModelConfig
from megalite.data.batch import whole_batch
from tests.model.small import (
    ALL_DROPOUTS,
    FAMILIES,
    gpt,
    loss_and_gradients,
    perturbed,
    random_batch,
    set_main_grads,
    small,
    zero_main_grads,
)

EXACT = {"rtol": 1e-11, "atol": 1e-12}


def family(name: str, **changes: object) -> ModelConfig:
    return small(**{**FAMILIES[name], **changes})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_changes_no_logits_before_it(name: str) -> None:
    config = family(name)
    model, batch = perturbed(config), random_batch(config, s=12)
    tokens = batch.tokens.clone()
    tokens[:, 7] = (tokens[:, 7] + 1) % 53
    before, after = model.logits(batch), model.logits(replace(batch, tokens=tokens))
    assert before.shape == (3, 12, 53)
    torch.testing.assert_close(before[:, :7], after[:, :7], **EXACT)
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(-1).any(), "every later token sees the change"


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_have_the_logits_of_separate_sequences(name: str) -> None:
    config = family(name)
    model, batch = perturbed(config), random_batch(config, b=2, s=20)
    lengths = (13, 7)
    packed = replace(
        batch,
        positions=torch.cat([torch.arange(length) for length in lengths]).expand(2, 20),
        documents=torch.repeat_interleave(torch.tensor([0, 1], dtype=torch.int32), torch.tensor(lengths)).expand(2, 20),
    )
    alone = [
        whole_batch(tokens, tokens, tokens > 0, torch.arange(tokens.shape[1]).expand(tokens.shape), None, 0)
        for tokens in batch.tokens.split(lengths, dim=1)
    ]
    separate = torch.cat([model.logits(part) for part in alone], dim=1)
    torch.testing.assert_close(model.logits(packed), separate, **EXACT)
    assert not torch.allclose(model.logits(batch)[:, 13:], separate[:, 13:])


def test_the_loss_is_the_scaled_sum_over_unmasked_tokens_of_the_real_vocabulary() -> None:
    config = small()
    model, batch = perturbed(config), random_batch(config)
    losses = torch.nn.functional.cross_entropy(
        model.logits(batch).flatten(0, 1), batch.labels.flatten(), reduction="none"
    )
    scale = torch.tensor(0.37, dtype=torch.float64)
    torch.testing.assert_close(model.loss(batch, scale), 0.37 * losses[batch.loss_mask.flatten()].sum(), **EXACT)


def test_the_main_grad_of_a_bf16_model_is_summed_in_fp32() -> None:
    """To the bit where it gets one gradient at a time: a head of its own, all tokens in one chunk."""
    config = small(tie_embeddings=False, loss_chunk_tokens=1000)
    model, batch = perturbed(config, dtype=torch.bfloat16), random_batch(config)
    main_grad = torch.zeros_like(model.head.weight, dtype=torch.float32)
    set_main_grads(model, {"head.weight": main_grad})
    model.loss(batch, torch.tensor(0.02)).backward()
    once = main_grad.clone()
    model.loss(batch, torch.tensor(0.02)).backward()
    assert torch.equal(main_grad, 2 * once), "equal batches add equal bits"
    main_grad.fill_(1.0)
    model.loss(batch, torch.tensor(0.02)).backward()
    assert torch.equal(main_grad, 1.0 + once)
    assert not torch.equal(main_grad, main_grad.bfloat16().float()), "bf16 could have held this sum"


RECOMPUTED: list[dict[str, Any]] = [
    {"recompute": "full"},
    {"recompute": "full", "recompute_layers": 1},
    *({"recompute": "selective", "recompute_modules": [module]} for module in ("attention", "norm", "activation")),
    {"recompute": "selective", "recompute_modules": ["attention", "norm", "activation"]},
]


@pytest.mark.parametrize("name", FAMILIES)
def test_recompute_changes_no_bit_even_with_dropout(name: str) -> None:
    """Of what autograd gets and of main gradients, to which nothing is added twice."""
    config = family(name, **ALL_DROPOUTS)
    batch = random_batch(config)

    def results(**settings: Any) -> tuple[Tensor, dict[str, Tensor]]:
        model = perturbed(config, **settings)
        main_grads = zero_main_grads(model)
        loss, gradients = loss_and_gradients(model, batch)
        return loss, {**main_grads, **gradients}

    loss, kept = results()
    torch.manual_seed(99)  # whatever state the generator is in
    for settings in RECOMPUTED:
        found_loss, found = results(**settings)
        assert torch.equal(found_loss, loss)
        assert all(torch.equal(gradient, found[key]) for key, gradient in kept.items()), settings


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_is_near_fp64(name: str) -> None:
    config = family(name, init_std=0.02)
    batch = random_batch(config)
    exact, rounded = (
        loss_and_gradients(perturbed(config, dtype=dtype), batch) for dtype in (torch.float64, torch.bfloat16)
    )
    assert rounded[0].dtype == torch.float32
    assert abs(rounded[0] / exact[0] - 1) < 0.02
    for key, gradient in exact[1].items():
        assert (rounded[1][key] - gradient).norm() < 0.1 * gradient.norm(), key


@pytest.mark.long
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_blocks_compute_the_same(name: str) -> None:
    config = family(name)
    batch = random_batch(config)
    loss, gradients = loss_and_gradients(perturbed(config), batch)
    compiled_loss, compiled = loss_and_gradients(perturbed(config, compile=True), batch)
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-10, atol=1e-12)
    for key, gradient in gradients.items():
        torch.testing.assert_close(compiled[key], gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", FAMILIES)
def test_main_grads_receive_what_autograd_would(name: str, compiled: bool) -> None:
    """All parameters but the positions'. Two microbatches are in flight, as in a pipeline."""
    config = family(name)
    batches = [random_batch(config, seed=seed) for seed in (1, 2)]
    first, second = (loss_and_gradients(perturbed(config), batch)[1] for batch in batches)
    model = perturbed(config, compile=compiled)
    names = first.keys() - {"embedding.position.weight"}
    flat = torch.full((sum(first[name].numel() for name in names),), 2.0, dtype=torch.float64)  # as in a buffer
    parts = flat.split([first[name].numel() for name in names])
    main_grads = {name: part.view_as(first[name]) for name, part in zip(names, parts, strict=True)}
    set_main_grads(model, main_grads)
    for loss in [model.loss(batch, 1.0 / batch.loss_mask.sum().double()) for batch in batches]:
        loss.backward()
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == (key in main_grads), key
        found = main_grads[key] - 2.0 if key in main_grads else parameter.grad
        torch.testing.assert_close(found, first[key] + second[key], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_is_compiled_where_blocks_are(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        "megalite.model.gpt.linear_cross_entropy", lambda hidden, *_, compile, **__: asked.append(compile)
    )
    config = family("llama")
    gpt(config, layers=range(0), embeds=True, has_loss=True, compile=compiled).loss(
        random_batch(config), torch.ones(())
    )
    assert asked == [compiled]


@pytest.mark.long
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_blocks_with_dropout_are_the_same_when_recomputed() -> None:
    """Attention inside documents, too."""
    config = small(**ALL_DROPOUTS)
    batch = random_batch(config)
    batch = replace(batch, documents=(torch.arange(20) // 7).to(torch.int32).expand(3, 20))
    kept = loss_and_gradients(perturbed(config, compile=True), batch)
    torch.manual_seed(99)
    for settings in (RECOMPUTED[0], RECOMPUTED[-1]):
        recomputed = loss_and_gradients(perturbed(config, compile=True, **settings), batch)
        assert torch.equal(kept[0], recomputed[0])
        for key, gradient in kept[1].items():
            torch.testing.assert_close(recomputed[1][key], gradient, rtol=1e-12, atol=1e-13)


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_cuda_agrees_with_cpu(name: str, compiled: bool) -> None:
    config = family(name, head_size=16)
    batch = random_batch(config)
    loss, gradients = loss_and_gradients(perturbed(config), batch)
    device = torch.device("cuda")
    on_gpu = gpt(config, dtype=torch.float64, device=device, seed=1, compile=compiled)
    on_gpu.load_state_dict(perturbed(config).state_dict())
    gpu_loss = on_gpu.loss(batch.to(device), 1 / batch.loss_mask.sum().double().to(device))
    gpu_loss.backward()
    torch.testing.assert_close(gpu_loss.detach().cpu(), loss, rtol=1e-10, atol=1e-12)
    for key, parameter in on_gpu.named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), gradients[key], rtol=1e-9, atol=1e-11)
