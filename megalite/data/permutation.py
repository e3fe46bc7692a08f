"""Shuffles 0..n-1 by a key, without an array: element i of the shuffled order is computed.

A Feistel network over the k bits that hold n - 1: the two halves take turns to be xor-ed with a hash of the other,
which is its own inverse whatever the hash, so the network is a bijection of 0..2^k-1. Cycle walking (apply again while
the result is n or more) restricts a bijection of a set to a bijection of its subset; since 2^k < 2n, for n > 2, that
takes less than two applications on average (Black and Rogaway 2002, section 4).
"""

import numpy as np
import numpy.typing as npt
import xxhash

IntArray = npt.NDArray[np.int64]
ROUNDS = 8  # half-rounds; four suffice for a pseudo-random permutation (Luby and Rackoff 1988), small halves want more


def round_keys(seed: int, *stream: int) -> npt.NDArray[np.uint64]:
    """Keys of all rounds from the seed and the numbers that name the shuffle (part, epoch)."""
    name = ",".join(map(str, (seed, *stream)))
    keys = [xxhash.xxh3_64_intdigest(f"{name}/{number}".encode()) for number in range(ROUNDS)]
    return np.array(keys, dtype=np.uint64)


def permute(indices: IntArray, size: int, keys: npt.NDArray[np.uint64]) -> IntArray:
    """Where the shuffle of 0..size-1 puts each of `indices` (any shape, all in that range)."""
    assert size >= 1
    if size == 1:
        return np.zeros_like(indices)
    bits = max(2, (size - 1).bit_length())
    values = _network(indices.astype(np.uint64), bits, keys)
    outside = values >= np.uint64(size)
    while outside.any():
        values[outside] = _network(values[outside], bits, keys)
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _network(values: npt.NDArray[np.uint64], bits: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 0..2^bits-1."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for number, key in enumerate(keys):
        if number % 2 == 0:
            high = high ^ (_mix(low, key) & high_mask)
        else:
            low = low ^ (_mix(high, key) & low_mask)
    return (high << low_bits) | low


def _mix(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele et al. 2014) over value xor key; array products wrap modulo 2^64."""
    mixed = values ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
