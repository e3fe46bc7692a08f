"""Recomputed work: the same bits of every gradient, less kept for backward by exactly what the formulas say."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.config.schema import ModelConfig
from megalite.kernels.attention_mask import AttentionMask, dense_mask
from megalite.kernels.dropout import DropoutStreams
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.model.attention import BlockInputs
from megalite.model.block import Block
from megalite.model.recompute import Recompute
from megalite.model.rotary import rotary_frequencies, rotary_tables
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, TpContext
from tests.model.small import FAMILIES, small
from tests.ranks import run_ranks
from tests.tensor_parallel.live_bytes import LiveBytes, kept_bytes

CPU = torch.device("cpu")
S, B, HEADS, D = 32, 2, 4, 8
H = HEADS * D
MODULES = ("attention", "norm", "activation")


def config_of(family: str, attention_dropout: float = 0.0) -> ModelConfig:
    sizes = {"hidden_size": H, "head_size": D, "ffn_hidden_size": 4 * H, "num_attention_heads": HEADS}
    return small(**{**FAMILIES[family], **sizes, "dropout": 0.2, "attention_dropout": attention_dropout})


class Case:
    """The model's block, random in every parameter, its weights' main gradients, and its arguments.
    `group`: split over it, along the sequence too."""

    def __init__(self, config: ModelConfig, recompute: tuple[str, ...] = (), group: TensorGroup | None = None) -> None:
        size, index = (1, 0) if group is None else (group.size, group.index)
        self.block = Block(config, TpContext(torch.float64, CPU, group, group is not None), recompute)
        generator = torch.Generator().manual_seed(index)
        for parameter in self.block.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
        self.main_grads = []
        for layer in self.block.modules():
            if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
                layer.main_grad = torch.zeros_like(layer.weight, requires_grad=False).flatten(0, -2)
                self.main_grads.append(layer.main_grad)
        self.inputs = inputs_of(config, torch.arange(S // size) + index * (S // size))
        x = torch.randn(S // size, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(3 + index))
        self.x = x.requires_grad_()

    @property
    def given(self) -> list[Tensor]:
        """Tensors that are there before forward."""
        inputs = self.inputs
        keys = [inputs.probability_dropout, inputs.attention_dropout, inputs.mlp_dropout]
        tables = self.inputs.rotation or ()
        words = [word for key in keys if key is not None for word in (key.rows, key.channels)]
        return [self.x, *self.block.parameters(), *self.main_grads, *words, *tables]

    def run(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x, self.inputs)
        return out

    def run_again_in_backward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.run, x, use_reentrant=False, preserve_rng_state=False)
        return out

    def results(self, *, full: bool = False) -> list[Tensor]:
        """Output and all gradients."""
        out = (self.run_again_in_backward if full else self.run)(self.x)
        for main_grad in self.main_grads:  # what other microbatches add in between must not matter
            main_grad += 0
        (out * out.detach().cos()).sum().backward()
        gradients = [tensor.grad for tensor in (self.x, *self.block.parameters()) if tensor.grad is not None]
        assert len(gradients) + len(self.main_grads) == 1 + len(list(self.block.parameters())), (
            "a main gradient's owner has none"
        )
        assert all(main_grad.any() for main_grad in self.main_grads)
        return [out.detach(), *gradients, *self.main_grads]


def inputs_of(config: ModelConfig, positions: Tensor) -> BlockInputs:
    keys = DropoutStreams(1, [(0, "attention"), (0, "mlp")], CPU).keys(torch.arange(B), positions, H)
    rotation = None
    if config.position == "rope":
        frequencies = rotary_frequencies(config)
        rotation = rotary_tables(frequencies, torch.arange(S).expand(B, S))
    dropped = None
    if config.attention_dropout:
        count = HEADS * len(positions) // S  # of this rank; which ones does not matter here
        found = DropoutStreams(1, [(0, "probabilities")], CPU)
        dropped = found.attention_keys(torch.arange(B), torch.arange(count), torch.arange(S))[0, "probabilities"]
    return BlockInputs(rotation, AttentionMask(), dropped, keys[0, "attention"], keys[0, "mlp"])


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * len(expected)


@given(
    family=st.sampled_from(list(FAMILIES)),
    rebuild=st.sets(st.sampled_from(MODULES), min_size=1).map(tuple),
    attention_dropout=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=16, deadline=None)
def test_recomputed_gradients_are_the_same_bits(
    family: str, rebuild: tuple[str, ...], attention_dropout: float
) -> None:
    """Those that go into main gradients, too: nothing is added twice."""
    config = config_of(family, attention_dropout)
    expected = Case(config).results()
    assert_same_bits(Case(config, rebuild).results(), expected)
    assert_same_bits(Case(config).results(full=True), expected)


UNIT = 8 * S * B * H  # bytes of one [s, b, h]
STATISTICS = 8 * S * B  # bytes of one number per row


def kept(family: str, rebuild: tuple[str, ...] = (), *, full: bool = False) -> int:
    case = Case(config_of(family), rebuild)
    return kept_bytes(case.run_again_in_backward if full else case.run, [case.x], case.given)


def test_each_module_keeps_less_by_exactly_its_own_tensors() -> None:
    """In units of [s, b, h], the block's own argument not counted. The inner width is 4 units."""
    probabilities = 8 * B * HEADS * S * S
    # norms, their outputs and arguments, 2 + 1; q, k and v 3; attention's output 1; GELU's argument and output 4 + 4
    assert kept("gpt2") == (2 + 1 + 3 + 1 + 4 + 4) * UNIT + 4 * STATISTICS + probabilities
    assert kept("gpt2") - kept("gpt2", ("norm",)) == 2 * (UNIT + 2 * STATISTICS)
    assert kept("gpt2") - kept("gpt2", ("activation",)) == 4 * UNIT
    # copies of q, k and v and what the output projection reads, against the projection they are made of
    assert kept("gpt2") - kept("gpt2", ("attention",)) == 3 * UNIT + probabilities + UNIT - 3 * UNIT
    assert kept("gpt2", MODULES) == (1 + 3 + 4) * UNIT
    assert kept("gpt2", full=True) == 0


