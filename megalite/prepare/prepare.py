"""Makes the token files of a run from its text: once, by one process, and continued after a kill.

Each part of the data becomes a token file in the cache, named by a fingerprint of its files and of the tokenizer.
Under a file lock, the part's shards are tokenized into a work folder, one token file each, then joined. Whoever comes
second finds the work done. Whoever comes after a kill does only the shards that are missing.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from glob import escape
from itertools import count
from pathlib import Path
from threading import Event, Thread

import xxhash

from megalite.config.derive import BUILT_IN_TOKENIZERS
from megalite.config.durable_files import open_to_append, private_files
from megalite.config.schema import Config
from megalite.config.user_files import read_bytes
from megalite.data.open import FORMAT, Progress, TokenFiles, check_vocabulary, digest, paths_of
from megalite.data.token_file import TokenFile, dtype_for, read_facts, with_suffix
from megalite.data.tokenizer_folder import load_tokenizer
from megalite.data.tokenizers import TextTokenizer, bpe_tokenizer, byte_tokenizer, char_tokenizer
from megalite.errors.problems import Problem, UnavailableError, UserError, collect, collect_all
from megalite.errors.remedies import OF_THE_MACHINE, of_system
from megalite.launch.host import allow_open_files, usable_cores
from megalite.prepare.hub import TOKENIZER_FILES, tokenizer_folder
from megalite.prepare.reading import Shard, pieces
from megalite.prepare.sources import Source, not_read, sources_of
from megalite.prepare.token_writer import join, of_others
from megalite.prepare.tokenizing import Job, tokenize_shards

SAMPLE = 8 << 20  # characters of text that a BPE is trained on
SAMPLED_SHARDS = 64
PAGES = 20_000  # characters of text on which a tokenizer is tried
SUMMED = ("tokens", "documents", "skipped_documents", "bytes")  # of all shards, in PREFIX.json


@dataclass(frozen=True)
class Target:
    """One part of the data and the token file that it becomes. `key` is the fingerprint of both."""

    source: Source
    prefix: Path
    key: str

    @property
    def work(self) -> Path:
        """The folder of its finished shards and their tokenizer, until all are finished."""
        return with_suffix(self.prefix, f".partial-{self.key}")

    @property
    def is_prepared(self) -> bool:
        """Whether the token file is complete: its index comes last."""
        return with_suffix(self.prefix, ".idx").exists()

    def refuse_another(self, tokenizer: TextTokenizer) -> None:
        """FileExistsError where the folder beside the token file, which a user has named, holds another tokenizer."""
        there = [path for path in tokenizer.unwritten(with_suffix(self.prefix, ".tokenizer")) if os.path.lexists(path)]
        if there and self.key not in self.prefix.name:
            raise FileExistsError(errno.EEXIST, f"{there[0]} is of another tokenizer")


def prepare(config: Config, progress: Progress | None = None) -> TokenFiles:
    """Make every token file that `config` needs and that is not there yet."""
    if config.data.source == "tokens":
        prefixes = [Path(path).expanduser().absolute() for path in paths_of(config.data)]
        built_in = config.tokenizer in BUILT_IN_TOKENIZERS
        return TokenFiles(prefixes, tokenizer=None if built_in else named_tokenizer(config.tokenizer))
    sources = sources_of(config.data)
    targets = targets_of(config, sources)
    _make(config, targets, progress, "data.cache_dir")
    return TokenFiles([target.prefix for target in targets], not_read(sources))


def prepare_file(source: Source, config: Config, prefix: Path, progress: Progress | None = None) -> None:
    """Make the token file `prefix` of one source, wherever the user wants it. One that is there must be the same."""
    [cached] = targets_of(config, [source])
    _refuse_others(source, prefix.absolute())
    _make(config, [Target(source, prefix.absolute(), cached.key)], progress, "--output")
    if read_facts(prefix).fingerprint != cached.key:
        rule = "there is a token file already, of other text or another tokenizer"
        raise UserError(Problem("--output", str(prefix), rule, "choose another name, or delete it"))


def examine(config: Config) -> None:
    """Refuse text or a tokenizer that is not there or not readable; quick, and nothing is written."""
    if config.data.source != "tokens":
        _plans(config, sources_of(config.data))


def targets_of(config: Config, sources: list[Source]) -> list[Target]:
    """The token files that are made of the sources. Looks at names, sizes and times of text alone."""
    try:
        identities = collect_all(Source.identity, sources)
        tokenizer = _tokenizer_key(config, identities)
    except UserError:
        _plans(config, sources)  # names all that is wrong
        raise
    folder, keys = Path(config.data.cache_dir, "tokens"), [digest(FORMAT, each, tokenizer) for each in identities]
    return [Target(it, folder / f"{it.label}-{key}", key) for it, key in zip(sources, keys, strict=True)]


def named_tokenizer(name: str) -> TextTokenizer:
    """The tokenizer in a folder, or of that name on the hub."""
    return load_tokenizer(tokenizer_folder(name))


def _tokenizer_key(config: Config, identities: list[str]) -> str:
    """Changes with the tokenizer that the config names; bpe and char depend on the data, whose identities are given."""
    name = config.tokenizer
    if name == "byte":
        return name
    if name in BUILT_IN_TOKENIZERS:
        return digest(FORMAT, name, identities, config.data.bpe_vocab_size if name == "bpe" else None)
    folder = tokenizer_folder(name)
    paths = {path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if not path.is_dir()}
    contents = [(path.name, read_bytes(path, "copy the tokenizer again")) for path in sorted(paths)]
    return digest([(name, xxhash.xxh3_128_hexdigest(content)) for name, content in contents])


def _plans(config: Config, sources: list[Source]) -> list[list[Shard]]:
    """The shards of every source; UserError with all that is wrong with text and tokenizer. Writes nothing."""
    problems: list[Problem] = []
    plans = collect(lambda: collect_all(Source.plan, sources), problems)
    if config.tokenizer not in BUILT_IN_TOKENIZERS:
        collect(lambda: named_tokenizer(config.tokenizer), problems)
    if problems or plans is None:
        raise UserError(problems)
    return plans


def _refuse_others(source: Source, prefix: Path) -> None:
    """UserError where files of others, or of the text itself, lie in the place of the token file, or will."""
    for path in source.paths:
        if os.path.isdir(path) and prefix.resolve().is_relative_to(Path(path).resolve()):
            rule = f"it is inside data.path={path}, a folder that is read whole: the text would not be the same again"
            raise UserError(Problem("--output", str(prefix), rule, "a name in another folder"))
    places = {ending: with_suffix(prefix, ending) for ending in (".bin", ".idx", ".json", ".tokenizer")}
    found, taken = of_others(prefix), [path for path in places.values() if path.is_file()]
    if (folder := places[".tokenizer"]).is_symlink() or (not folder.is_dir() and folder.exists()):
        found[folder] = "is no folder"
    for file in source.files if taken and source.kind == "text" else ():
        found |= {path: "is read as text by this command" for path in taken if path.samefile(file)}
    if found:
        names = (prefix.with_name(f"{prefix.name}-{number}") for number in count(2))
        free = next(name for name in names if not any(os.path.lexists(with_suffix(name, each)) for each in places))
        remedy = f"--output={free}, or move it away"
        raise UserError([Problem("--output", str(prefix), f"{path} {rule}", remedy) for path, rule in found.items()])


def _make(config: Config, targets: list[Target], progress: Progress | None, setting: str) -> None:
    """Make the targets that are missing; `setting` says where they are to lie."""
    if all(target.is_prepared for target in targets):
        return
    plans = _plans(config, [target.source for target in targets])
    # The text can be read from what is made.
    with private_files(), _locked([target.prefix for target in targets], setting):
        jobs: dict[Target, list[Job]] = {}  # the shards of a missing target, and the token file that each becomes
        for target, plan in zip(targets, plans, strict=True):
            if not target.is_prepared:
                jobs[target] = [(target.work / f"part-{number:05d}", shard) for number, shard in enumerate(plan)]
        tally = _Tally([job for each in jobs.values() for job in each], progress)
        with tally.repeated():
            tokenizer = obtain_tokenizer(config, [*jobs], [shard for plan in plans for shard in plan])
        check_vocabulary(config, tokenizer.vocab_size)
        built_in = config.tokenizer in BUILT_IN_TOKENIZERS
        remarks = [] if built_in else tokenizer.remarks("".join(sample(plans[0][:1], PAGES)))
        for target in jobs:
            target.refuse_another(tokenizer)
            tokenizer.save(target.work / "tokenizer")
            try:
                left = [job for job in jobs[target] if not is_whole(job[0])]
                workers = config.data.workers or usable_cores()
                tokenize_shards(left, tokenizer, target.work / "tokenizer", workers, tally)
                if not any(tally.done[file][-1] for file, _ in jobs[target]):
                    rule, found = "holds no text at all (only empty documents)", " ".join(target.source.paths)
                    raise UserError(Problem("data.path", found, rule, "give text; check data.text_column"))
            except UnavailableError:
                raise
            except UserError:  # the text must be changed, and changed text has another key (a hub data set has not)
                if config.data.source != "hf":
                    shutil.rmtree(target.work, ignore_errors=True)
                raise
            _join(target, [file for file, _ in jobs[target]], tokenizer, remarks)


def is_whole(shard: Path) -> bool:
    """Whether the token file of a shard is complete: a damaged part of it that somebody deletes is made again."""
    return all(with_suffix(shard, suffix).exists() for suffix in (".idx", ".bin", ".json"))


class _Tally:
    """The bytes of text, documents and tokens that are done, by token file of a shard; told to `progress`."""

    def __init__(self, jobs: list[Job], progress: Progress | None) -> None:
        self.total, self.progress = sum(shard.size for _, shard in jobs), progress
        self.done: dict[Path, tuple[int, int, int]] = {Path(): (0, 0, 0)}
        for file, shard in jobs:
            if is_whole(file):
                facts = read_facts(file)
                self.done[file] = shard.size, facts.documents, facts.tokens
        self.tell()

    def __call__(self, file: Path, size: int, documents: int, tokens: int) -> None:
        self.done[file] = size, documents, tokens
        self.tell()

    def tell(self) -> None:
        size, documents, tokens = map(sum, zip(*self.done.values(), strict=True))
        if self.progress:
            self.progress(min(size, self.total) if self.total else size, self.total, documents, tokens)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Meanwhile, the same is told every second: a BPE may be trained for a minute, and nobody waits in silence."""
        over = Event()

        def repeat() -> None:
            while not over.wait(1.0):
                self.tell()

        thread = Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@contextmanager
