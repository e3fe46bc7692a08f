"""Makes the token files of a run from its text: once, by one process, and continued after a kill.

Each part of the data becomes a token file in the cache, named by a fingerprint of its files and of the tokenizer. Under
a file lock, the part's shards are tokenized into a work folder, one token file each, then joined there, and moved to
their place, the index last. A second process finds the work done. A kill costs the shards that were being written.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import xxhash
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from megalite.config.derive import BUILT_IN_TOKENIZERS
from megalite.config.files import open_to_append, private_files, read_bytes, sync_folder
from megalite.config.schema import Config, DataConfig
from megalite.data.open import FORMAT, TokenFiles, check_vocabulary, digest, paths_of, sets_of
from megalite.data.samples import IntArray
from megalite.data.token_file import TokenFile, read_facts, with_suffix
from megalite.data.tokenizers import END, TextTokenizer, byte_tokenizer, load_tokenizer
from megalite.errors.problems import REMEDIES, Problem, UnavailableError, UserError, collect, collect_all, refuse
from megalite.launch.environment import usable_cores
from megalite.prepare.hub import TOKENIZER_FILES, tokenizer_folder
from megalite.prepare.sources import Shard, Source, pieces, sources_of
from megalite.prepare.tokenizing import Job, Progress, dtype_for, tokenize_shards, write_index

SAMPLE = 8 << 20  # characters of text that a BPE is trained on
SAMPLED_SHARDS = 64
LONG = 8192  # characters: the trainer's time grows with the square of a word's length
ALIKE = re.compile(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+")  # a part of one word: letters, digits, blanks or signs alone
OUTPUTS = (".json", ".bin", ".tokenizer", ".idx")
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
        return os.path.exists(with_suffix(self.prefix, ".idx"))


def prepare(config: Config, progress: Progress | None = None) -> TokenFiles:
    """Make every token file that `config` needs and that is not there yet."""
    sets = sets_of(config)
    if config.data.source == "tokens":
        built_in = config.tokenizer in BUILT_IN_TOKENIZERS
        named = None if built_in else named_tokenizer(config.tokenizer)
        return TokenFiles(_prefixes(config.data), named, {name: _prefixes(data) for name, data in sets.items()})
    sources, of_sets = sources_of(config.data), _sources_of_sets(config)
    targets = targets_of(config, sources, of_sets)
    _make(config, targets, progress, "data.cache_dir", len(sources))
    found = iter([target.prefix for target in targets])
    prefixes = [*islice(found, len(sources))]
    return TokenFiles(prefixes, None, {name: [*islice(found, len(paths_of(data)))] for name, data in sets.items()})


def _prefixes(data: DataConfig) -> list[Path]:
    return [Path(path).expanduser().absolute() for path in paths_of(data)]


def _sources_of_sets(config: Config) -> list[Source]:
    """What data.validation names."""
    return [it for name, data in sets_of(config).items() for it in sources_of(data, f"data.validation.{name}")]


def prepare_file(source: Source, config: Config, prefix: Path, progress: Progress | None = None) -> None:
    """Make the token file `prefix` of one source, wherever the user wants it."""
    [target] = [replace(target, prefix=prefix.absolute()) for target in targets_of(config, [source])]
    _check_output(target)
    _make(config, [target], progress, "--output")
    _check_output(target)  # another command may have been faster


def examine(config: Config) -> None:
    """Refuse text or a tokenizer that is not there or not readable; quick, and nothing is written."""
    if config.data.source != "tokens":
        _plans(config, [*sources_of(config.data), *_sources_of_sets(config)])


def targets_of(config: Config, trained: list[Source], others: Sequence[Source] = ()) -> list[Target]:
    """The token files that are made of sources: of all that a tokenizer is `trained` on, and of others. Looks at names,
    sizes and times of text alone."""
    sources = [*trained, *others]
    try:
        identities = collect_all(Source.identity, sources)
        tokenizer = _tokenizer_key(config, identities[: len(trained)])
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
    refuse(problems)
    return plans or []


def _check_output(target: Target) -> None:
    """UserError where the token file would lie inside the text, or take the place of files that are not made of the
    same text by the same tokenizer."""
    folders = [Path(path).resolve() for path in target.source.paths if os.path.isdir(path)]
    if {*folders} & {*target.prefix.resolve().parents}:
        rule, hint = "is inside data.path, a folder that is read whole", "--output with a name in another folder"
        raise UserError(Problem("--output", str(target.prefix), rule, hint))
    taken = [path for ending in OUTPUTS if os.path.lexists(path := with_suffix(target.prefix, ending))]
    with suppress(UserError):
        taken = taken if read_facts(target.prefix).fingerprint != target.key else []
    if taken:
        rule = f"{taken[-1]} is there, and is not made of this text by this tokenizer"
        raise UserError(Problem("--output", str(target.prefix), rule, f"--output={target.prefix}-2, or move it away"))


def _make(
    config: Config, targets: list[Target], progress: Progress | None, setting: str, trained: int | None = None
) -> None:
    """Make the targets that are missing; `setting` says where they are to lie. A tokenizer is trained on the first
    `trained` of them, by default on all."""
    if all(target.is_prepared for target in targets):
        return
    plans = _plans(config, [target.source for target in targets])
    # The text can be read from what is made.
    with private_files(), _locked([target.prefix for target in targets], setting):
        jobs: dict[Target, list[Job]] = {  # the shards of a missing target, and the token file that each becomes
            target: [(target.work / f"part-{number:05d}", shard) for number, shard in enumerate(plan)]
            for target, plan in zip(targets, plans, strict=True)
            if not target.is_prepared
        }
        every = [job for parts in jobs.values() for job in parts]
        total = sum(shard.size for _, shard in every)
        done = dict[Path, Iterable[int]]()  # bytes of text, documents and tokens in the file of a shard, so far
        for file, shard in every:  # a damaged part of one that somebody deletes is made again
            if all(with_suffix(file, suffix).exists() for suffix in (".idx", ".bin", ".json")):
                done[file] = shard.size, read_facts(file).documents, read_facts(file).tokens

        def report() -> None:
            size, documents, tokens = map(sum, zip((0, 0, 0), *done.values(), strict=True))
            if progress:
                progress(min(size, total) if total else size, total, documents, tokens)

        report()
        if not jobs:
            return
        tokenizer = obtain_tokenizer(config, targets[:trained], [*jobs], plans[:trained])
        check_vocabulary(config, tokenizer.vocab_size)
        for target, parts in jobs.items():
            tokenizer.save(target.work / "tokenizer")
            left = [job for job in parts if job[0] not in done]
            try:
                workers = config.data.workers or usable_cores()
                for file, *counts in tokenize_shards(left, tokenizer, target.work / "tokenizer", workers):
                    done[file] = counts
                    report()
                if not any(read_facts(file).tokens for file, _ in parts):
                    rule, found = "holds no text at all (only empty documents)", " ".join(target.source.paths)
                    raise UserError(Problem(target.source.setting, found, rule, "give text; check data.text_column"))
            except UserError as error:  # the text must be changed, and changed text has another key, but on the hub
                if not isinstance(error, UnavailableError) and config.data.source != "hf":
                    shutil.rmtree(target.work, ignore_errors=True)
                raise
            _join(target, [file for file, _ in parts], tokenizer)


@contextmanager
def _locked(prefixes: list[Path], setting: str) -> Iterator[None]:
    """Alone write to these, in one folder that `setting` names. The kernel releases a lock when its holder dies. Its
    file stays: if it were deleted, two processes could hold locks on two files of one name."""
    folder = prefixes[0].parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as files:
            for prefix in sorted(set(prefixes)):  # in one order: no two processes wait for each other
                file = files.enter_context(open_to_append(with_suffix(prefix, ".lock")))
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        rule = f"cannot be written ({error.strerror or error}); what is already prepared is kept"
        hint = f"{REMEDIES.get(error.errno, 'start again')}, or choose a writable folder ({setting}=PATH)"
        raise UserError(Problem(setting, str(folder), rule, hint)) from error


def obtain_tokenizer(
    config: Config, trained: list[Target], missing: list[Target], plans: list[list[Shard]]
) -> TextTokenizer:
    """The tokenizer that the config names; bpe and char are of the text of the `trained` targets, whose shards `plans`
    holds: made now, unless it has been, for one that is prepared or by a process that was killed."""
    folders = [with_suffix(target.prefix, ".tokenizer") for target in trained if target.is_prepared]
    folders += [target.work / "tokenizer" for target in missing]
    for folder in folders:
        if (folder / "tokenizer_config.json").exists():  # written last
            return load_tokenizer(folder)
    shards = [shard for plan in plans for shard in plan]
    if config.tokenizer == "byte":
        return byte_tokenizer()
    if config.tokenizer == "char":
        return char_tokenizer(piece.text for shard in shards for piece in pieces(shard))
    if config.tokenizer == "bpe":
        return bpe_tokenizer(sample(shards), config.data.bpe_vocab_size)
    return named_tokenizer(config.tokenizer)


def sample(shards: list[Shard], size: int = SAMPLE) -> Iterator[str]:
    """About `size` characters of text from all over the data, the same on every call."""
    chosen = shards[:: max(1, -(-len(shards) // SAMPLED_SHARDS))]
    for number, shard in enumerate(chosen):
        share, found = size // (len(chosen) - number), pieces(shard)
        while share > 0 and (piece := next(found, None)):
            yield piece.text[:share]
            size -= len(piece.text[:share])
            share -= len(piece.text)


def char_tokenizer(texts: Iterable[str]) -> TextTokenizer:
    """One id per symbol of the texts, in the symbols' order, and nothing else."""
    symbols: set[str] = set()
    for text in texts:
        symbols.update(text)
    if not symbols:
        rule, hint = "there is no symbol in the text: all documents are empty", "give text; check data.text_column"
        raise UserError(Problem("tokenizer", "char", rule, hint))
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(symbols))}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<|unknown|>"))  # no member: unknown is an error
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return TextTokenizer(backend, {})


def bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Byte-level BPE (GPT-2's) trained on `texts`; `vocab_size` counts the 256 bytes and the end of document."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator((part for text in texts for part in short_words(text)), trainer)
    return TextTokenizer(backend, {"eos_token": END})


def short_words(text: str) -> Iterator[str]:
    """The text in parts without a word of more than twice LONG characters."""
    start = 0
    for at in range(0, len(text), LONG):
        if ALIKE.fullmatch(text, at, at + LONG):
            yield text[start:at]
            start = at
    yield text[start:]


def _join(target: Target, files: list[Path], tokenizer: TextTokenizer) -> None:
    """Make one token file of the files of all shards, its tokenizer beside it; then the work folder goes."""
    shards, dtype, whole = [read_facts(file) for file in files], dtype_for(tokenizer.vocab_size), target.work / "whole"
    content, lengths = xxhash.xxh3_128(), list[IntArray]()
    with with_suffix(whole, ".bin").open("wb") as joined:
        for path in (file for file, shard in zip(files, shards, strict=True) if shard.tokens):
            file = TokenFile.open(path)
            assert file.tokens.dtype == dtype, (path, file.tokens.dtype, dtype)
            content.update(file.tokens.data)
            joined.write(file.tokens.data)
            lengths.append(np.add.reduceat(file.lengths, file.boundaries[:-1], dtype=np.int64))  # of the sequences
    facts = {
        "source": target.source.label,
        "fingerprint": target.key,
        **{name: sum(getattr(shard, name) for shard in shards) for name in SUMMED},
        "tokenizer": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "dtype": str(dtype),
        "xxh3_128": content.hexdigest(),
    }
    write_index(whole, dtype, np.concatenate(lengths), facts)
    for ending in (".json", ".bin", ".idx"):
        if ending == ".idx":
            tokenizer.save(with_suffix(target.prefix, ".tokenizer"))
        with_suffix(whole, ending).replace(with_suffix(target.prefix, ending))
    sync_folder(target.prefix.parent)
    shutil.rmtree(target.work, ignore_errors=True)
