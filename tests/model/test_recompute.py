"""Recomputed work is done once, and free right after its use. (Same bits: test_gpt.py; what a block keeps by the
formulas: tests/tensor_parallel/test_activation_memory.py.)"""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.kernels.dropout import DropoutStreams
from megalite.model.attention import BlockInputs
from megalite.model.block import Block
from megalite.model.recompute import Recompute
from megalite.tensor_parallel.layers import TpContext
from tests.model.small import CPU, FAMILIES, small, zero_main_grads
from tests.tensor_parallel.live_bytes import LiveBytes

S, B, HEADS, D = 32, 2, 4, 8
H = HEADS * D
MODULES = ("attention", "norm", "activation")


class Case:
    """The model's block, random in every parameter, its weights' main gradients, and its arguments."""

    def __init__(self, recompute: tuple[str, ...] = (), attention_dropout: float = 0.0) -> None:
        sizes = {"hidden_size": H, "head_size": D, "ffn_hidden_size": 4 * H, "num_attention_heads": HEADS}
        dropouts = {"dropout": 0.2, "attention_dropout": attention_dropout}
        config = small(**{**FAMILIES["gpt2"], **sizes, **dropouts})
        self.block = Block(config, TpContext(torch.float64, CPU), recompute)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.block.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
        self.main_grads = [*zero_main_grads(self.block).values()]
        streams = DropoutStreams(1, [(0, "attention"), (0, "mlp"), (0, "probabilities")], CPU)
        samples, places = torch.arange(B), torch.arange(S)
        keys = streams.keys(samples, places, H)
        dropped = streams.attention_keys(samples, torch.arange(HEADS), places)[0, "probabilities"]
        self.inputs = BlockInputs(
            probability_dropout=dropped if attention_dropout else None,
            attention_dropout=keys[0, "attention"],
            mlp_dropout=keys[0, "mlp"],
        )
        self.x = activation_of()

    @property
    def given(self) -> list[Tensor]:
        """Tensors that are there before forward."""
        keys = [self.inputs.probability_dropout, self.inputs.attention_dropout, self.inputs.mlp_dropout]
        words = [word for key in keys if key is not None for word in (key.rows, key.channels)]
        return [self.x, *self.block.parameters(), *self.main_grads, *words]

    def run(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x, self.inputs)
        return out

    def results(self) -> list[Tensor]:
        """Output and all gradients."""
        out = self.run(self.x)
        for main_grad in self.main_grads:  # what other microbatches add in between must not matter
            main_grad += 0
        (out * out.detach().cos()).sum().backward()
        gradients = [tensor.grad for tensor in (self.x, *self.block.parameters()) if tensor.grad is not None]
        return [out.detach(), *gradients, *self.main_grads]


def activation_of() -> Tensor:
    """[s, b, h]"""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(S, B, H, dtype=torch.float64, generator=generator).requires_grad_()


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * len(expected)


UNIT = 8 * S * B * H  # bytes of one [s, b, h]


def test_each_rebuilt_tensor_is_free_right_after_its_use() -> None:
    """At no time in backward are rebuilt outputs of two pieces of work alive: the peak falls by all of them but one."""
    peaks, rows, wide, layers = {}, 2048, 16 * H, 8
    unit = 8 * rows * wide
    shapes = [(wide, H), (H, wide)] * layers
    weights = [torch.randn(shape, dtype=torch.float64).mul_(0.1).requires_grad_() for shape in shapes]
    for rebuild in (False, True):
        with LiveBytes(weights) as live:
            x, recompute = torch.randn(rows, H, dtype=torch.float64), Recompute(["activation"] if rebuild else [])
            gelu = recompute.wrap("activation", F.gelu)
            for up, down in zip(weights[::2], weights[1::2], strict=True):
                with recompute.outputs_dropped():
                    x = x + F.linear(gelu(F.linear(x, up)), down)
            torch.autograd.grad(x.sum(), weights)
        peaks[rebuild] = live.peak / unit
    assert peaks[False] > 2 * layers
    assert peaks[False] - peaks[True] == pytest.approx(layers - 1, abs=0.1)


def test_work_is_done_again_once_however_much_of_it_is_asked_for() -> None:
    calls = []

    def activation(x: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return F.silu(x) * torch.tanh(x)

    def two_products(x: Tensor) -> Tensor:
        return F.linear(x, weight) + F.linear(x.flatten(0, 1), weight).view(S, B, H)

    weight = nn.Parameter(torch.randn(H, H, dtype=torch.float64))
    x = activation_of()
    recompute = Recompute(["activation"])
    rebuilt = recompute.wrap("activation", activation)
    with recompute.outputs_dropped():
        out = two_products(rebuilt(x))
    assert len(calls) == 1
    first = torch.autograd.grad(out.sum(), [x, weight], retain_graph=True)
    assert len(calls) == 2
    assert_same_bits(list(torch.autograd.grad(out.sum(), [x, weight])), list(first))
    assert len(calls) == 3
    with torch.no_grad(), recompute.outputs_dropped():
        two_products(rebuilt(x))
    assert len(calls) == 4


def test_nothing_outlives_its_graph() -> None:
    """No cycle: what is kept is free once the result is, without the garbage collector."""
    gc.disable()
    try:
        case = Case(MODULES)
        with LiveBytes(case.given) as live:
            out = case.run(case.x)
            assert live.now() > UNIT
            out.sum().backward()
            for parameter in (case.x, *case.block.parameters()):
                parameter.grad = None
            del out
            assert live.now() == 0
            out = case.run(case.x)
            reference = weakref.ref(out)
            del out  # never backpropagated
            assert reference() is None
            assert live.now() == 0
    finally:
        gc.enable()


def test_an_argument_changed_in_place_is_noticed() -> None:
    x = activation_of()
    up = x * 2
    out = Recompute(["activation"]).wrap("activation", F.gelu)(up)
    with torch.no_grad():
        up.add_(1)
    with pytest.raises(AssertionError, match="in place"):
        out.sum().backward()


def compiled_results(rebuild: tuple[str, ...]) -> tuple[list[Tensor], int]:
    """Results, and the bytes that the compiled forward keeps beyond what was given."""
    case = Case(rebuild, 0.3)
    case.block.compile(fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")
    given = {tensor.untyped_storage().data_ptr() for tensor in case.given}
    graph: Any = case.run(case.x).grad_fn
    # With an in-place sum in backward it keeps part of its tensors where hooks do not see them.
    saved = [tensor.untyped_storage() for tensor in (*graph.saved_tensors, *graph._tensors_no_vc_check)]
    storages = {storage.data_ptr(): storage.nbytes() for storage in saved}
    del graph, saved
    return case.results(), sum(size for pointer, size in storages.items() if pointer not in given)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="looks where torch 2.13 keeps what a compiled forward saves")
def test_a_compiled_block_rebuilds_the_same_and_keeps_as_little() -> None:
    """Attention's dropout mask included. The partitioner unasked keeps the argument of every matrix product."""
    expected, kept_unasked = compiled_results(())
    found, kept = compiled_results(MODULES)
    assert_same_bits(found, expected)
    # norms, their outputs and arguments, 2 + 1; q, k and v 3; attention's output 1; GELU's argument and output 4 + 4
    assert kept_unasked > (2 + 1 + 3 + 1 + 4 + 4) * UNIT
    assert kept == (1 + 3 + 4) * UNIT