def test_gated_blocks_keep_less_too() -> None:
    assert kept("llama") - kept("llama", ("norm",)) == 2 * (UNIT + STATISTICS)
    # silu(gate) and silu(gate) * up; of gate and up, one tensor, nothing changes
    assert kept("llama") - kept("llama", ("activation",)) == 8 * UNIT


def activation_of() -> Tensor:
    """[s, b, h]"""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(S, B, H, dtype=torch.float64, generator=generator).requires_grad_()


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
        case = Case(config_of("gpt2"), MODULES)
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
    case = Case(config_of("gpt2", 0.3), rebuild)
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
    assert kept_unasked > (2 + 1 + 3 + 1 + 4 + 4) * UNIT
    assert kept == (1 + 3 + 4) * UNIT


@pytest.mark.long
@pytest.mark.parametrize("attention_dropout", [0.0, 0.3])
def test_a_compiled_block_rebuilds_attention_inside_documents(attention_dropout: float) -> None:
    def results(*, compiled: bool) -> list[Tensor]:
        case = Case(config_of("gpt2", attention_dropout), MODULES if compiled else ())
        mask = dense_mask((torch.arange(S) >= 20).expand(B, S), torch.float64)
        case.inputs = replace(case.inputs, mask=AttentionMask(mask))
        if compiled:
            case.block.compile(fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")
        return case.results()

    torch.testing.assert_close(results(compiled=True), results(compiled=False), rtol=1e-10, atol=1e-12)


def on_a_rank(context: ParallelContext) -> None:
    """Sequence parallel: gathers, scatters, masks and main gradients of this rank; rebuilt bits equal kept ones."""
    group = TensorGroup.of(context.group("tp"))
    assert group is not None
    for family in FAMILIES:
        config = config_of(family, attention_dropout=0.1)
        expected = Case(config, group=group).results()
        for rebuild in (*((module,) for module in MODULES), MODULES):
            assert_same_bits(Case(config, rebuild, group).results(), expected)
        assert_same_bits(Case(config, group=group).results(full=True), expected)


def test_recompute_is_exact_on_several_ranks() -> None:
    run_ranks(on_a_rank, 2, dtype=torch.float64, layout=ParallelLayout(tp=2))
