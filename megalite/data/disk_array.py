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
from megalite.errors.problems import UserError

AGAIN = "restore it from a copy; a run continues from its newest checkpoint"


class OpenedFile:
    """A regular file, open for reading as long as this object lives; its size is that of now."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with refusing(path, "check its permissions"):
            self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self.descriptor)
            if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
                raise ValueError("is not a regular file")
        self.size, _ = self.state()
        self.refusal: UserError | None = None  # what somebody else found wrong with it

    def state(self) -> tuple[int, int]:
        """Size and time of the last change in ns, now."""
        state = os.fstat(self.descriptor)
        return state.st_size, state.st_mtime_ns

    def read(self, start: int, content: npt.NDArray[Any]) -> None:
        """Fill `content` with the bytes from `start` on."""
        if self.refusal:
            raise self.refusal
        view, done = content.view(np.uint8), 0
        with refusing(self.path, AGAIN):
            while done < len(view):
                count = os.preadv(self.descriptor, [view[done:].data], start + done)
                if count == 0:
                    now = f"has {self.state()[0]:,} bytes now, {self.size:,} when it was opened"
                    raise ValueError(f"{now}: it was cut short since")
                done += count


@dataclass(frozen=True)
class DiskArray:
    """`count` numbers from byte `offset` of a file on; what is indexed or sliced is read and given as numpy's."""

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
        self.file.read(self.offset + start * self.itemsize, content)
        return content
