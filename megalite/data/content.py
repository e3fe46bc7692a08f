"""Checks that large token files are what they were, by hashing all of their content.

A run's fingerprint covers every byte of a small file and 64 blocks of a large one. Rank 0 hashes large ones whole: in
a thread while training runs if the run never did, before its first step if size or time is another one since, and not
again if both are the same. It compares with the hash in PREFIX.json (files of ours) and with the one that the run took
before. Another content is refused; by the thread, at the next read.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash

from megalite.config.user_files import as_record, read_json, refusing
from megalite.data.atomic import write_atomically
from megalite.data.disk_array import AGAIN, DiskArray, OpenedFile
from megalite.data.token_file import HASH_WHOLE, TokenFile
from megalite.errors.problems import Problem, UserError

RECORD = "token_files.json"  # in a run's folder
BLOCK, PAUSE = 1 << 20, 0.001  # bytes at once, and seconds in between: training comes first
PATIENCE = 5.0  # seconds that the end of a run waits for a block: a disk may hang


@dataclass(frozen=True)
class Hashed:
    """One large token file, when its content was hashed."""

    size: int
    mtime_ns: int
    xxh3_128: str


@dataclass(frozen=True)
class Content:
    """The large ones of a run's token files, and what each was when its content was hashed."""

    files: Sequence[TokenFile]
    known: list[Hashed | None]
    record: Path

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Meanwhile, hash the files that never were."""
        new, stop = [number for number, was in enumerate(self.known) if was is None], threading.Event()

        def work() -> None:
            for number in new:
                if not self.hash(number, lambda: not stop.wait(PAUSE)):
                    return

        thread = threading.Thread(target=work, name="content", daemon=True)
        if new:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            if new:
                thread.join(PATIENCE)

    def hash(self, number: int, go_on: Callable[[], bool]) -> bool:
        """Hash file `number` as long as it may `go_on`, and remember it; False if it could not, or is another one."""
        found = _hash(self.files[number], self.known[number], go_on)
        if found is None:
            return False
        self.known[number] = found
        with suppress(OSError):  # no room: it is hashed again next time
            write_atomically(self.record, json.dumps([each and asdict(each) for each in self.known], indent=1).encode())
        return True


def compared(files: Sequence[TokenFile], run_dir: Path, report: Callable[[str], None]) -> Content:
    """Hash what has changed since the run hashed it: UserError if it is another content. `report` says
    what is hashed now, and what is not known yet."""
    large, record, problems = [file for file in files if file.tokens.nbytes > HASH_WHOLE], run_dir / RECORD, []
    known = _known(record, report)[: len(large)] if large else []
    content = Content(large, known + [None] * (len(large) - len(known)), record)
    for number, (file, was) in enumerate(zip(large, content.known, strict=True)):
        name = f"{file.prefix.name}.bin"
        if was is None:
            report(f"{name} was not hashed whole before: samples of it are compared now, the rest while training runs")
        elif _doubtful(file, was):
            report(f"{name} has another time or size than it had: hashing its {file.tokens.nbytes / 1e9:.1f} GB first")
            if not content.hash(number, lambda: True):
                opened = _opened(file)
                problems += (opened.refusal or _refusal(opened, "changes while it is read")).problems
    if problems:
        raise UserError(problems)
    return content


def _known(record: Path, report: Callable[[str], None]) -> list[Hashed | None]:
    """What the run's folder says; nothing, with a word of it, where that is damaged."""
    if not record.exists():
        return []
    try:
        with refusing(record):
            if not isinstance(found := read_json(record), list):
                raise ValueError("is not a list")
        return [None if each is None else as_record(Hashed, each, record) for each in found]
    except UserError as error:
        report(f"{record} {error.problems[0].rule}: the token files are hashed anew")
        return []


def _doubtful(file: TokenFile, was: Hashed) -> bool:
    recorded = file.facts().xxh3_128
    return (was.size, was.mtime_ns) != _state(_opened(file)) or recorded not in (None, was.xxh3_128)


def _hash(file: TokenFile, was: Hashed | None, go_on: Callable[[], bool]) -> Hashed | None:
    """The file as it is now; None if there is no time, or if it is not what it was: its next reader is refused."""
    opened, state = _opened(file), xxhash.xxh3_128()
    size, mtime = _state(opened)
    block = np.empty(BLOCK, np.uint8)
    for start in range(0, opened.size, BLOCK):
        piece = block[: min(BLOCK, opened.size - start)]
        try:
            opened.read(start, piece)
        except UserError as error:
            opened.refusal = error
        if opened.refusal or not go_on():
            return None
        state.update(piece.data)
    if _state(opened) != (size, mtime):
        return None  # it is being written: the next start looks again
    content = state.hexdigest()
    hashes = {"was prepared": file.facts().xxh3_128, "this run has read before": was and was.xxh3_128}
    for what, expected in hashes.items():
        if expected not in (None, content):
            rule = f"its content is not what {what} (xxh3_128 {content}, then {expected})"
            opened.refusal = _refusal(opened, rule)
            return None
    return Hashed(size, mtime, content)


def _refusal(opened: OpenedFile, rule: str) -> UserError:
    return UserError(Problem("data.path", str(opened.path), rule, AGAIN, here=True))


def _opened(file: TokenFile) -> OpenedFile:
    assert isinstance(file.tokens, DiskArray)
    return file.tokens.file


def _state(opened: OpenedFile) -> tuple[int, int]:
    state = os.fstat(opened.descriptor)
    return state.st_size, state.st_mtime_ns
