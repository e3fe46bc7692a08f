"""Makes one token file of each part of the data, and keeps count over all of them.

Under a file lock, the part's shards are tokenized into a work folder, one token file each, then joined. Whoever comes
second finds the work done. Whoever comes after a kill does only the shards that are missing.
"""

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megalite.data.open import Progress
from megalite.data.token_file import TokenFile, read_facts, with_suffix
from megalite.data.tokenizers import TextTokenizer
from megalite.errors.problems import Problem, UserError
from megalite.launch.open_files import allow_more_open_files
from megalite.prepare import pool, token_writer
from megalite.prepare.cache import locked, make_folder
from megalite.prepare.reading import Shard
from megalite.prepare.sources import Source


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


def _opened(shard_file: Path) -> TokenFile | None:
    """The token file of a shard, or None for one of empty documents alone."""
    return TokenFile.open(shard_file) if with_suffix(shard_file, ".bin").stat().st_size else None


class Making:
    """Turns planned shards into token files and reports how far all targets are, from what is there already."""

    def __init__(
        self, targets: list[Target], plans: list[list[Shard]], workers: int, progress: Progress | None
    ) -> None:
        self._workers, self._progress = workers, progress
        self._total = sum(shard.size for plan in plans for shard in plan)
        self._done: dict[Path, tuple[int, int, int]] = {}  # of a shard, or a whole target: bytes, documents, tokens
        for target, plan in zip(targets, plans, strict=True):
            self._count_what_is_there(target, plan)
        self._report()

    def make(self, target: Target, plan: list[Shard], tokenizer: TextTokenizer) -> None:
        """Write the token file of one target, unless it is there."""
        with locked(with_suffix(target.prefix, ".lock")):
            self._count_what_is_there(target, plan)
            if is_prepared(target.prefix):
                self._report()
            else:
                self._tokenize_and_join(target, plan, tokenizer)

    def _report(self) -> None:
        if self._progress:
            size, documents, tokens = [sum(column) for column in zip(*self._done.values(), strict=True)] or [0, 0, 0]
            self._progress(min(size, self._total) if self._total else size, self._total, documents, tokens)

    def _count_what_is_there(self, target: Target, plan: list[Shard]) -> None:
        """An earlier or another process may have made the whole target, or some of its shards."""
        sizes = {file: shard.size for file, shard in zip(target.shard_files(plan), plan, strict=True)}
        for file in sizes:
            self._done.pop(file, None)
        if is_prepared(target.prefix):
            sizes = {target.prefix: sum(sizes.values())}
        for prefix, size in sizes.items():
            if is_prepared(prefix):
                with suppress(UserError, FileNotFoundError):  # another process joins and deletes them just now
                    found = _opened(prefix)
                    self._done[prefix] = (size, found.documents, len(found.tokens)) if found else (size, 0, 0)

    def _tokenize_and_join(self, target: Target, plan: list[Shard], tokenizer: TextTokenizer) -> None:
        make_folder(target.work)
        tokenizer.save(target.work / "tokenizer")
        files = target.shard_files(plan)
        shards = enumerate(zip(plan, files, strict=True))
        jobs = [(number, shard, file) for number, (shard, file) in shards if not is_prepared(file)]

        def count(number: int, size: int, documents: int, tokens: int) -> None:
            size = min(size, plan[number].size) if plan[number].size else size
            self._done[files[number]] = (size, documents, tokens)
            self._report()

        try:
            pool.tokenize_shards(jobs, tokenizer, target.work / "tokenizer", self._workers, count)
            with pool.refusing_full_disk(target.prefix.parent):
                _join(target, files, tokenizer)
        except UserError as error:
            # Text that is refused must be changed, and changed text has another key: nobody would continue this work.
            if target.source.kind == "text" and all(problem.setting != "data.cache_dir" for problem in error.problems):
                shutil.rmtree(target.work, ignore_errors=True)
            raise


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
        "tokenizer": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "dtype": str(files[0].tokens.dtype),
    }
    prefix = target.prefix
    for litter in prefix.parent.glob(f".{prefix.name}.*.tmp-*"):
        litter.unlink()  # of a process that was killed while joining: we hold its lock
    tokenizer.save(with_suffix(prefix, ".tokenizer"))
    token_writer.join(files, prefix, facts)
    for leftover in prefix.parent.glob(f"{prefix.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
