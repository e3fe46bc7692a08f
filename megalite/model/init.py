"""Start values: a parameter's values depend on (seed, logical name, position in the logical tensor) alone.

The logical tensor is seen as two-dimensional, (prod(shape[:-1]), shape[-1]), and cut into 256 x 256 tiles. Each tile is
drawn whole in fp32 from its own generator, keyed by a hash of (seed, name, tile row, tile column), then cropped; a
shard draws only the tiles that it touches. So neither layout nor number of threads nor dtype changes a value. numpy's
Philox takes the whole 128-bit key and computes alike on every machine; torch's CPU generator would keep 32 bits of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import product
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from megalite.layout.parameters import ParameterRecord, shard

TILE = 256


def start_values(
    records: Iterable[ParameterRecord], seed: int, *, size: int = 1, index: int = 0, threads: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, fp32 CPU tensor) of each record: what masters and parameters both start from.

    The tensor is the shard of rank `index` of `size` along the record's axis; of one rank it is the logical tensor.
    """
    with ThreadPoolExecutor(threads or max(1, torch.get_num_threads())) as pool:
        for record in records:
            mine = shard(record, size, index)
            values = torch.empty(mine.shape)
            for box in mine.boxes:
                values[box.local] = _draw(record, seed, box.offsets, box.sizes, pool)
            yield record.name, values


def draw(
    record: ParameterRecord, seed: int, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """The box of the logical tensor that starts at `offsets`, fp32 of shape `sizes` (default: all of it)."""
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        return _draw(record, seed, offsets or (0,) * len(record.shape), sizes or record.shape, pool)


def fill(module: nn.Module, values: Iterable[tuple[str, Tensor]]) -> None:
    """Copy values by name into the module's parameters, rounding to their dtype; names it lacks are passed over."""
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in values:
            if name in parameters:
                parameters[name].copy_(value)


def _draw(
    record: ParameterRecord, seed: int, offsets: Sequence[int], sizes: Sequence[int], pool: ThreadPoolExecutor
) -> Tensor:
    values = torch.empty(prod(sizes[:-1]), sizes[-1])  # rows of the two-dimensional view that the box has a part of
    if record.init == "normal":
        jobs, left, filled = [], offsets[-1], 0
        for first, count in _row_runs(record.shape[:-1], offsets[:-1], sizes[:-1]):
            out = values.numpy()[filled : filled + count]
            rows = range(first // TILE, -(-(first + count) // TILE))
            columns = range(left // TILE, -(-(left + sizes[-1]) // TILE))
            jobs += [(at, (first, left), out) for at in product(rows, columns)]
            filled += count
        # numpy releases the GIL while it draws, so threads scale; list() re-raises what a thread raised.
        list(pool.map(lambda job: _draw_tile(record, seed, *job), jobs))
    else:
        values.fill_(1.0 if record.init == "ones" else 0.0)
    return values.view(tuple(sizes))


def _row_runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The rows of a box, flattened over the leading dims, as contiguous runs (first, count), ascending."""
    runs = [(0, 1)]
    for whole, offset, size in zip(shape, offsets, sizes, strict=True):
        if size == whole:
            runs = [(first * whole, count * whole) for first, count in runs]
        elif all(count == 1 for _, count in runs):
            runs = [(first * whole + offset, size) for first, _ in runs]
        else:
            runs = [((first + at) * whole + offset, size) for first, count in runs for at in range(count)]
    return runs


def _draw_tile(
    record: ParameterRecord, seed: int, at: tuple[int, int], origin: tuple[int, int], values: np.ndarray
) -> None:
    """Draw tile `at` = (tile row, tile column) and write what `values`, whose corner is `origin`, holds of it."""
    key = blake2b(repr((seed, record.name, *at)).encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    tile = generator.standard_normal((TILE, TILE), dtype=np.float32)
    (top, left), (first, first_column) = (at[0] * TILE, at[1] * TILE), origin
    low, high = max(top, first), min(top + TILE, first + values.shape[0])
    start, stop = max(left, first_column), min(left + TILE, first_column + values.shape[1])
    np.multiply(
        tile[low - top : high - top, start - left : stop - left],
        np.float32(record.std),
        out=values[low - first : high - first, start - first_column : stop - first_column],
    )
