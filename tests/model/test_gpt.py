"""The model as a whole: who attends to whom, where gradients go, and what recompute must not change."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.schema import ModelConfig
from megalite.data.batch import whole_batch
from tests.model.small import ALL_DROPOUTS, FAMILIES, gpt, loss_and_gradients, perturbed, random_batch, small

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


def test_one_document_per_sequence_is_the_same_as_none() -> None:
    config = small()
    model, batch = perturbed(config), random_batch(config)
    whole = replace(batch, documents=torch.zeros(3, 20, dtype=torch.int32))
    (loss, gradients), (masked_loss, masked) = loss_and_gradients(model, batch), loss_and_gradients(model, whole)
    torch.testing.assert_close(loss, masked_loss, **EXACT)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, masked[name], **EXACT)


def test_the_loss_is_the_scaled_sum_over_unmasked_tokens_of_the_real_vocabulary() -> None:
    config = small()
    model, batch = perturbed(config), random_batch(config)
    losses = torch.nn.functional.cross_entropy(
        model.logits(batch).flatten(0, 1), batch.labels.flatten(), reduction="none"
    )
    scale = torch.tensor(0.37, dtype=torch.float64)
    torch.testing.assert_close(model.loss(batch, scale), 0.37 * losses[batch.loss_mask.flatten()].sum(), **EXACT)


@pytest.mark.parametrize("tied", [True, False])
def test_gradient_main_grads_receive_what_autograd_would(tied: bool) -> None:
    config = small(tie_embeddings=tied)
    model, batch = perturbed(config), random_batch(config)
    loss, expected = loss_and_gradients(model, batch)
    names = model.main_grad_parameters
    assert set(names) == {name for name, gradient in expected.items() if gradient.ndim > 1}
    main_grads = {name: torch.full_like(expected[name], 2.0) for name in names}
    model.set_main_grads(main_grads)
    main_grad_loss, gradients = loss_and_gradients(model, batch)
    assert torch.equal(main_grad_loss, loss)
    assert gradients.keys() == expected.keys() - main_grads.keys(), (
        "autograd gets no gradient of a parameter with a main gradient"
    )
    for name, main_grad in main_grads.items():
        torch.testing.assert_close(main_grad - 2.0, expected[name], rtol=1e-10, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], **EXACT)


def test_the_main_grad_of_a_bf16_model_is_summed_in_fp32() -> None:
    """To the bit where it gets one gradient at a time: a head of its own, all tokens in one chunk."""
    config = small(tie_embeddings=False, loss_chunk_tokens=1000)
    model, batch = perturbed(config, dtype=torch.bfloat16), random_batch(config)
    main_grad = torch.zeros_like(model.head.weight, dtype=torch.float32)
    model.set_main_grads({"head.weight": main_grad})
    model.loss(batch, torch.tensor(0.02)).backward()
    once = main_grad.clone()
    model.loss(batch, torch.tensor(0.02)).backward()
    assert torch.equal(main_grad, 2 * once), "equal batches add equal bits"
    main_grad.fill_(1.0)
    model.loss(batch, torch.tensor(0.02)).backward()
    assert torch.equal(main_grad, 1.0 + once)
    assert not torch.equal(main_grad, main_grad.bfloat16().float()), "bf16 could have held this sum"


def test_the_main_grad_of_a_tied_bf16_model_is_the_sum_of_both_gradients() -> None:
    config = small()
    model, batch = perturbed(config, dtype=torch.bfloat16), random_batch(config)
    main_grad = torch.zeros_like(model.embedding.word.weight, dtype=torch.float32)
    model.set_main_grads({"embedding.word.weight": main_grad})
    model.loss(batch, torch.tensor(0.02)).backward()
    once = main_grad.clone()
    model.loss(batch, torch.tensor(0.02)).backward()
    torch.testing.assert_close(main_grad, 2 * once, rtol=1e-6, atol=1e-8)  # rounded in another order


RECOMPUTED: list[dict[str, Any]] = [
    {"recompute": "full"},
    {"recompute": "full", "recompute_layers": 1},
    *({"recompute": "selective", "recompute_modules": [module]} for module in ("attention", "norm", "activation")),
    {"recompute": "selective", "recompute_modules": ["attention", "norm", "activation"]},
]


@pytest.mark.parametrize("name", FAMILIES)
def test_recompute_changes_no_bit_even_with_dropout(name: str) -> None:
    config = family(name, **ALL_DROPOUTS)
    batch = random_batch(config)
    kept = loss_and_gradients(perturbed(config), batch)
    torch.manual_seed(99)  # whatever state the generator is in
    for settings in RECOMPUTED:
        recomputed = loss_and_gradients(perturbed(config, **settings), batch)
        assert torch.equal(kept[0], recomputed[0])
        assert all(torch.equal(gradient, recomputed[1][key]) for key, gradient in kept[1].items()), settings


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
def test_biases_and_norms_of_compiled_blocks_have_main_grads(name: str, compiled: bool) -> None:
    """Not compiled the mathematics are the same. Two microbatches are in flight, as in a pipeline."""
    config = family(name)
    batches = [random_batch(config, seed=seed) for seed in (1, 2)]
    first, second = (loss_and_gradients(perturbed(config), batch)[1] for batch in batches)
    model = perturbed(config, compile=compiled)
    model.compiled = True
    names = model.main_grad_parameters
    assert {name for name in first if name.startswith("blocks.")} <= set(names)
    assert set(names) < set(first), "not the final norm: it is not compiled"
    flat = torch.full((sum(first[name].numel() for name in names),), 2.0, dtype=torch.float64)  # as in a buffer
    parts = flat.split([first[name].numel() for name in names])
    main_grads = {name: part.view_as(first[name]) for name, part in zip(names, parts, strict=True)}
    model.set_main_grads(main_grads)
    model.compiled = compiled
    for loss in [model.loss(batch, 1.0 / batch.loss_mask.sum().double()) for batch in batches]:
        loss.backward()
    for name, main_grad in main_grads.items():
        assert model.get_parameter(name).grad is None, name
        torch.testing.assert_close(main_grad - 2.0, first[name] + second[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_is_compiled_where_blocks_are(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    asked: list[bool] = []

    def keep(hidden: Tensor, *_: Any, compile: bool, **__: Any) -> Tensor:
        asked.append(compile)
        return hidden.sum()

    monkeypatch.setattr("megalite.model.gpt.linear_cross_entropy", keep)
    config = family("llama")
    ends = {"layers": range(0), "embeds": True, "has_loss": True}
    model = gpt(config, dtype=torch.float64, device=torch.device("cpu"), seed=1, compile=compiled, **ends)  # type: ignore[arg-type]
    model.loss(random_batch(config), torch.ones(()))
    assert asked == [compiled]


@pytest.mark.long
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_blocks_with_dropout_are_the_same_when_recomputed() -> None:
    config = small(**ALL_DROPOUTS)
    batch = random_batch(config)
    kept = loss_and_gradients(perturbed(config, compile=True), batch)
    torch.manual_seed(99)
    for settings in RECOMPUTED[::3]:
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