def _locked(prefixes: list[Path], setting: str) -> Iterator[None]:
    """Alone write to these, in one folder that `setting` names. The kernel releases a lock when its holder dies. Its
    file stays: if it were deleted, two processes could hold locks on two files of one name."""
    folder = prefixes[0].parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        allow_open_files()
        with ExitStack() as files:
            for prefix in sorted(set(prefixes)):  # in one order: no two processes wait for each other
                file = files.enter_context(open_to_append(with_suffix(prefix, ".lock")))
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        otherwise = "move that file away" if error.errno == errno.EEXIST else "start again"
        rule, remedy = f"cannot be written ({error.strerror or error})", of_system(error, otherwise)
        elsewhere = "" if error.errno in OF_THE_MACHINE else f", or choose a writable folder ({setting}=PATH)"
        remedy += f"{elsewhere}; what is already prepared is kept"
        raise UserError(Problem(setting, str(folder), rule, remedy)) from error


def obtain_tokenizer(config: Config, missing: list[Target], shards: list[Shard]) -> TextTokenizer:
    """The tokenizer that the config names; bpe and char are trained on the shards, unless a killed process has."""
    if config.tokenizer not in BUILT_IN_TOKENIZERS:
        return named_tokenizer(config.tokenizer)
    for target in missing:
        if (target.work / "tokenizer" / "tokenizer_config.json").exists():  # written last
            return load_tokenizer(target.work / "tokenizer")
    if config.tokenizer == "byte":
        return byte_tokenizer()
    if config.tokenizer == "char":
        return char_tokenizer(piece for shard in shards for piece in pieces(shard) if piece)
    return bpe_tokenizer(sample(shards), config.data.bpe_vocab_size)


