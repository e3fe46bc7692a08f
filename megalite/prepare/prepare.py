"""Makes the token files of a run from its text: once, by one process, and continued after a kill.

Each part of the data becomes a token file in the cache. Its name is a fingerprint of the part's files and of the
tokenizer. Training is given this module as its `Preparation`.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from megalite.config.derive import BUILT_IN_TOKENIZERS
from megalite.config.schema import Config
from megalite.config.user_files import read_bytes
from megalite.data.open import FORMAT, Progress, TokenFiles, check_vocabulary, digest, paths_of
from megalite.data.token_file import Facts, TokenFile
from megalite.errors.problems import Problem, UserError, collect, collect_all
from megalite.launch.cores import usable_cores
from megalite.prepare.cache import cache_folder, make_folder
from megalite.prepare.hub import TOKENIZER_FILES, tokenizer_folder
from megalite.prepare.making import Making, Target, is_prepared
from megalite.prepare.reading import Shard
from megalite.prepare.sources import Source, not_read, sources_of
from megalite.prepare.tokenizer import named_tokenizer, obtain_tokenizer


@dataclass(frozen=True)
class TokenizerChoice:
    """Which tokenizer, before it exists. `identity` names it in fingerprints; trained ones live in `folder`."""

    name: str
    identity: str
    folder: Path | None = None


def prepare(config: Config, progress: Progress | None = None) -> TokenFiles:
    """Make every token file that `config` needs and that is not there yet."""
    if config.data.source == "tokens":
        prefixes = [Path(path).expanduser().absolute() for path in paths_of(config.data)]
        built_in = config.tokenizer in BUILT_IN_TOKENIZERS
        return TokenFiles(prefixes, tokenizer=None if built_in else named_tokenizer(config.tokenizer))
    sources = sources_of(config.data)
    choice, targets = targets_of(config, sources)
    _make(config, choice, targets, progress, "data.cache_dir")
    return TokenFiles([target.prefix for target in targets], not_read(sources))


def find(config: Config) -> TokenFiles:
    """The token files that `prepare` has made. One that is missing is refused: its text changed since."""
    if config.data.source == "tokens":
        return prepare(config)
    sources = sources_of(config.data)
    _, targets = targets_of(config, sources)
    for target in targets:
        if not is_prepared(target.prefix):
            rule = "is not prepared on this machine, or its files changed since"
            raise UserError(Problem("data.path", config.data.path, rule, "start again, when nothing writes to it"))
    return TokenFiles([target.prefix for target in targets], not_read(sources))


def prepare_file(source: Source, config: Config, prefix: Path, progress: Progress | None = None) -> Facts:
    """Make the token file `prefix` of one source, wherever the user wants it; returns what PREFIX.json says. A file
    that is there already must be the same one."""
    choice, [(_, key)] = _keys(config, [source])
    target = Target(source, prefix.absolute(), key)
    _make(config, choice, [target], progress, "--output")
    facts = TokenFile.open(target.prefix).facts()
    if facts.fingerprint != target.key:
        rule = "there is a token file already, of other text or another tokenizer"
        raise UserError(Problem("--output", str(prefix), rule, "choose another name, or delete it"))
    return facts


def examine(config: Config) -> None:
    """Refuse text or a tokenizer that is not there or not readable; quick, and nothing is written."""
    if config.data.source != "tokens":
        sources = sources_of(config.data)
        choice, _ = _keys(config, sources)
        _plans(choice, sources)


def _make(
    config: Config, choice: TokenizerChoice, targets: list[Target], progress: Progress | None, setting: str
) -> None:
    """Make the targets that are missing; `setting` says where they are to lie."""
    if all(is_prepared(target.prefix) for target in targets):
        return
    plans = _plans(choice, [target.source for target in targets])
    for folder in {target.prefix.parent for target in targets}:
        make_folder(folder, setting)
    making = Making(targets, plans, config.data.workers or usable_cores(), progress)
    tokenizer = obtain_tokenizer(choice.name, choice.folder, config.data.bpe_vocab_size, plans)
    check_vocabulary(config, tokenizer.vocab_size)
    for target, plan in zip(targets, plans, strict=True):
        making.make(target, plan, tokenizer)


def targets_of(config: Config, sources: list[Source]) -> tuple[TokenizerChoice, list[Target]]:
    """What is made of the sources. Looks at names, sizes and times of the text alone."""
    choice, keys = _keys(config, sources)
    folder = cache_folder(config.data) / "tokens"
    return choice, [Target(source, folder / f"{source.label}-{key}", key) for source, key in keys]


def _keys(config: Config, sources: list[Source]) -> tuple[TokenizerChoice, list[tuple[Source, str]]]:
    """The chosen tokenizer and the fingerprint of each source with it. Where a source is not there, a tokenizer that is
    not there either is told with it."""
    problems: list[Problem] = []
    identities = collect(lambda: collect_all(Source.identity, sources), problems)
    if identities is None:
        collect(lambda: _check_tokenizer(config.tokenizer), problems)
        raise UserError(problems)
    choice = _choose_tokenizer(config, identities)
    keys = [digest(FORMAT, identity, choice.identity) for identity in identities]
    return choice, list(zip(sources, keys, strict=True))


def _choose_tokenizer(config: Config, identities: list[str]) -> TokenizerChoice:
    """The tokenizer that the config names; bpe and char depend on the data, whose identities are given."""
    name = config.tokenizer
    if name == "byte":
        return TokenizerChoice(name, "byte")
    if name in BUILT_IN_TOKENIZERS:
        key = digest(FORMAT, name, identities, config.data.bpe_vocab_size if name == "bpe" else None)
        return TokenizerChoice(name, key, cache_folder(config.data) / "tokenizers" / f"{name}-{key}")
    content = []
    with suppress(UserError):  # one that is not to be had is told of with what is wrong with the text
        folder = tokenizer_folder(name)
        paths = {path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if not path.is_dir()}
        for path in sorted(paths):
            content.append((path.name, xxhash.xxh3_128_hexdigest(read_bytes(path, "copy the tokenizer again"))))
    return TokenizerChoice(name, digest(content))


def _plans(choice: TokenizerChoice, sources: Sequence[Source]) -> list[list[Shard]]:
    """The shards of every source, once text and tokenizer are known to be there: all problems, and nothing written."""
    problems: list[Problem] = []
    plans = collect(lambda: collect_all(Source.plan, sources), problems)
    collect(lambda: _check_tokenizer(choice.name), problems)
    if problems or plans is None:
        raise UserError(problems)
    return plans


def _check_tokenizer(name: str) -> None:
    if name not in BUILT_IN_TOKENIZERS:
        named_tokenizer(name)
