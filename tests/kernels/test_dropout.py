"""Hashed dropout masks: functions of global coordinates alone, exact in backward and compiled, and as good as drawn."""

import math
from collections.abc import Callable
from itertools import combinations
from time import perf_counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.kernels import dropout
from megalite.kernels.dropout import DropoutKey, DropoutStreams, hash_dropout

CPU = torch.device("cpu")
P = 0.1
SIGMAS = 6.0  # of millions of draws 5 are likely, 6 are not; all is deterministic, and no seed was chosen
SHAPE = {"layers": 4, "s": 128, "b": 4, "h": 512}


def streams(*, seed: int = 1, count: int = 3) -> DropoutStreams:
    return DropoutStreams(seed, [(layer, "mlp") for layer in range(count)], CPU)


def key(width: int, samples: Tensor, positions: Tensor, *, seed: int = 1, layer: int = 0) -> DropoutKey:
    return streams(seed=seed).keys(samples, positions, width)[layer, "mlp"]


def mask(key: DropoutKey, p: float = P) -> Tensor:
    """True where kept: [s, b, h]."""
    ones = torch.ones(*key.rows.shape[:2], len(key.channels))
    return hash_dropout(ones, p, key) != 0


def masks(*, layers: int, s: int, b: int, h: int, first: int = 0, seed: int = 1, p: float = P) -> Tensor:
    """[layers, s, b, h]"""
    keys = streams(seed=seed, count=layers).keys(torch.arange(first, first + b), torch.arange(s), h)
    return torch.stack([mask(value, p) for value in keys.values()])


def worst_z(**shape: int) -> dict[str, float]:
    """Standard deviations by which masks [layers, s, b, h] miss independence, the worst of each kind.

    share: of all kept. dim: sums over all the other dims. pair: products of neighbours, up to 64 apart in any dim.
    rectangle: products of the four corners of rectangles in any two dims, which keys joined by + or ^ give away.
    alike: two rows, whichever, that agree more or less often than they should (of p = 0.5).
    """
    unit = (masks(**shape).double() - (1 - P)) / math.sqrt(P * (1 - P))  # mean 0, variance 1
    dims = [
        unit.transpose(0, dim).flatten(1).sum(1) * (size / unit.numel()) ** 0.5 for dim, size in enumerate(unit.shape)
    ]
    pairs, rectangles = [0.0], [0.0]
    for dim, size in enumerate(unit.shape):
        pairs += [z_of(neighbours(unit, dim, shift)) for shift in (1, 2, 3, 4, 8, 16, 64) if shift < size]
    for one, other in combinations(range(unit.dim()), 2):
        for shift in (1, 2, 8):
            if shift < min(unit.shape[one], unit.shape[other]):
                rectangles.append(z_of(neighbours(neighbours(unit, one, shift), other, shift)))
    signs = masks(**shape, p=0.5).flatten(0, 2).float() * 2 - 1
    alike = (signs @ signs.t()).fill_diagonal_(0) / math.sqrt(shape["h"])
    return {
        "share": z_of(unit),
        "dim": max(z.abs().max().item() for z in dims),
        "pair": max(pairs),
        "rectangle": max(rectangles),
        "alike": alike.abs().max().item(),
    }


def neighbours(unit: Tensor, dim: int, shift: int) -> Tensor:
    """Products of elements `shift` apart along a dim."""
    size = unit.shape[dim]
    return unit.narrow(dim, 0, size - shift) * unit.narrow(dim, shift, size - shift)


def z_of(products: Tensor) -> float:
    return abs(products.sum().item()) / math.sqrt(products.numel())


