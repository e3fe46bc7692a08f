"""Start values: a parameter's values depend on (seed, logical name, position in the logical tensor) alone.

The logical tensor is seen as two-dimensional, (prod(shape[:-1]), shape[-1]), and cut into 256 x 256 tiles. Each tile is
drawn whole in fp32 from its own generator, keyed by a hash of (seed, name, tile row, tile column), then cropped; a
shard draws only the tiles that it touches. So neither layout nor number of threads nor dtype changes a value. numpy's
Philox takes the whole 128-bit key and computes alike on every machine; torch's CPU generator would keep 32 bits of it.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import product
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from megalite.parallel.parameters import ParameterRecord

TILE = 256


def start_values(
    records: Iterable[ParameterRecord], seed: int, threads: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, fp32 CPU tensor of the logical shape) of each record: what masters and parameters both start from."""
    with ThreadPoolExecutor(threads or max(1, torch.get_num_threads())) as pool:
        for record in records:
            yield record.name, _draw(record, seed, slice(None), pool)


def draw(record: ParameterRecord, seed: int, rows: slice = slice(None)) -> Tensor:
    """Rows `rows` of the record's two-dimensional view, fp32: [rows, shape[-1]] (whole: the logical shape)."""
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        return _draw(record, seed, rows, pool)


def fill(module: nn.Module, values: Iterable[tuple[str, Tensor]]) -> None:
    """Copy values by name into the module's parameters, rounding to their dtype; names it lacks are passed over."""
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in values:
            if name in parameters:
                parameters[name].copy_(value)


def _draw(record: ParameterRecord, seed: int, rows: slice, pool: ThreadPoolExecutor) -> Tensor:
    height, width = prod(record.shape[:-1]), record.shape[-1]
    first, stop, step = rows.indices(height)
    assert step == 1, "a shard is a contiguous range of rows"
    values = torch.empty(stop - first, width)  # [rows, width]
    if record.init == "normal":
        touched = product(range(first // TILE, -(-stop // TILE)), range(-(-width // TILE)))
        # numpy releases the GIL while it draws, so threads scale; list() re-raises what a thread raised.
        list(pool.map(lambda at: _draw_tile(record, seed, at, first, values.numpy()), touched))
    else:
        values.fill_(1.0 if record.init == "ones" else 0.0)
    return values.view(record.shape) if values.numel() == record.numel else values


def _draw_tile(record: ParameterRecord, seed: int, at: tuple[int, int], first: int, values: np.ndarray) -> None:
    """Draw tile `at` = (tile row, tile column) and write what `values`, rows from `first` on, holds of it."""
    key = blake2b(repr((seed, record.name, *at)).encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    tile = generator.standard_normal((TILE, TILE), dtype=np.float32)
    top, left = at[0] * TILE, at[1] * TILE
    low, high = max(top, first), min(top + TILE, first + len(values))
    width = min(TILE, values.shape[1] - left)
    np.multiply(
        tile[low - top : high - top, :width],
        np.float32(record.std),
        out=values[low - first : high - first, left : left + width],
    )
