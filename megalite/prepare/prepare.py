"""Makes the token files of a run from its text: once, by one process, and continued after a kill.

Each part of the data becomes a token file in the cache. Its name is a fingerprint of the part's files and of the
tokenizer. Training is given this module as its `Preparation`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from megalite.config.derive import BUILT_IN_TOKENIZERS
from megalite.config.schema import Config
from megalite.config.user_files import read_bytes
from megalite.data.open import FORMAT, Progress, TokenFiles, check_vocabulary, digest, paths_of
from megalite.data.token_file import Facts, TokenFile
from megalite.data.tokenizers import TextTokenizer, bpe_tokenizer, byte_tokenizer, char_tokenizer, load_tokenizer
from megalite.errors.problems import Problem, UserError, collect, collect_all
from megalite.launch.host import usable_cores
from megalite.prepare.hub import TOKENIZER_FILES, tokenizer_folder
from megalite.prepare.making import Counts, Target, counts_of, is_prepared, locked, make, make_folder
from megalite.prepare.reading import Shard, documents
from megalite.prepare.sources import Source, not_read, sources_of

SAMPLE = 8 << 20  # characters of text that a BPE is trained on
SAMPLED_SHARDS = 64


def prepare(config: Config, progress: Progress | None = None) -> TokenFiles:
    """Make every token file that `config` needs and that is not there yet."""
    if config.data.source == "tokens":
        prefixes = [Path(path).expanduser().absolute() for path in paths_of(config.data)]
        built_in = config.tokenizer in BUILT_IN_TOKENIZERS
        return TokenFiles(prefixes, tokenizer=None if built_in else named_tokenizer(config.tokenizer))
    sources = sources_of(config.data)
    tokenizer_key, targets = targets_of(config, sources)
    _make(config, tokenizer_key, targets, progress, "data.cache_dir")
    return TokenFiles([target.prefix for target in targets], not_read(sources))


def find(config: Config) -> TokenFiles:
    """The token files that `prepare` has made. One that is missing is refused: its text changed since."""
    if config.data.source == "tokens":
        return prepare(config)
    sources = sources_of(config.data)
    _, targets = targets_of(config, sources)
    if not all(is_prepared(target.prefix) for target in targets):
        rule = "is not prepared on this machine, or its files changed since"
        raise UserError(Problem("data.path", config.data.path, rule, "start again, when nothing writes to it"))
    return TokenFiles([target.prefix for target in targets], not_read(sources))


def prepare_file(source: Source, config: Config, prefix: Path, progress: Progress | None = None) -> Facts:
    """Make the token file `prefix` of one source, wherever the user wants it; returns what PREFIX.json says. A file
    that is there already must be the same one."""
    tokenizer_key, [cached] = targets_of(config, [source])
    target = Target(source, prefix.absolute(), cached.key)
    _make(config, tokenizer_key, [target], progress, "--output")
    facts = TokenFile.open(target.prefix).facts()
    if facts.fingerprint != target.key:
        rule = "there is a token file already, of other text or another tokenizer"
        raise UserError(Problem("--output", str(prefix), rule, "choose another name, or delete it"))
    return facts


def examine(config: Config) -> None:
    """Refuse text or a tokenizer that is not there or not readable; quick, and nothing is written."""
    if config.data.source != "tokens":
        _plans(config, sources_of(config.data))


def targets_of(config: Config, sources: list[Source]) -> tuple[str, list[Target]]:
    """The tokenizer's fingerprint, and what is made of the sources. Looks at names, sizes and times of text alone."""
    try:
        identities = collect_all(Source.identity, sources)
        tokenizer_key = _tokenizer_key(config, identities)
    except UserError:
        _plans(config, sources)  # names all that is wrong
        raise
    folder = _cache_folder(config) / "tokens"
    keys = [digest(FORMAT, identity, tokenizer_key) for identity in identities]
    named = zip(sources, keys, strict=True)
    return tokenizer_key, [Target(source, folder / f"{source.label}-{key}", key) for source, key in named]


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


def _make(config: Config, tokenizer_key: str, targets: list[Target], progress: Progress | None, setting: str) -> None:
    """Make the targets that are missing; `setting` says where they are to lie."""
    if all(is_prepared(target.prefix) for target in targets):
        return
    plans = _plans(config, [target.source for target in targets])
    for folder in {target.prefix.parent for target in targets}:
        make_folder(folder, setting)
    total, done = sum(shard.size for plan in plans for shard in plan), dict[Path, Counts]()

    def report() -> None:
        size, documents, tokens = map(sum, zip((0, 0, 0), *done.values(), strict=True))
        if progress:
            progress(min(size, total) if total else size, total, documents, tokens)

    for target, plan in zip(targets, plans, strict=True):
        done.update(counts_of(target, plan))
    report()
    tokenizer = obtain_tokenizer(config, tokenizer_key, plans)
    check_vocabulary(config, tokenizer.vocab_size)
    for target, plan in zip(targets, plans, strict=True):
        make(target, plan, tokenizer, config.data.workers or usable_cores(), done, report)


def _cache_folder(config: Config) -> Path:
    """The folder of prepared tokens and trained tokenizers."""
    assert config.data.cache_dir is not None, "derive() fills it in"
    return Path(config.data.cache_dir)


def named_tokenizer(name: str) -> TextTokenizer:
    """The tokenizer in a folder, or of that name on the hub."""
    return load_tokenizer(tokenizer_folder(name))


def obtain_tokenizer(config: Config, key: str, plans: list[list[Shard]]) -> TextTokenizer:
    """The tokenizer that the config names; bpe and char are trained on the planned shards and kept in the cache."""
    name = config.tokenizer
    if name not in BUILT_IN_TOKENIZERS:
        return named_tokenizer(name)
    if name == "byte":
        return byte_tokenizer()
    folder = make_folder(_cache_folder(config) / "tokenizers", "data.cache_dir") / f"{name}-{key}"
    with locked(folder.with_name(folder.name + ".lock")):
        if not (folder / "tokenizer.json").exists():
            shards = [shard for plan in plans for shard in plan]
            if name == "char":
                trained = char_tokenizer(text for shard in shards for text in documents(shard))
            else:
                trained = bpe_tokenizer(sample(shards), config.data.bpe_vocab_size)
            draft = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
            trained.save(draft)
            draft.replace(folder)
        return load_tokenizer(folder)


def sample(shards: list[Shard], size: int = SAMPLE) -> Iterator[str]:
    """About `size` characters of text from all over the data, the same on every call."""
    chosen = shards[:: -(-len(shards) // SAMPLED_SHARDS)]
    for number, shard in enumerate(chosen):
        share = size // (len(chosen) - number)
        for text in documents(shard):
            yield text[:share]
            size -= len(text[:share])
            share -= len(text[:share])
            if share <= 0:
                break