def sample(shards: list[Shard], size: int = SAMPLE) -> Iterator[str]:
    """About `size` characters of text from all over the data, the same on every call."""
    chosen = shards[:: -(-len(shards) // SAMPLED_SHARDS)]
    for number, shard in enumerate(chosen):
        share = size // (len(chosen) - number)
        for piece in pieces(shard):
            text = (piece or "")[:share]
            yield text
            size -= len(text)
            share -= len(text)
            if share <= 0:
                break


def _join(target: Target, shard_files: list[Path], tokenizer: TextTokenizer, remarks: list[str]) -> None:
    """All shards into one token file, its tokenizer beside it; then the work folder goes."""
    shards = [read_facts(file) for file in shard_files]
    facts = {
        "source": target.source.label,
        "fingerprint": target.key,
        **{name: sum(getattr(shard, name) for shard in shards) for name in SUMMED},
        "tokenizer": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "dtype": str(dtype_for(tokenizer.vocab_size)),
        **({"remarks": remarks} if remarks else {}),
    }
    prefix, name = target.prefix, escape(target.prefix.name)
    for drafts in (f".{name}.bin", f".{name}.idx", f".{name}.json", f"{name}.tokenizer/.*"):
        for litter in prefix.parent.glob(f"{drafts}.tmp-*"):
            litter.unlink()  # of a process that was killed while joining: we hold its lock
    target.refuse_another(tokenizer)
    tokenizer.save(with_suffix(prefix, ".tokenizer"))
    with_text = (file for file, shard in zip(shard_files, shards, strict=True) if shard.tokens)
    join(map(TokenFile.open, with_text), prefix, facts)
    shutil.rmtree(target.work, ignore_errors=True)
