"""All slow work between text and token files: done once, by one process, and continued after a kill.

Each part of the data becomes a token file in the cache whose name is a fingerprint of its files and its tokenizer.
Under a file lock, the part's shards are tokenized into a work folder, one token file each, then joined; whoever comes
second finds the work done, whoever comes after a kill does only the shards that are missing.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.config.derive import BUILT_IN_TOKENIZERS
from megalite.config.problems import Problem, UserError, collect
from megalite.config.schema import Config
from megalite.data.cache import cache_folder, digest, locked, make_folder
from megalite.data.reading import Shard, documents
from megalite.data.sources import Source, collected, sources_of
from megalite.data.token_file import TokenFile, read_sidecar, with_suffix
from megalite.parallel.cores import usable_cores

FORMAT = 1  # part of every fingerprint: a change of what preparation produces renews all caches
SAMPLE = 8 << 20  # bytes of text that a BPE is trained on
SAMPLED_SHARDS = 64
# Bytes done, bytes in all (0: of a stream nobody knows), documents, tokens. The first call says what is there already.
Progress = Callable[[int, int, int, int], None]


@dataclass(frozen=True)
class TokenizerChoice:
    """Which tokenizer, before it exists. `identity` names it in fingerprints; trained ones live in `folder`."""

    name: str
    identity: str
    folder: Path | None
    vocab_size: int  # for bpe


@dataclass(frozen=True)
class Target:
    """One part of the data and the token file that it becomes."""

    source: Source
    prefix: Path
    key: str

    @property
    def work(self) -> Path:
        """The folder of its finished shards, until all are."""
        return with_suffix(self.prefix, f".partial-{self.key}")

    def pieces(self, plan: list[Shard]) -> list[Path]:
        """The token files of the planned shards."""
        return [self.work / f"shard-{number:05d}" for number in range(len(plan))]


def targets_of(config: Config) -> tuple[TokenizerChoice, list[Target]]:
    """What `prepare` makes and `open_data` opens. Looks at names, sizes and times of the input alone."""
    sources = sources_of(config.data)
    identities = identities_of(sources, config.tokenizer)
    choice = choose_tokenizer(config, identities)
    folder = cache_folder(config.data) / "tokens"
    targets = []
    for source, identity in zip(sources, identities, strict=True):
        key = digest(FORMAT, identity, choice.identity)
        targets.append(Target(source, folder / f"{source.label}-{key}", key))
    return choice, targets


def identities_of(sources: list[Source], tokenizer: str) -> list[str]:
    """What each source is. Where one is not there, a tokenizer that is not there either is told with it."""
    problems: list[Problem] = []
    identities = collect(lambda: collected(lambda source: [source.identity()], sources), problems)
    if identities is None:
        collect(lambda: check_tokenizer(tokenizer), problems)
        raise UserError(problems)
    return identities


def choose_tokenizer(config: Config, identities: list[str]) -> TokenizerChoice:
    """The tokenizer that the config names; bpe and char depend on the data, whose identities are given."""
    name, size = config.tokenizer, config.data.bpe_vocab_size
    if name == "byte":
        return TokenizerChoice(name, "byte", None, size)
    if name in ("bpe", "char"):
        key = digest(FORMAT, name, identities, size if name == "bpe" else None)
        return TokenizerChoice(name, key, cache_folder(config.data) / "tokenizers" / f"{name}-{key}", size)
    folder = Path(name).expanduser()
    if folder.is_dir():
        states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.glob("*token*"))]
        return TokenizerChoice(name, digest(str(folder.absolute()), states), None, size)
    return TokenizerChoice(name, digest("hub", name), None, size)


def prepare(config: Config, progress: Progress | None = None) -> None:
    """Make every token file that `config` needs and that is not there yet."""
    if config.data.source == "tokens":
        return
    choice, targets = targets_of(config)
    missing = [target for target in targets if not is_prepared(target.prefix)]
    if not missing:
        return
    plans = examine(choice, [target.source for target in targets])
    make_folder(cache_folder(config.data))
    tokenizing = Tokenizing(targets, plans, config.data.workers or usable_cores(), progress)
    tokenizer = obtain_tokenizer(choice, plans)
    check_vocabulary(config, tokenizer.vocab_size)
    for target, plan in zip(targets, plans, strict=True):
        tokenizing.make(target, plan, tokenizer)


def prepare_file(source: Source, config: Config, prefix: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Make the token file `prefix` of one source, wherever the user wants it; returns what PREFIX.json says. A file
    that is there already must be the same one."""
    [identity] = identities_of([source], config.tokenizer)
    choice = choose_tokenizer(config, [identity])
    target = Target(source, prefix.absolute(), digest(FORMAT, identity, choice.identity))
    if is_prepared(target.prefix):
        facts = TokenFile.open(target.prefix).sidecar()
        if facts.get("fingerprint") != target.key:
            rule = "there is a token file already, of other text or another tokenizer"
            raise UserError(Problem("--output", str(prefix), rule, "choose another name, or delete it"))
        return facts
    [plan] = examine(choice, [source])
    make_folder(target.prefix.parent, "--output")
    if choice.folder is not None:
        make_folder(cache_folder(config.data), "XDG_CACHE_HOME")
    tokenizing = Tokenizing([target], [plan], config.data.workers or usable_cores(), progress)
    tokenizing.make(target, plan, obtain_tokenizer(choice, [plan]))
    return TokenFile.open(target.prefix).sidecar()


