"""Says which tokens sample i of a run holds: a function of (seed, data, i) alone.

A sample is seq_length + 1 neighbouring tokens, and starts seq_length after the one before it in the file, so that no
token is a label twice in an epoch. Documents are packed without gaps; a sample starts and ends anywhere.
Each part of a blend is walked in epochs of its own, each in a new order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megalite.data.blend import Blend
from megalite.data.permutation import IntArray, permute, round_keys
from megalite.data.token_file import TokenFile


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
    """An endless sequence of samples. `seed` None: each part in the order of its file, the same every epoch."""

    parts: Sequence[Part]
    weights: tuple[int, ...]
    seq_length: int
    vocab_size: int
    seed: int | None
    end_of_document: int | None

    def epochs(self, samples: int) -> list[float]:
        """How many times the first `samples` go through each part."""
        counts = Blend(self.weights).counts(samples)
        return [count / part.samples(self.seq_length) for count, part in zip(counts, self.parts, strict=True)]

    def without_repeats(self) -> int:
        """How many samples from the start come before any part begins its second epoch."""
        blend = Blend(self.weights)
        return min(blend.index(number, part.samples(self.seq_length)) for number, part in enumerate(self.parts))

    def places(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        """Part [n] and first token within the part's file [n] of each sample of `indices` [n]."""
        parts, numbers = Blend(self.weights).locate(indices)
        starts = np.empty_like(indices)
        for part in np.unique(parts):
            chosen = parts == part
            count = self.parts[part].samples(self.seq_length)
            epochs, windows = np.divmod(numbers[chosen], count)
            if self.seed is not None:
                for epoch in np.unique(epochs):
                    now = epochs == epoch
                    windows[now] = permute(windows[now], count, _keys(self.seed, int(part), int(epoch)))
            starts[chosen] = self.parts[part].first + windows * self.seq_length
        return parts, starts

    def read(self, indices: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Tokens [n, seq_length + 1] of the samples `indices` [n], and their places. Every id is below vocab_size."""
        parts, starts = self.places(indices)
        rows = np.empty((len(indices), self.seq_length + 1), dtype=np.int64)
        for row, part, start in zip(rows, parts, starts, strict=True):
            row[:] = self.parts[part].file.tokens[start : start + self.seq_length + 1]
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


_keys = lru_cache(maxsize=64)(round_keys)
