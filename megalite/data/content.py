"""Checks that large token files are what they were, by hashing all of their content.

A run's fingerprint covers every byte of a small file and 64 blocks of a large one. Rank 0 hashes large ones whole: in
a thread while training runs if the run never did, before its first step if size or time is another one since, and not
again if both are the same. It compares with the hash in PREFIX.json (files of ours) and with the one that the run took
before. Another content is refused; by the thread, at the next read.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from megalite.config.durable_files import write_atomically
from megalite.config.user_files import as_record, read_json, refusing
from megalite.data.disk_array import AGAIN, DiskArray, OpenedFile
from megalite.data.token_file import HASH_WHOLE, TokenFile
from megalite.errors.problems import Problem, UserError

RECORD = "token_files.json"  # in a run's folder
BLOCK, PAUSE = 1 << 19, 0.001  # tokens at once, and seconds in between: training comes first
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
        stop = threading.Event()

        def work() -> None:
            for number, was in enumerate(self.known):
                if was is None and not self.hash(number, lambda: not stop.wait(PAUSE)):
                    return

        thread = threading.Thread(target=work, name="content", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(PATIENCE)

    def hash(self, number: int, go_on: Callable[[], bool]) -> bool:
        """Hash file `number` as long as it may `go_on`, and remember it. False if it could not, or if its content is
        another one: then its next reader is refused."""
        file, was = self.files[number], self.known[number]
        opened, state = opened_file(file), xxhash.xxh3_128()
        before = opened.state()
        try:
            for start in range(0, len(file.tokens), BLOCK):
                state.update(file.tokens[start : start + BLOCK].data)
                if not go_on():
                    return False
        except UserError as error:
            opened.refusal = error
            return False
        found = Hashed(*before, state.hexdigest())
        if opened.state() != before:
            return False  # it is being written: the next start looks again
        hashes = {"was prepared": file.facts().xxh3_128, "this run has read before": was and was.xxh3_128}
        for what, expected in hashes.items():
            if expected not in (None, found.xxh3_128):
                opened.refusal = _refusal(opened, f"its content is not what {what} ({found.xxh3_128}, then {expected})")
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
        elif (was.size, was.mtime_ns) != opened_file(file).state() or file.facts().xxh3_128 not in (None, was.xxh3_128):
            report(f"{name} has another time or size than it had: hashing its {file.tokens.nbytes / 1e9:.1f} GB first")
            if not content.hash(number, lambda: True):
                opened = opened_file(file)
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


def _refusal(opened: OpenedFile, rule: str) -> UserError:
    return UserError(Problem("data.path", str(opened.path), rule, AGAIN, here=True))


def opened_file(file: TokenFile) -> OpenedFile:
    assert isinstance(file.tokens, DiskArray)
    return file.tokens.file
