"""Checks that large token files are what they were, by hashing all of their content.

A run's fingerprint covers every byte of a small file and 64 blocks of a large one. A thread of rank 0 hashes large ones
whole while training runs. A file that the run has hashed before is hashed again, before the first step, where its size
or time has changed. The hash must be the one in PREFIX.json (files of ours) and the one that the run took before.
Another content is refused.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from megalite.config.durable_files import write_atomically
from megalite.config.user_files import as_record, read_json
from megalite.data.disk_array import AGAIN, DiskArray, OpenedFile
from megalite.data.token_file import HASH_WHOLE, TokenFile
from megalite.errors.problems import Problem, UserError

RECORD = "token_files.json"  # in a run's folder
BLOCK, PAUSE = 1 << 19, 0.001  # tokens at once, and seconds in between: training comes first


@dataclass(frozen=True)
class Hashed:
    """One large token file, when its content was hashed."""

    size: int
    mtime_ns: int
    xxh3_128: str


def compare_changed(files: Sequence[TokenFile], run_dir: Path, report: Callable[[str], None]) -> None:
    """Hash the files that have another time or size than when the run hashed them; UserError for another content."""
    large, known = _large_and_known(files, run_dir)
    for number, (file, was) in enumerate(zip(large, known, strict=True)):
        if was is not None and opened_file(file).state() != (was.size, was.mtime_ns):
            name = f"{file.prefix.name}.bin"
            report(f"{name} has another time or size than it had: hashing its {file.tokens.nbytes / 1e9:.1f} GB first")
            known[number] = _hash(file, was, threading.Event())
            if (refusal := opened_file(file).refusal) is not None:
                raise refusal
            _write(known, run_dir)


@contextmanager
def watched(files: Sequence[TokenFile], run_dir: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Meanwhile, hash the files that the run has not hashed before. `report` says which."""
    large, known = _large_and_known(files, run_dir)
    unknown = [number for number, was in enumerate(known) if was is None]
    if unknown:
        names = ", ".join(f"{large[number].prefix.name}.bin" for number in unknown)
        report(f"{names}: samples of the content are compared now, all of it while training runs")
    stop = threading.Event()

    def work() -> None:
        for number in unknown:
            if found := _hash(large[number], None, stop):
                known[number] = found
                _write(known, run_dir)

    threading.Thread(target=work, name="content", daemon=True).start()  # not waited for: a disk may hang
    try:
        yield
    finally:
        stop.set()


def _large_and_known(files: Sequence[TokenFile], run_dir: Path) -> tuple[list[TokenFile], list[Hashed | None]]:
    """The large files, and what each was when the run hashed it (None: it has not)."""
    large = [file for file in files if file.tokens.nbytes > HASH_WHOLE]
    known: list[Hashed | None] = []
    with suppress(UserError, TypeError):  # there is none, or it is damaged: everything is hashed anew
        known = [each and as_record(Hashed, each, run_dir / RECORD) for each in read_json(run_dir / RECORD)]
    return large, (known + [None] * len(large))[: len(large)]


def _write(known: Sequence[Hashed | None], run_dir: Path) -> None:
    with suppress(OSError):  # no room: it is hashed again next time
        content = json.dumps([each and asdict(each) for each in known], indent=1)
        write_atomically(run_dir / RECORD, content.encode())


def _hash(file: TokenFile, was: Hashed | None, stop: threading.Event) -> Hashed | None:
    """The file as it is; None if stopped, or if its content is another one: then its next reader is refused."""
    opened, state = opened_file(file), xxhash.xxh3_128()
    size_and_time = opened.state()
    try:
        for start in range(0, len(file.tokens), BLOCK):
            if stop.wait(PAUSE):
                return None
            state.update(file.tokens[start : start + BLOCK].data)
        if opened.state() != size_and_time:
            return None  # it is being written: the next start looks again
        found = Hashed(*size_and_time, state.hexdigest())
        if {file.facts().xxh3_128, was and was.xxh3_128} - {None, found.xxh3_128}:
            rule = "its content is not what was prepared, or what this run has read before"
            raise UserError(Problem("data.path", str(opened.path), rule, AGAIN, here=True))
    except UserError as error:
        opened.refusal = error
        return None
    return found


def opened_file(file: TokenFile) -> OpenedFile:
    assert isinstance(file.tokens, DiskArray)
    return file.tokens.file
