"""Recomputed work: the same bits of every gradient, less kept for backward by exactly what the formulas say."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.model.causal_attention import causal_attention
from megalite.model.norm import RMSNorm
from megalite.parallel.context import ParallelContext
from megalite.parallel.layout import ParallelLayout
from megalite.tensor_parallel.collectives import (
    TensorGroup,
    finish,
    start_all_gather,
    start_reduce_scatter,
)
from megalite.tensor_parallel.dropout import DropoutKey, DropoutStreams, hash_dropout
from megalite.tensor_parallel.recompute import chain
from tests.ranks import run_ranks
from tests.tensor_parallel.live_bytes import LiveBytes, kept_bytes

CPU = torch.device("cpu")
S, B, HEADS, D = 32, 2, 4, 8
H = HEADS * D
MODULES = ("attention", "norm", "activation")
P = 0.2


class SmallBlock(nn.Module):
    """A pre-norm block with every kind of work that can be rebuilt; `group`: split over it, in both senses."""

    def __init__(
        self,
        rebuild: tuple[str, ...] = (),
        *,
        gated: bool = False,
        attention_dropout: float = 0.0,
        group: TensorGroup | None = None,
    ) -> None:
        super().__init__()
        self.rebuild, self.gated, self.attention_dropout, self.group = rebuild, gated, attention_dropout, group
        t = 1 if group is None else group.size
        norm = partial(RMSNorm, eps=1e-5, dtype=torch.float64, device=CPU) if gated else nn.LayerNorm
        self.attention_norm, self.mlp_norm = norm(H).double(), norm(H).double()
        generator = torch.Generator().manual_seed(0 if group is None else group.index)
        shapes = ((3 * H // t, H), (H, H // t), ((8 if gated else 4) * H // t, H), (H, 4 * H // t))
        self.qkv, self.out, self.up, self.down = (
            nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator) / 5) for shape in shapes
        )
        for parameter in (*self.attention_norm.parameters(), *self.mlp_norm.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))

    def forward(self, x: Tensor, key: DropoutKey) -> Tensor:
        """[s, b, h] -> [s, b, h]"""
        norm = "norm" in self.rebuild
        x = x + hash_dropout(chain(self.attention_norm, self._attention, x, rebuild=norm), P, key)
        return x + hash_dropout(chain(self.mlp_norm, self._mlp, x, rebuild=norm), P, key)

    def _attention(self, x: Tensor) -> Tensor:
        qkv = _Column.apply(x, self.qkv, self.group)
        return chain(
            self._core,
            lambda heads: _Row.apply(heads, self.out, self.group),
            qkv,
            rebuild="attention" in self.rebuild,
            random=self.attention_dropout > 0,
        )

    def _core(self, qkv: Tensor) -> Tensor:
        fused = qkv.unflatten(-1, (-1, 3, D))  # [s, b, heads, 3, d]
        if self.attention_dropout == 0 and not torch.compiler.is_compiling():
            return causal_attention(fused)
        q, k, v = (part.permute(1, 2, 0, 3) for part in fused.unbind(3))
        out = F.scaled_dot_product_attention(q, k, v, None, self.attention_dropout, is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _mlp(self, x: Tensor) -> Tensor:
        up = _Column.apply(x, self.up, self.group)
        down = lambda x: _Row.apply(x, self.down, self.group)  # noqa: E731
        return chain(self._activation, down, up, rebuild="activation" in self.rebuild)

    def _activation(self, x: Tensor) -> Tensor:
        if not self.gated:
            return F.gelu(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class _Column(torch.autograd.Function):
    """A column-parallel product under sequence parallelism: gathers its input, again in backward."""

    @staticmethod
    def forward(ctx, x, weight, group):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x if group is None else finish(start_all_gather(x, group)), weight)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        whole = x if ctx.group is None else finish(start_all_gather(x, ctx.group))
        grad_x = grad @ weight
        grad_x = grad_x if ctx.group is None else finish(start_reduce_scatter(grad_x, ctx.group))
        return grad_x, grad.flatten(0, 1).t() @ whole.flatten(0, 1), None


class _Row(torch.autograd.Function):
    """A row-parallel product under sequence parallelism: scatters the sum."""

    @staticmethod
    def forward(ctx, x, weight, group):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.group = group
        out = F.linear(x, weight)
        return out if group is None else finish(start_reduce_scatter(out, group))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        grad = grad if ctx.group is None else finish(start_all_gather(grad, ctx.group))
        return grad @ weight, grad.flatten(0, 1).t() @ x.flatten(0, 1), None


def arguments(s: int = S, *, start: int = 0) -> tuple[Tensor, DropoutKey]:
    x = torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(3))[start : start + s]
    streams = DropoutStreams(1, [(0, "mlp")], H, CPU)
    key = streams.keys(torch.arange(B), torch.arange(start, start + s))[0, "mlp"]
    return x.clone().requires_grad_(), key


def results(block: nn.Module, x: Tensor, key: DropoutKey, *, full: bool = False) -> list[Tensor]:
    """Output and all gradients, the generator seeded at the block's entry."""

    def run(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        out: Tensor = block(x, key)
        return out

    out = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False) if full else run(x)
    torch.manual_seed(99)  # what the generator does in between must not matter
    gradients = torch.autograd.grad((out * out.detach().cos()).sum(), [x, *block.parameters()])
    return [out, *gradients]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * len(expected)


