"""Our mathematics is transformers': logits and the gradient of every parameter of imported models, in fp64."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megalite.hf.families import FAMILIES
from megalite.hf.saved_model import sources
from tests.hf.peers import PEERS, as_in_files, batch_of, imported, largest_error, save_peer


def peer_gradients(peer: Any, name: str, config: Any) -> dict[str, Tensor]:
    """The peer's gradients under our names, by the same map that imports its weights."""
    family = FAMILIES[PEERS[name].model_type]
    gradients = dict(as_in_files(family.model_type, {key: value.grad for key, value in peer.named_parameters()}))
    return {ours: source.join(gradients.__getitem__) for ours, source in sources(family, config).items()}


@pytest.mark.parametrize("name", PEERS)
def test_logits_and_every_gradient_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    peer = save_peer(name, tmp_path)
    config, model = imported(tmp_path, **{"moe.aux_loss_coeff": 0.0})  # theirs is another function
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(53, (3, 25), generator=generator)
    batch = batch_of(tokens, torch.rand(3, 24, generator=generator) > 0.3)
    scale = 1 / batch.loss_mask.sum().double()

    logits = peer(input_ids=batch.tokens).logits
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    loss = (losses * batch.loss_mask.flatten()).sum() * scale
    loss.backward()
    our_loss = model.loss(batch, scale)
    our_loss.backward()

    # transformers computes RMSNorm and rotary tables of fp64 models in fp32.
    logit_bound, gradient_bound = (1e-9, 1e-9) if name.startswith("gpt2") else (1e-6, 2e-5)
    assert largest_error(model.logits(batch), logits, logit_bound) <= 1
    assert largest_error(our_loss, loss, logit_bound) <= 1
    gradients = peer_gradients(peer, name, config)
    ours = dict(model.named_parameters())
    assert gradients.keys() == ours.keys()
    for key, gradient in gradients.items():
        assert gradient.abs().max() > 0, key
        found = ours[key].grad
        assert found is not None, key
        assert largest_error(found, gradient, gradient_bound) <= 1, key
        if key in ("embedding.word.weight", "head.weight"):
            assert not found[config.vocab_size :].any(), "rows that pad the vocabulary have gradient zero"


@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if FAMILIES[peer.model_type].has_experts])
def test_balancing_losses_are_what_transformers_makes_of_its_router_logits(name: str, tmp_path: Path) -> None:
    """Of one layer at a time: over several, theirs is of the means. Its shares add up to top_k, ours to 1."""
    peer = save_peer(name, tmp_path)
    config, model = imported(tmp_path, **{"moe.aux_loss_coeff": 0.3, "moe.z_loss_coeff": 0.2})
    generator = torch.Generator().manual_seed(3)
    batch = batch_of(torch.randint(53, (3, 25), generator=generator), torch.rand(3, 24, generator=generator) > 0.3)
    model.loss(batch, torch.ones((), dtype=torch.float64))
    every_layer = peer(input_ids=batch.tokens, output_router_logits=True).router_logits
    assert len(every_layer) == len(model.router_metrics) == len(config.expert_layers)
    moe, tokens = config.moe, int(batch.loss_mask.sum())
    for logits, figures in zip(every_layer, model.router_metrics, strict=True):
        balance, z = figures[-4:-2] / tokens
        theirs = load_balancing_loss_func((logits,), moe.num_experts, moe.top_k, batch.loss_mask)
        assert isinstance(theirs, Tensor)
        assert balance.item() == pytest.approx(0.3 * theirs.item() / moe.top_k, rel=1e-6)
        square = logits.logsumexp(1).square()[batch.loss_mask.flatten()]
        assert z.item() == pytest.approx(0.2 * square.mean().item(), rel=1e-6)
