"""Dropout whose masks are hashes of coordinates: (seed, stream, sample, position in the sample, channel), nothing else;
of attention's probabilities (seed, stream, sample, head, query, key).

So an element has the same mask on all ranks that hold it, whatever the layout and the micro-batch size: nothing is
drawn, saved or restored, and backward derives its mask again.

Each row of an activation has a key of 64 bits, hashed in a few operations on [streams, s, b] outside compiled blocks:
no number that changes from step to step is a constant of a graph. An element costs three multiplications of 32 bits
more. All of it is integer arithmetic that wraps around, so that CPUs, GPUs and compiled code agree bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, odd, as int64: spreads counters over 64 bits

Stream = tuple[int | str, ...]  # one dropout of a model, such as (layer, "mlp")


@dataclass(frozen=True)
class DropoutKey:
    """What one dropout of an activation [s, b, h], or of probabilities [b, heads, s, s], needs: two words per row, one
    per channel. All are int32."""

    rows: Tensor  # [s, b, 2] or [b, heads, s, 2]
    channels: Tensor  # [h] or [s]


class DropoutStreams:
    """The dropouts of one part of a model: each stream has masks of its own."""

    def __init__(self, seed: int, streams: Sequence[Stream], device: torch.device) -> None:
        words = [_word(seed, stream) for stream in streams]
        self._order = {stream: row for row, stream in enumerate(streams)}
        self._words = torch.tensor(words, dtype=torch.int64, device=device)
        self._of_channels = _word(seed, ("channels",))
        self._channels: dict[int, Tensor] = {}  # by width: the same for every microbatch

    def keys(self, samples: Tensor, positions: Tensor, width: int) -> dict[Stream, DropoutKey]:
        """The key of each stream for a microbatch's activations [s, b, width]. samples [b]: their index in the run.
        positions [s]: where in its sample each row lies, of this rank's part of the sequence."""
        return self._keys(width, samples.view(1, -1), positions.view(-1, 1))  # [s, b]

    def attention_keys(self, samples: Tensor, heads: Tensor, positions: Tensor) -> dict[Stream, DropoutKey]:
        """The key of each stream for the probabilities of a microbatch, [b, heads, s, s], of this rank's `heads`."""
        return self._keys(len(positions), samples.view(-1, 1, 1), heads.view(-1, 1), positions)  # [b, heads, s]

    def _keys(self, width: int, *coordinates: Tensor) -> dict[Stream, DropoutKey]:
        """Keys of rows; the coordinates broadcast to the shape of the rows."""
        rows = self._words.view(-1, *[1] * coordinates[0].dim())  # [streams, ...]
        for coordinate in coordinates:
            rows = _mix(rows + coordinate * GOLDEN)
        words = rows.unsqueeze(-1).view(torch.int32)  # [streams, ..., 2]
        if width not in self._channels:
            places = torch.arange(width, device=words.device)
            self._channels[width] = _mix(places * GOLDEN + self._of_channels).to(torch.int32)
        channels = self._channels[width]
        return {stream: DropoutKey(words[row], channels) for stream, row in self._order.items()}


def hash_dropout(x: Tensor, p: float, key: DropoutKey) -> Tensor:
    """x [s, b, h] or [b, heads, s, s] with a share p in [0, 1) of its elements zero and the others divided by 1 - p."""
    return _HashDropout.apply(x, key.rows, key.channels, p)  # type: ignore[no-any-return]


class _HashDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, channels: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(rows, channels)
        ctx.p = p
        return _drop(x, rows, channels, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        rows, channels = ctx.saved_tensors
        return _drop(grads[0], rows, channels, ctx.p), None, None, None


def _drop(x: Tensor, rows: Tensor, channels: Tensor, p: float) -> Tensor:
    kept = _element_bits(rows, channels) >= round(p * 2**32) - 2**31
    scaled = x * (1 / (1 - p))
    # Compiled by torch 2.11, a Function that returns the result of an in-place op gets zeros as gradient
    # (https://github.com/pytorch/pytorch/issues/180642).
    return scaled * kept if torch.compiler.is_compiling() else scaled.mul_(kept)


def _element_bits(rows: Tensor, channels: Tensor) -> Tensor:
    """32 bits per element as int32: [..., 2] and [h] -> [..., h].

    MurmurHash3's finalizer with the constants of Wellons' "triple32", searched for least bias; the second word of the
    row enters halfway, so that rows whose first words are alike differ. That `>>` copies the sign costs one bit of 32.
    """
    bits = rows[..., :1] ^ channels
    bits *= -0x12A52B45  # 0xED5AD4BB as int32
    bits ^= bits >> 11
    bits ^= rows[..., 1:]
    bits *= -0x53B3E4AF  # 0xAC4C1B51
    bits ^= bits >> 15
    bits *= 0x31848BAB
    return bits


def _mix(x: Tensor) -> Tensor:
    """A bijection of int64 in which each bit in moves half of the bits out (Stafford's variant 13, in SplitMix64)."""
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 as int64
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB as int64
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """x >> count with zeros shifted in."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _word(seed: int, stream: Stream) -> int:
    """63 random bits that belong to a stream."""
    return int.from_bytes(blake2b(repr((seed, "dropout", *stream)).encode(), digest_size=8).digest(), "little") >> 1
