"""Says which tokens sample i of a run holds: a function of (seed, data, i) alone.

A sample is seq_length + 1 neighbouring tokens, and starts seq_length after the one before it in the file, so that no
token is a label twice in an epoch. Documents are packed without gaps; a sample starts and ends anywhere.

Parts of a blend are mixed by Webster's method: part p's sample number c is due at time (c + 1/2) / weight, and samples
are taken in order of their times. Webster's counts never shrink as x grows, so the counts at two neighbouring block
borders say exactly which samples lie between them; nothing grows with the run.

A run may change its blend or the length of its samples. Then a part goes on behind those of its samples that came
before (`Position`), and keeps its number, which names its order; samples of another length begin the same share of an
epoch later.

Each part is walked in epochs of its own, each in a new order: 0..n-1 shuffled by a key, without an array. A Feistel
network over the k bits that hold n - 1 is a bijection of 0..2^k-1. Cycle walking (apply again while the result is n or
more) restricts it to 0..n-1, in less than two applications on average (Black and Rogaway 2002, section 4).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import lcm

import numpy as np
import numpy.typing as npt
import xxhash

from megalite.data.token_file import TokenFile

IntArray = npt.NDArray[np.int64]
ROUNDS = 8  # half-rounds; four suffice for a pseudo-random permutation (Luby and Rackoff 1988), small halves want more
BLOCK = 1024  # samples of a blend that are laid out together


@dataclass(frozen=True)
class Part:
    """Tokens [first, stop) of a token file."""

    file: TokenFile
    first: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.first

    def samples(self, seq_length: int) -> int:
        """Whole samples in one epoch."""
        return max(0, (self.tokens - 1) // seq_length)


@dataclass(frozen=True)
class SampleSource:
    """An endless sequence of samples. `seed` None: each part in the order of its file, the same every epoch.

    `first`: the sample of the run with which the blend begins. Before it the run has taken so many samples of each part
    as `before` says (empty: none); `numbers`: what names the order of each part (empty: its place).
    """

    parts: Sequence[Part]
    weights: tuple[int, ...]
    seq_length: int
    vocab_size: int
    seed: int | None
    end_of_document: int | None
    first: int = 0
    before: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()

    def taken(self, samples: int) -> list[int]:
        """How many samples of each part are among the first `samples` of the run."""
        counts = Blend(self.weights).counts(samples - self.first)
        return [count + before for count, before in zip(counts, self.before or (0,) * len(counts), strict=True)]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    def epochs(self, samples: int) -> list[float]:
        """How many times the first `samples` of the run go through each part."""
        counts = self.taken(samples)
        return [count / part.samples(self.seq_length) for count, part in zip(counts, self.parts, strict=True)]

    def without_repeats(self) -> int:
        """How many samples from the start come before any part begins its second epoch."""
        blend = Blend(self.weights)
        return min(blend.index(number, part.samples(self.seq_length)) for number, part in enumerate(self.parts))

    def places(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        """Part [n] and first token within the part's file [n] of each sample of `indices` [n]."""
        parts, numbers = Blend(self.weights).locate(indices - self.first)
        if self.before:
            numbers = numbers + np.array(self.before)[parts]
        starts = np.empty_like(indices)
        for part in np.unique(parts):
            chosen = parts == part
            count, number = self.parts[part].samples(self.seq_length), (self.numbers or range(len(self.parts)))[part]
            epochs, windows = np.divmod(numbers[chosen], count)
            if self.seed is not None:
                for epoch in np.unique(epochs):
                    now = epochs == epoch
                    windows[now] = permute(windows[now], count, round_keys(self.seed, number, int(epoch)))
            starts[chosen] = self.parts[part].first + windows * self.seq_length
        return parts, starts

    def read(self, indices: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Tokens [n, seq_length + 1] of the samples `indices` [n], and their places. Every id is below vocab_size."""
        parts, starts = self.places(indices)
        rows = np.empty((len(indices), self.seq_length + 1), dtype=np.int64)
        for row, part, start in zip(rows, parts, starts, strict=True):
            row[:] = self.parts[part].file.read(start, start + self.seq_length + 1)
        if rows.max() >= self.vocab_size or rows.min() < 0:
            for index, part, start in zip(indices, parts, map(int, starts), strict=True):
                stop = start + self.seq_length + 1
                self.parts[part].file.check_range(start, stop, self.vocab_size, f", sample {index:,}")
        return rows, parts, starts

    def documents(self, parts: IntArray, starts: IntArray) -> tuple[npt.NDArray[np.int32], IntArray]:
        """For samples at these places [n]: the document of each input token within its sample, and its position within
        that document, counted from the sample's start for the first [n, seq_length]."""
        documents = np.zeros((len(parts), self.seq_length), dtype=np.int32)
        positions = np.tile(np.arange(self.seq_length, dtype=np.int64), (len(parts), 1))
        for row, (part, start) in enumerate(zip(parts, starts, strict=True)):
            for begin in self.parts[part].file.document_starts(int(start), int(start) + self.seq_length):
                documents[row, begin - start :] += 1
                positions[row, begin - start :] = np.arange(self.seq_length - (begin - start))
        return documents, positions


@dataclass(frozen=True)
class Position:
    """How far a run had come in its sources, each known by its content, when the blend began that it takes now."""

    first: int = 0  # the sample of the run with which it began
    seq_length: int = 0
    weights: dict[str, int] = field(default_factory=dict)  # of the sources in the blend
    sources: dict[str, list[int]] = field(default_factory=dict)  # of all so far: number, samples, and their length

    def moved(self, source: SampleSource, identities: Sequence[str], samples: int) -> tuple["Position", SampleSource]:
        """The position and the samples of a run that has taken `samples` so far and goes on with `source`, whose parts
        have these identities: as it was in the same blend, else a new one that begins here."""
        names = [f"{it}/{identities[:at].count(it)}" for at, it in enumerate(identities)]  # one may be there twice
        weights, length = dict(zip(names, source.weights, strict=True)), source.seq_length
        position = self
        if ([*weights.items()], length) != ([*self.weights.items()], self.seq_length):  # their order decides ties
            blend = Blend(tuple(self.weights.values()))
            counts = dict(zip(self.weights, blend.counts(samples - self.first) if self.weights else (), strict=True))
            known = {name: [at, taken + counts.get(name, 0), of] for name, (at, taken, of) in self.sources.items()}
            for name, part in zip(names, source.parts, strict=True):
                number, taken, of = known.get(name, [len(known), 0, length])
                known[name] = [number, _in_samples_of(length, part, taken, of), length]
            position = Position(samples, length, weights, known)
        before, numbers = (tuple(position.sources[name][at] for name in names) for at in (1, 0))
        return position, replace(source, first=position.first, before=before, numbers=numbers)


def _in_samples_of(length: int, part: Part, taken: int, before: int) -> int:
    """The number of samples of `length` tokens that are as far in the part as `taken` ones of `before` tokens: the same
    epochs, and of the last the same share, rounded up."""
    epochs, rest = divmod(taken, part.samples(before))
    return epochs * part.samples(length) + min(-(-rest * before // length), part.samples(length))


def integer_weights(weights: list[float]) -> tuple[int, ...]:
    """The same proportions as whole numbers, so that counting is exact at any length of the run."""
    shares = [Fraction(str(weight)) for weight in weights]
    common = lcm(*(share.denominator for share in shares))
    return tuple(int(share * common) for share in shares)


@dataclass(frozen=True)
class Blend:
    """Parts mixed in the proportions of `weights` (whole numbers, all above 0)."""

    weights: tuple[int, ...]

    @cached_property
    def total(self) -> int:
        return sum(self.weights)

    def counts(self, samples: int) -> tuple[int, ...]:
        """How many of the first `samples` come from each part. They sum to `samples`, exactly."""
        counts = [(2 * samples * weight + self.total) // (2 * self.total) for weight in self.weights]  # rounded shares
        parts = range(len(counts))
        while sum(counts) < samples:  # the part whose next sample is due first gives it
            counts[min(parts, key=lambda part: (self._due(part, counts[part]), part))] += 1
        while sum(counts) > samples:  # the part whose last sample is due last takes it back
            counts[max(parts, key=lambda part: (self._due(part, counts[part] - 1), part))] -= 1
        return tuple(counts)

    def locate(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        """For each sample of `indices` [n]: its part [n] and its number within that part [n]."""
        if len(self.weights) == 1:
            return np.zeros_like(indices), indices
        parts, numbers = np.empty_like(indices), np.empty_like(indices)
        blocks = indices // BLOCK
        for block in np.unique(blocks):
            chosen = blocks == block
            block_parts, block_numbers = _block(self, int(block))
            parts[chosen] = block_parts[indices[chosen] % BLOCK]
            numbers[chosen] = block_numbers[indices[chosen] % BLOCK]
        return parts, numbers

    def index(self, part: int, number: int) -> int:
        """Which sample of the run is sample `number` of `part`: so many of all parts are due before it."""
        own = self.weights[part]
        # Sample c of another part is before it if (2 c + 1) / weight < (2 number + 1) / own, or equal and the part is.
        last = [((2 * number + 1) * weight - (other >= part)) // own for other, weight in enumerate(self.weights)]
        return sum((odd + 1) // 2 for odd in last)  # so many odd numbers 2 c + 1 are not above it

    def _due(self, part: int, number: int) -> Fraction:
        return Fraction(2 * number + 1, self.weights[part])


@lru_cache(maxsize=8)
def _block(blend: Blend, block: int) -> tuple[IntArray, IntArray]:
    """Parts [BLOCK] and numbers within the part [BLOCK] of samples block * BLOCK onwards."""
    before, after = blend.counts(block * BLOCK), blend.counts((block + 1) * BLOCK)
    parts = np.repeat(np.arange(len(before)), np.subtract(after, before))
    numbers = np.concatenate([np.arange(first, stop) for first, stop in zip(before, after, strict=True)])
    due = (numbers + 0.5) / np.array(blend.weights, dtype=np.float64)[parts]
    order = np.lexsort((parts, due))
    return parts[order].astype(np.int64), numbers[order].astype(np.int64)


@lru_cache(maxsize=64)
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