def is_prepared(prefix: Path) -> bool:
    """Whether the token file (of a target, or of a shard) is complete: its index comes last."""
    return with_suffix(prefix, ".idx").exists()


def opened(piece: Path) -> TokenFile | None:
    """The token file of a shard, or None for one of empty documents alone."""
    return TokenFile.open(piece) if with_suffix(piece, ".bin").stat().st_size else None


def examine(choice: TokenizerChoice, sources: list[Source]) -> list[list[Shard]]:
    """The shards of every source, once text and tokenizer are known to be there: all problems, and nothing written."""
    problems: list[Problem] = []
    plans = collect(lambda: collected(lambda source: [source.plan()], sources), problems)
    collect(lambda: check_tokenizer(choice.name), problems)
    if problems or plans is None:
        raise UserError(problems)
    return plans


def check_tokenizer(name: str) -> None:
    """Refuse a tokenizer that is to be had neither here nor from the hub."""
    from megalite.data import tokenizers

    if name not in BUILT_IN_TOKENIZERS:
        tokenizers.named_tokenizer(name)


def check_vocabulary(config: Config, needed: int) -> None:
    """Refuse a model that lacks some of the tokenizer's tokens."""
    wanted = config.model.vocab_size
    if wanted is not None and wanted < needed:
        rule = f"the tokenizer has {needed:,} tokens"
        raise UserError(Problem("model.vocab_size", wanted, rule, f"at least {needed}, or leave it out"))


def obtain_tokenizer(choice: TokenizerChoice, plans: list[list[Shard]]) -> Any:
    """The chosen tokenizer, trained on the planned shards and cached if need be."""
    from megalite.data import tokenizers

    if choice.name == "byte":
        return tokenizers.byte_tokenizer()
    if choice.folder is None:
        return tokenizers.named_tokenizer(choice.name)
    make_folder(choice.folder.parent)
    with locked(choice.folder.with_name(choice.folder.name + ".lock")):
        if not (choice.folder / "tokenizer.json").exists():
            shards = [shard for plan in plans for shard in plan]
            if choice.name == "char":
                trained = tokenizers.char_tokenizer(text for shard in shards for text in documents(shard))
            else:
                trained = tokenizers.bpe_tokenizer(sample(shards), choice.vocab_size)
            draft = choice.folder.with_name(f".{choice.folder.name}.tmp-{os.getpid()}")
            trained.save(draft)
            draft.replace(choice.folder)
        return tokenizers.load_tokenizer(choice.folder)