def test_the_mask_of_an_element_depends_on_its_global_coordinates_only() -> None:
    samples, positions = torch.arange(10, 14), torch.arange(16)
    whole = mask(key(40, samples, positions))
    for b in (1, 2):  # another micro-batch size
        parts = [mask(key(40, samples[at : at + b], positions)) for at in range(0, 4, b)]
        assert torch.equal(torch.cat(parts, dim=1), whole)
    for t in (2, 4):  # sequence parallelism: rank i holds rows i * s / t on
        parts = [mask(key(40, samples, positions[at : at + 16 // t])) for at in range(0, 16, 16 // t)]
        assert torch.equal(torch.cat(parts, dim=0), whole)
        assert not torch.equal(parts[0], parts[1])
    zigzag = torch.tensor([0, 1, 14, 15])  # context parallelism
    assert torch.equal(mask(key(40, samples, zigzag)), whole[zigzag])


def test_every_seed_stream_sample_and_position_has_a_mask_of_its_own() -> None:
    base = {"seed": 1, "layer": 0, "sample": 5, "position": 3}
    found = []
    for changed in ({}, *({name: value + 1} for name, value in base.items())):
        at = {**base, **changed}
        rows = torch.tensor([at["sample"]]), torch.tensor([at["position"]])
        found.append(mask(key(256, *rows, seed=at["seed"], layer=at["layer"]), p=0.5))
    for one, other in combinations(found, 2):
        assert abs((one == other).double().mean() - 0.5) < SIGMAS * 0.5 / 16


@given(p=st.floats(0, 0.999), seed=st.integers(0, 2**40), first=st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_the_dropped_share_is_p_and_the_rest_is_scaled(p: float, seed: int, first: int) -> None:
    x = torch.full((32, 4, 256), 3.0, dtype=torch.float64)
    out = hash_dropout(x, p, key(256, torch.arange(first, first + 4), torch.arange(32), seed=seed))
    dropped = (out == 0).double().mean().item()
    assert abs(dropped - p) <= SIGMAS * math.sqrt(p * (1 - p) / x.numel()) + 1 / x.numel()
    assert torch.equal(out[out != 0], torch.full_like(out[out != 0], 3.0 * (1 / (1 - p))))


def test_masks_have_no_structure() -> None:
    for shape in (SHAPE, {"layers": 24, "s": 16, "b": 2, "h": 768}, {**SHAPE, "first": 10**6, "seed": 2}):
        found = worst_z(**shape)
        assert max(found.values()) < SIGMAS, found


def _joined(rows: Tensor, channels: Tensor) -> Tensor:
    return rows[..., :1] ^ channels


def _counter(rows: Tensor, channels: Tensor) -> Tensor:
    return (rows[..., :1] + torch.arange(len(channels), dtype=torch.int32)) * -0x61C88647


def _one_product(rows: Tensor, channels: Tensor) -> Tensor:
    """The hash up to its first multiplication: good enough for all but the strictest question."""
    return (rows[..., :1] ^ channels) * -0x12A52B45


@pytest.mark.parametrize(("weak", "caught_by"), [(_joined, "rectangle"), (_counter, "pair"), (_one_product, "alike")])
def test_a_weak_hash_is_caught(
    monkeypatch: pytest.MonkeyPatch, weak: Callable[[Tensor, Tensor], Tensor], caught_by: str
) -> None:
    monkeypatch.setattr(dropout, "_element_bits", weak)
    assert worst_z(**SHAPE)[caught_by] > SIGMAS


def test_rows_that_were_not_mixed_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "_mix", lambda x: x)
    assert worst_z(**SHAPE)["alike"] > SIGMAS


def test_rows_whose_first_words_are_equal_still_differ() -> None:
    words = torch.randint(-(2**31), 2**31, (2, 1, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    words[1, 0, 0] = words[0, 0, 0]
    one, other = mask(DropoutKey(words, key(4096, torch.arange(1), torch.arange(1)).channels), p=0.5)
    assert abs((one == other).double().mean() - 0.5) < SIGMAS * 0.5 / 64


def test_backward_derives_the_same_mask_and_keeps_none() -> None:
    x = torch.randn(8, 3, 20, dtype=torch.float64, requires_grad=True)
    derived = key(20, torch.arange(3), torch.arange(8))
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = hash_dropout(x, P, derived)
    assert sum(tensor.nbytes for tensor in kept) == 8 * 8 * 3 + 4 * 20
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad != 0, out != 0)
    assert torch.autograd.gradcheck(lambda x: hash_dropout(x, P, derived), (x,))
    strided = torch.randn(20, 3, 8, dtype=torch.float64).transpose(0, 2)
    assert torch.equal(hash_dropout(strided, P, derived), hash_dropout(strided.contiguous(), P, derived))


def test_the_words_of_channels_are_hashed_once_for_all_microbatches() -> None:
    of_model, (samples, positions) = streams(), (torch.arange(3), torch.arange(8))
    first, second = (of_model.keys(samples + at, positions, 20)[0, "mlp"] for at in (0, 3))
    assert first.channels is second.channels
    assert len(of_model.keys(samples, positions, 12)[0, "mlp"].channels) == 12


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_masks_are_the_same_bits_and_a_new_step_compiles_nothing(backend: str) -> None:
    compiled = torch.compile(lambda x, key: hash_dropout(x, P, key), backend=backend, fullgraph=True, dynamic=False)
    for step in range(3):
        x = torch.randn(8, 3, 37, requires_grad=True)
        derived = key(37, torch.arange(3) + 3 * step, torch.arange(8), layer=step)
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            out = compiled(x, derived)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(out, hash_dropout(x, P, derived))
        assert torch.equal(grad, hash_dropout(torch.ones_like(x), P, derived))


@pytest.mark.gpu
def test_masks_on_a_gpu_are_the_same_bits() -> None:
    cuda = torch.device("cuda")
    there = DropoutStreams(1, [(0, "mlp")], cuda)
    on_gpu = there.keys(torch.arange(4, device=cuda), torch.arange(64, device=cuda), 300)[0, "mlp"]
    on_cpu = key(300, torch.arange(4), torch.arange(64))
    x = torch.randn(64, 4, 300, dtype=torch.float64)
    expected = hash_dropout(x, P, on_cpu)
    assert torch.equal(hash_dropout(x.cuda(), P, on_gpu).cpu(), expected)
    assert torch.equal(torch.compile(hash_dropout)(x.cuda(), P, on_gpu).cpu() != 0, expected != 0)


def test_it_costs_no_more_than_torchs_dropout() -> None:
    """On a CPU forward takes half of torch's time, with backward about as long; compiled, a twentieth and less. The
    bound allows for a busy machine."""
    x = torch.randn(512, 2, 768)
    derived = key(768, torch.arange(2), torch.arange(512))
    assert fastest(lambda: hash_dropout(x, P, derived)) < 2 * fastest(lambda: F.dropout(x, P))


def fastest(call: Callable[[], object], runs: int = 7) -> float:
    """Seconds"""
    times = []
    for _ in range(runs):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return min(times)
