"""Reads arrays in a file piece by piece, as they are asked for.

Not a memory map: where a page of a map is gone (the file was cut short, its disk fails) the system ends the process
without a word. A read that comes up short is a refusal that names the file.
"""

import os
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.config.user_files import refusing

AGAIN = "restore it from a copy; a run continues from its newest checkpoint"


class OpenedFile:
    """A regular file, open for reading as long as this object lives; its size is that of the opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with refusing(path, "check its permissions"):
            self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self.descriptor)
            state = os.fstat(self.descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise ValueError("is not a regular file")
        self.size = state.st_size


@dataclass(frozen=True)
class DiskArray:
    """`count` numbers from byte `offset` of a file on; a slice of them is read and given as a numpy array."""

    file: OpenedFile
    dtype: np.dtype[Any]
    offset: int
    count: int

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int | slice) -> Any:
        if not isinstance(place, slice):
            at = range(self.count)[place]
            return self[at : at + 1][0]
        start, stop, step = place.indices(self.count)
        assert step == 1, place
        content = np.empty(max(0, stop - start), self.dtype)
        self._read(self.offset + start * self.itemsize, content.view(np.uint8))
        return content

    def _read(self, start: int, content: npt.NDArray[np.uint8]) -> None:
        """Fill `content` with the bytes of the file from `start` on; the system may give them in several reads."""
        with refusing(self.file.path, AGAIN):
            while len(content):
                count = os.preadv(self.file.descriptor, [content.data], start)
                if count == 0:
                    size = os.fstat(self.file.descriptor).st_size
                    now = f"has {size:,} bytes now, {self.file.size:,} when it was opened"
                    raise ValueError(f"{now}: it was cut short since")
                start, content = start + count, content[count:]