def sample(shards: list[Shard], size: int = SAMPLE) -> Iterator[str]:
    """About `size` characters of text from all over the data, the same on every call."""
    step = -(-len(shards) // SAMPLED_SHARDS)
    chosen = shards[::step]
    for number, shard in enumerate(chosen):
        share = size // (len(chosen) - number)
        for text in documents(shard):
            yield text[:share]
            size -= len(text[:share])
            share -= len(text[:share])
            if share <= 0:
                break


class Tokenizing:
    """Turns planned shards into token files and keeps count over all of them, from what is there already."""

    def __init__(
        self, targets: list[Target], plans: list[list[Shard]], workers: int, progress: Progress | None
    ) -> None:
        self.workers, self.progress = workers, progress
        self.total = sum(shard.size for plan in plans for shard in plan)
        self._done: dict[Path, tuple[int, int, int]] = {}  # of a shard, or a whole target: bytes, documents, tokens
        for target, plan in zip(targets, plans, strict=True):
            self._count_what_is_there(target, plan)
        self.report()

    def report(self) -> None:
        """Tell the caller how far all targets are."""
        if self.progress:
            done, texts, tokens = [sum(column) for column in zip(*self._done.values(), strict=True)] or [0, 0, 0]
            self.progress(min(done, self.total) if self.total else done, self.total, texts, tokens)

    def make(self, target: Target, plan: list[Shard], tokenizer: Any) -> None:
        """Write the token file of one target, unless it is there."""
        make_folder(target.prefix.parent)
        with locked(with_suffix(target.prefix, ".lock")):
            self._count_what_is_there(target, plan)
            if is_prepared(target.prefix):
                self.report()
            else:
                self._make(target, plan, tokenizer)

    def _count_what_is_there(self, target: Target, plan: list[Shard]) -> None:
        """An earlier or another process may have made the whole target, or some of its shards."""
        sizes = {piece: shard.size for piece, shard in zip(target.pieces(plan), plan, strict=True)}
        for piece in sizes:
            self._done.pop(piece, None)
        if is_prepared(target.prefix):
            sizes = {target.prefix: sum(sizes.values())}
        for prefix, size in sizes.items():
            if is_prepared(prefix):
                with suppress(UserError, FileNotFoundError):  # another process joins and deletes them just now
                    file = opened(prefix)
                    self._done[prefix] = (size, file.documents, len(file.tokens)) if file else (size, 0, 0)

    def _make(self, target: Target, plan: list[Shard], tokenizer: Any) -> None:
        from megalite.data import pool

        make_folder(target.work)
        tokenizer.save(target.work / "tokenizer")
        pieces = target.pieces(plan)
        jobs = [
            (number, shard, piece)
            for number, (shard, piece) in enumerate(zip(plan, pieces, strict=True))
            if not is_prepared(piece)
        ]

        def count(number: int, size: int, texts: int, tokens: int) -> None:
            self._done[pieces[number]] = (min(size, plan[number].size) if plan[number].size else size, texts, tokens)
            self.report()

        try:
            pool.tokenize_shards(jobs, tokenizer, target.work / "tokenizer", self.workers, count)
            self._join(target, pieces, tokenizer)
        except UserError as error:
            # Text that is refused must be changed, and changed text has another key: nobody would continue this work.
            if target.source.kind == "text" and all(problem.setting != "data.cache_dir" for problem in error.problems):
                shutil.rmtree(target.work, ignore_errors=True)
            raise

    def _join(self, target: Target, pieces: list[Path], tokenizer: Any) -> None:
        """All shards into one token file, its tokenizer beside it; then the work folder goes."""
        from megalite.data import pool, token_writer

        files = [file for piece in pieces if (file := opened(piece))]
        if not files:
            rule, found = "holds no text at all (only empty documents)", " ".join(target.source.paths)
            raise UserError(Problem("data.path", found, rule, "give text; check data.text_column"))
        sidecars = [read_sidecar(piece) for piece in pieces]
        facts = {
            "source": target.source.label,
            "fingerprint": target.key,
            "tokens": sum(len(file.tokens) for file in files),
            "documents": sum(file.documents for file in files),
            "skipped_documents": sum(sidecar["skipped"] for sidecar in sidecars),
            "bytes": sum(sidecar["bytes"] for sidecar in sidecars),
            "tokenizer": tokenizer.identity,
            "vocab_size": tokenizer.vocab_size,
            "dtype": str(files[0].tokens.dtype),
        }
        prefix = target.prefix
        for litter in prefix.parent.glob(f".{prefix.name}.*.tmp-*"):
            litter.unlink()  # of a process that was killed while joining: we hold its lock
        try:
            tokenizer.save(with_suffix(prefix, ".tokenizer"))
            token_writer.join(files, prefix, facts)
        except OSError as error:
            raise pool.storage_error(error.errno, prefix.parent, error) from error
        for leftover in prefix.parent.glob(f"{prefix.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