@given(
    rebuild=st.sets(st.sampled_from(MODULES), min_size=1).map(tuple),
    gated=st.booleans(),
    attention_dropout=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=16, deadline=None)
def test_recomputed_gradients_are_the_same_bits(
    rebuild: tuple[str, ...], gated: bool, attention_dropout: float
) -> None:
    kept, rebuilt = (SmallBlock(which, gated=gated, attention_dropout=attention_dropout) for which in ((), rebuild))
    expected = results(kept, *arguments())
    assert_same_bits(results(rebuilt, *arguments()), expected)
    assert_same_bits(results(kept, *arguments(), full=True), expected)


UNIT = 8 * S * B * H  # bytes of one [s, b, h]
STATISTICS = 8 * S * B  # bytes of one number per row


def kept(rebuild: tuple[str, ...] = (), *, gated: bool = False, attention_dropout: float = 0.0) -> int:
    block, (x, key) = SmallBlock(rebuild, gated=gated, attention_dropout=attention_dropout), arguments()
    return kept_bytes(lambda x: block(x, key), [x], [key.rows, key.channels, *block.parameters()])


def test_rebuilding_norms_keeps_neither_their_outputs_nor_their_statistics() -> None:
    # LayerNorm: two statistics; the input of the first norm is the block's own argument
    assert kept() - kept(("norm",)) == 2 * (UNIT + 2 * STATISTICS)
    assert kept(gated=True) - kept(("norm",), gated=True) == 2 * (UNIT + STATISTICS)


def test_rebuilding_activations_keeps_their_argument_only() -> None:
    assert kept() - kept(("activation",)) == 4 * UNIT  # the output of GELU
    # silu(gate) and silu(gate) * up; of gate and up, one tensor, nothing changes
    assert kept(gated=True) - kept(("activation",), gated=True) == 8 * UNIT


def test_rebuilding_attention_keeps_q_k_and_v_only() -> None:
    """Without: copies of q, k and v, the probabilities, and the output, which the output projection reads."""
    probabilities = 8 * B * HEADS * S * S
    assert kept() - kept(("attention",)) == 3 * UNIT + probabilities + UNIT - 3 * UNIT


def test_a_block_keeps_what_the_formula_says() -> None:
    """In units of [s, b, h], the block's own argument not counted: norms, their outputs and arguments, 2 + 1; q, k and
    v 3; attention's output 1; the activation's argument and output 4 + 4; and statistics and probabilities."""
    assert kept() == (2 + 1 + 3 + 1 + 4 + 4) * UNIT + 4 * STATISTICS + 8 * B * HEADS * S * S
    assert kept(MODULES) == (1 + 3 + 4) * UNIT
    block, (x, key) = SmallBlock(), arguments()
    full = partial(checkpoint, lambda x: block(x, key), use_reentrant=False, preserve_rng_state=False)
    assert kept_bytes(full, [x], [key.rows, key.channels, *block.parameters()]) == 0


