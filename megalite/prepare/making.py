"""Makes the token file of one part of the data.

Under a file lock, the part's shards are tokenized into a work folder, one token file each, then joined. Whoever comes
second finds the work done. Whoever comes after a kill does only the shards that are missing.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megalite.data.token_file import TokenFile, read_facts, with_suffix
from megalite.data.tokenizers import TextTokenizer
from megalite.errors.problems import Problem, UserError
from megalite.launch.host import allow_more_open_files
from megalite.prepare import pool
from megalite.prepare.reading import Shard
from megalite.prepare.sources import Source
from megalite.prepare.token_writer import join

Counts = tuple[int, ...]  # bytes of text, documents and tokens


@dataclass(frozen=True)
class Target:
    """One part of the data and the token file that it becomes. `key` is the fingerprint of both."""

    source: Source
    prefix: Path
    key: str

    @property
    def work(self) -> Path:
        """The folder of its finished shards, until all are."""
        return with_suffix(self.prefix, f".partial-{self.key}")

    def shard_files(self, plan: list[Shard]) -> list[Path]:
        """The token files of the planned shards."""
        return [self.work / f"shard-{number:05d}" for number in range(len(plan))]


def is_prepared(prefix: Path) -> bool:
    """Whether the token file (of a target, or of a shard) is complete: its index comes last."""
    return with_suffix(prefix, ".idx").exists()


def make_folder(folder: Path, setting: str) -> Path:
    """Create `folder`; UserError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        rule = f"cannot be written ({error.strerror or error})"
        raise UserError(Problem(setting, str(folder), rule, f"choose a writable folder ({setting}=PATH)")) from error
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`. The kernel releases it when its holder dies. The file stays: if it were deleted, two
    processes could hold locks on two files of one name."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def counts_of(target: Target, plan: list[Shard]) -> dict[Path, Counts]:
    """What is there of a target: the whole, or some of its shards."""
    sizes = dict(zip(target.shard_files(plan), (shard.size for shard in plan), strict=True))
    if is_prepared(target.prefix):
        sizes = {target.prefix: sum(sizes.values())}
    counts: dict[Path, Counts] = {}
    for prefix, size in sizes.items():
        if is_prepared(prefix):
            with suppress(UserError, FileNotFoundError):  # another process joins and deletes them just now
                found = _opened(prefix)
                counts[prefix] = (size, found.documents, len(found.tokens)) if found else (size, 0, 0)
    return counts


def make(
    target: Target,
    plan: list[Shard],
    tokenizer: TextTokenizer,
    workers: int,
    done: dict[Path, Counts],
    report: Callable[[], None],
) -> None:
    """Write the token file of one target, unless it is there. Keeps `done` up to date, and calls `report` then."""
    with locked(with_suffix(target.prefix, ".lock")):
        for file in target.shard_files(plan):
            done.pop(file, None)
        done.update(counts_of(target, plan))
        report()
        if is_prepared(target.prefix):
            return

        def count(file: Path, *so_far: int) -> None:
            done[file] = so_far
            report()

        try:
            with _refusing_full_disk(target.prefix.parent):
                tokenizer.save(target.work / "tokenizer")
                files = target.shard_files(plan)
                jobs = [job for job in zip(plan, files, strict=True) if not is_prepared(job[1])]
                pool.tokenize_shards(jobs, tokenizer, target.work / "tokenizer", workers, count)
                _join(target, files, tokenizer)
        except UserError as error:
            # Text that is refused must be changed, and changed text has another key: nobody would continue this work.
            if target.source.kind == "text" and all(problem.setting != "data.cache_dir" for problem in error.problems):
                shutil.rmtree(target.work, ignore_errors=True)
            raise


@contextmanager
def _refusing_full_disk(folder: Path) -> Iterator[None]:
    """A full disk is for the user to mend; anything else stays what it is."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        remedy = "free some space or set data.cache_dir (--output) to another disk; what is already prepared is kept"
        problem = Problem("data.cache_dir", str(folder), "no space left for the prepared tokens", remedy)
        raise UserError(problem) from error


def _opened(shard_file: Path) -> TokenFile | None:
    """The token file of a shard; None for one of empty documents alone."""
    return TokenFile.open(shard_file) if with_suffix(shard_file, ".bin").stat().st_size else None


def _join(target: Target, shard_files: list[Path], tokenizer: TextTokenizer) -> None:
    """All shards into one token file, its tokenizer beside it; then the work folder goes."""
    allow_more_open_files(2 * len(shard_files))
    files = [file for path in shard_files if (file := _opened(path))]
    if not files:
        rule, found = "holds no text at all (only empty documents)", " ".join(target.source.paths)
        raise UserError(Problem("data.path", found, rule, "give text; check data.text_column"))
    shards = [read_facts(path) for path in shard_files]
    facts = {
        "source": target.source.label,
        "fingerprint": target.key,
        "tokens": sum(len(file.tokens) for file in files),
        "documents": sum(file.documents for file in files),
        "skipped_documents": sum(shard.skipped_documents for shard in shards),
        "bytes": sum(shard.bytes for shard in shards),
        "tokenizer": tokenizer.recorded_identity,
        "vocab_size": tokenizer.vocab_size,
        "dtype": str(files[0].tokens.dtype),
    }
    prefix = target.prefix
    for litter in prefix.parent.glob(f".{prefix.name}.*.tmp-*"):
        litter.unlink()  # of a process that was killed while joining: we hold its lock
    tokenizer.save(with_suffix(prefix, ".tokenizer"))
    join(files, prefix, facts)
    for leftover in prefix.parent.glob(f"{prefix.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
