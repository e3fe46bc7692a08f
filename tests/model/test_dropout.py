"""Dropout masks are functions of (seed, sample, layer), of the right size, and gone in evaluation."""

from dataclasses import replace

import torch

from megalite.kernels.attention_mask import AttentionMask
from megalite.model.attention import BlockInputs
from tests.model.small import ALL_DROPOUTS, perturbed, random_batch, small


def test_masks_follow_the_samples_and_nothing_else() -> None:
    config = small(**ALL_DROPOUTS)
    model, batch = perturbed(config), random_batch(config, first_sample=5)
    first = model(batch)
    torch.manual_seed(1)
    assert torch.equal(model(batch), first)
    assert not torch.equal(model(replace(batch, samples=batch.samples + 1)), first)


def test_each_kind_of_dropout_acts_in_training_only() -> None:
    for kind in ALL_DROPOUTS:
        config = small(**{kind: 0.3})
        model, plain, batch = perturbed(config), perturbed(small()), random_batch(config)
        assert not torch.equal(model(batch), plain(batch)), kind
        torch.testing.assert_close(model.eval()(batch), plain(batch))


def test_embedding_dropout_drops_its_share_and_scales_the_rest() -> None:
    config = small(embedding_dropout=0.1, hidden_size=64, vocab_size=2)
    model, batch = perturbed(config), random_batch(config, b=8, s=64)
    kept = model._embed(batch, model._dropout_keys(batch)) / model.eval()._embed(batch, {})
    dropped = (kept == 0).double().mean()
    assert abs(dropped - 0.1) < 4 * (0.1 * 0.9 / kept.numel()) ** 0.5
    torch.testing.assert_close(kept[kept != 0], torch.full_like(kept[kept != 0], 1 / 0.9))


def test_residual_dropout_drops_shares_of_attention_and_of_mlp() -> None:
    model = perturbed(small(dropout=0.25, bias=True))
    block = model.blocks["0"]
    with torch.no_grad():
        for projection in (block.attention.out, block.mlp.down):  # both outputs become ones
            projection.weight.zero_()
            projection.bias.fill_(1.0)
    keys = model._dropout_keys(random_batch(model.config, b=8, s=64))
    inputs = BlockInputs(None, AttentionMask(), None, keys[0, "attention"], keys[0, "mlp"])
    out = block(torch.zeros(64, 8, 24, dtype=torch.float64), inputs) * 0.75
    for kept, share in ((0, 0.0625), (1, 0.375), (2, 0.5625)):
        found = torch.isclose(out, torch.tensor(float(kept), dtype=torch.float64)).double().mean()
        assert abs(found - share) < 4 * (share * (1 - share) / out.numel()) ** 0.5, kept