def test_each_rebuilt_tensor_is_free_right_after_its_use() -> None:
    """At no time in backward are rebuilt outputs of two pieces of work alive: the peak falls by all of them but one."""
    peaks, rows, wide, layers = {}, 2048, 16 * H, 8
    unit = 8 * rows * wide
    shapes = [(wide, H), (H, wide)] * layers
    weights = [torch.randn(shape, dtype=torch.float64).mul_(0.1).requires_grad_() for shape in shapes]
    for rebuild in (False, True):
        with LiveBytes(weights) as live:
            x = torch.randn(rows, H, dtype=torch.float64)
            for up, down in zip(weights[::2], weights[1::2], strict=True):
                x = x + chain(F.gelu, partial(F.linear, weight=down), F.linear(x, up), rebuild=rebuild)
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
    x, _ = arguments()
    out = chain(activation, two_products, x, rebuild=True)
    assert len(calls) == 1
    first = torch.autograd.grad(out.sum(), [x, weight], retain_graph=True)
    assert len(calls) == 2
    assert_same_bits(list(torch.autograd.grad(out.sum(), [x, weight])), list(first))
    assert len(calls) == 3
    with torch.no_grad():
        chain(activation, two_products, x, rebuild=True)
    assert len(calls) == 4


def test_nothing_outlives_its_graph() -> None:
    """No cycle: what is kept is free once the result is, without the garbage collector."""
    gc.disable()
    try:
        x, key = arguments()
        block = SmallBlock(MODULES)
        with LiveBytes([x, key.rows, key.channels, *block.parameters()]) as live:
            out = block(x, key)
            assert live.now() > UNIT
            out.sum().backward()
            for parameter in (x, *block.parameters()):
                parameter.grad = None
            del out
            assert live.now() == 0
            out = block(x, key)
            reference = weakref.ref(out)
            del out  # never backpropagated
            assert reference() is None
            assert live.now() == 0
    finally:
        gc.enable()


def test_an_argument_changed_in_place_is_noticed() -> None:
    x, _ = arguments()
    up = x * 2
    out = chain(F.gelu, lambda y: y * y, up, rebuild=True)
    with torch.no_grad():
        up.add_(1)
    with pytest.raises(AssertionError, match="in place"):
        out.sum().backward()


def test_what_surrounded_forward_is_entered_again() -> None:
    entered = []

    @contextmanager
    def around() -> Iterator[None]:
        entered.append(True)
        yield

    x, _ = arguments()
    chain(F.gelu, lambda y: y * y, x, rebuild=True, around=around).sum().backward()
    assert entered == [True]


def compiled_results(block: SmallBlock) -> tuple[list[Tensor], int]:
    """Results, and the bytes that the compiled forward kept beyond its arguments."""
    x, key = arguments()
    own = {tensor.untyped_storage().data_ptr() for tensor in (x, key.rows, key.channels, *block.parameters())}
    storages: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        if saved.untyped_storage().data_ptr() not in own:
            storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    block.compile(fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        found = results(block, x, key)
    return found, sum(storages.values()) - UNIT  # the loss of `results` keeps one


def test_a_compiled_block_rebuilds_the_same_and_keeps_as_little() -> None:
    """Attention's dropout mask included. The partitioner unasked keeps the argument of every matrix product."""
    expected, kept_unasked = compiled_results(SmallBlock(attention_dropout=0.3))
    found, kept = compiled_results(SmallBlock(MODULES, attention_dropout=0.3))
    assert_same_bits(found, expected)
    assert kept_unasked > (2 + 1 + 3 + 1 + 4 + 4) * UNIT
    assert kept == (1 + 3 + 4) * UNIT + 5056  # the state of the CPU's generator


def on_a_rank(context: ParallelContext) -> None:
    """Sequence parallel: gathers, scatters and masks of this rank's rows; rebuilt bits equal kept ones."""
    group = TensorGroup.of(context.group("tp"))
    assert group is not None
    x, key = arguments(S // group.size, start=group.index * S // group.size)
    expected = results(SmallBlock(group=group, attention_dropout=0.1), x, key)
    for rebuild in (*((module,) for module in MODULES), MODULES):
        assert_same_bits(results(SmallBlock(rebuild, group=group, attention_dropout=0.1), x, key), expected)
    assert_same_bits(results(SmallBlock(group=group, attention_dropout=0.1), x, key, full=True), expected)


def test_recompute_is_exact_on_several_ranks() -> None:
    run_ranks(on_a_rank, 2, dtype=torch.float64, layout=ParallelLayout(tp=2))
