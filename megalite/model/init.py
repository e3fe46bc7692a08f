"""Start values: a parameter's values depend on (seed, logical name, position in the logical tensor) alone.

The logical tensor is seen as two-dimensional, (prod(shape[:-1]), shape[-1]), and cut into 256 x 256 tiles. Each tile is
drawn whole in fp32 from its own generator, keyed by a hash of (seed, name, tile row, tile column), then cropped; a
shard draws only the tiles that it touches. So neither layout nor number of threads nor dtype changes a value. numpy's
Philox takes the whole 128-bit key and computes alike on every machine; torch's CPU generator would keep 32 bits of it.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import product
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from megalite.layout.parameters import ParameterRecord, Shard, ShardBox, shard

TILE = 256


def start_values(
    records: Iterable[ParameterRecord],
    seed: int,
    *,
    held: Callable[[ParameterRecord], Shard] = shard,
    threads: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(name, fp32 CPU tensor) of what a rank holds of each record, by default all: what masters and parameters both
    start from."""
    with ThreadPoolExecutor(threads or max(1, torch.get_num_threads())) as pool:
        for record in records:
            mine = held(record)
            values = torch.empty(mine.shape)
            for box in mine.boxes:
                values[box.local] = draw(record, seed, box, pool)
            yield record.name, values


def draw(record: ParameterRecord, seed: int, box: ShardBox, pool: ThreadPoolExecutor) -> Tensor:
    """The box of the logical tensor, fp32 of the box's sizes."""
    if record.init != "normal":
        return torch.full(box.sizes, record.std)
    values = np.empty((prod(box.sizes[:-1]), box.sizes[-1]), dtype=np.float32)
    rows = np.arange(prod(record.shape[:-1])).reshape(record.shape[:-1])[box.logical[:-1]].ravel()  # ascending
    left, right = box.offsets[-1], box.offsets[-1] + box.sizes[-1]

    def write(at: tuple[int, int]) -> None:
        """Draw tile `at` = (tile row, tile column) and write what the box holds of it."""
        key = blake2b(repr((seed, record.name, *at)).encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        tile = generator.standard_normal((TILE, TILE), dtype=np.float32)
        first, last = np.searchsorted(rows, (at[0] * TILE, (at[0] + 1) * TILE))
        start, stop = max(at[1] * TILE, left), min((at[1] + 1) * TILE, right)
        inside = tile[rows[first:last] - at[0] * TILE, start - at[1] * TILE : stop - at[1] * TILE]
        np.multiply(inside, np.float32(record.std), out=values[first:last, start - left : stop - left])

    tiles = product(np.unique(rows // TILE).tolist(), range(left // TILE, -(-right // TILE)))
    list(pool.map(write, tiles))  # numpy releases the GIL while it draws; list() re-raises what a thread raised
    return torch.from_numpy(values).view(box.sizes)


def fill(module: nn.Module, values: Iterable[tuple[str, Tensor]]) -> None:
    """Copy values by name into the module's parameters, rounding to their dtype; names it lacks are passed over."""
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in values:
            if name in parameters:
                parameters[name].copy_(value)
