"""Opens the token files of a run: the split, the vocabulary and all checks that are possible before the first step.

The split is by position: the last `validation_fraction` of each part's tokens is for validation.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np
import xxhash

from megalite.config.files import read_object, write_atomically
from megalite.config.schema import HELD_OUT, Config, DataConfig
from megalite.data.samples import IntArray, Part, SampleSource, integer_weights
from megalite.data.token_file import HASH_WHOLE, TokenFile, with_suffix
from megalite.data.tokenizers import TextTokenizer, load_tokenizer
from megalite.errors.problems import Problem, UserError, about, collect, collect_all, refuse, several

RECORD = "token_files.json"  # in a run's folder: size and time of each large token file
FORMAT = 1  # part of every fingerprint: a change of what preparation produces renews all caches


class TokenFiles(NamedTuple):
    """The token files of a run, before they are opened, and for data=tokens the tokenizer that `tokenizer=` names."""

    prefixes: list[Path]
    named: TextTokenizer | None
    sets: Mapping[str, list[Path]]  # of data.validation, by name


@dataclass(frozen=True)
class OpenedData:
    """The data of a run. Its fingerprint is of what defines training: not of the sets of data.validation."""

    train: SampleSource
    validation: SampleSource | None
    tokenizer: TextTokenizer | None
    fingerprint: str
    description: str
    identities: list[str]  # of the parts' contents
    names: list[str]  # of the parts
    sets: Mapping[str, SampleSource] = field(default_factory=dict)  # by name
    fingerprint_of_sets: str = ""

    @property
    def tokenizer_folder(self) -> Path | None:
        """Where the tokenizer of the files is; None where they have none beside them."""
        folders = (with_suffix(part.file.prefix, ".tokenizer") for part in self.train.parts)
        return next((folder for folder in folders if folder.is_dir()), None)

    @property
    def evaluated(self) -> dict[str, SampleSource]:
        """What is held out, and the sets, by name."""
        return ({HELD_OUT: self.validation} if self.validation else {}) | dict(self.sets)

    @cached_property
    def bytes_of_ids(self) -> IntArray | None:
        """Bytes of text that each id stands for, [vocab_size]; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.bytes_of_ids(self.train.vocab_size)


def open_data(config: Config, found: TokenFiles) -> OpenedData:
    """Open the files that were found or made for `config`."""
    problems = list[Problem]()
    opened = collect(lambda: _open_training(config, found.prefixes, found.named), problems)
    sets = collect(lambda: collect_all(partial(_open_set, config, opened), found.sets.items()), problems)
    refuse(problems)
    assert opened is not None
    assert sets is not None
    sources, identities = dict(zip(found.sets, (one for one, _ in sets), strict=True)), [its for _, its in sets]
    return replace(opened, sets=sources, fingerprint_of_sets=digest(FORMAT, [*sources], identities))


def _open_set(
    config: Config, opened: OpenedData | None, found: tuple[str, list[Path]]
) -> tuple[SampleSource, list[str]]:
    """A set of data.validation, by name and prefixes, and the identities of its files. UserError where it is shorter
    than a sample, or does not fit what was opened for training."""
    (name, prefixes), need, problems = found, config.train.seq_length + 1, list[Problem]()
    setting, paths = f"data.validation.{name}", paths_of(sets_of(config)[name])
    files = about(setting, lambda: collect_all(TokenFile.open, prefixes))
    makers = [_saved(part.file)[1] for part in opened.train.parts] if opened else []
    known = next(filter(None, [opened.tokenizer.identity if opened and opened.tokenizer else None, *makers]), None)
    for path, file in zip(paths, files, strict=True):
        if (length := len(file.tokens)) < need:
            rule = f"{several(length, 'token')} are less than one sample of {need:,}"
            hint = f"more text, or train.seq_length={length - 1}" if length > 1 else "more text"
            problems.append(Problem(setting, path, rule, f"{hint}, or leave it out"))
        if known and _saved(file)[1] not in (None, known):
            rule, hint = "was made by another tokenizer than the training data", "prepare it again with that one"
            problems.append(Problem(setting, path, rule, hint))
    refuse(problems)
    ids = opened.train.vocab_size if opened else 1 << 63
    identities = about(setting, lambda: collect_all(lambda file: file.identity(ids), files))
    parts, weights = [Part(file, 0, len(file.tokens)) for file in files], tuple(len(file.tokens) for file in files)
    end = opened.train.end_of_document if opened else None
    return SampleSource(parts, weights, need - 1, ids, None, end), identities


def _open_training(config: Config, prefixes: list[Path], named: TextTokenizer | None) -> OpenedData:
    """The data without the sets of data.validation."""
    files = collect_all(TokenFile.open, prefixes)
    shares, fraction, seq_length = config.data.weights, config.data.validation_fraction, config.train.seq_length
    weights = tuple(len(file.tokens) for file in files) if shares is None else integer_weights(shares)
    tokenizer = _tokenizer(config, files, named)
    vocab_size, identities = _vocabulary(config, files, tokenizer)
    end = tokenizer.end_of_document if tokenizer else None
    if config.data.mask_end_of_document and end is None:
        rule = "no end-of-document token is known"
        raise UserError(Problem("data.mask_end_of_document", True, rule, "false, or another tokenizer"))
    train, validation = _split(config, files)
    documents, tokens = sum(file.documents for file in files), sum(len(file.tokens) for file in files)
    parts = f" in {len(files)} parts" if len(files) > 1 else ""
    counts = f"{config.data.source}: {several(documents, 'document')}, {several(tokens, 'token')}{parts}"
    return OpenedData(
        train=SampleSource(train, weights, seq_length, vocab_size, config.seed, end),
        validation=SampleSource(validation, weights, seq_length, vocab_size, None, end) if validation else None,
        tokenizer=tokenizer,
        fingerprint=digest(FORMAT, identities, fraction, weights),
        description="; ".join([counts, *([tokenizer.name] if tokenizer else [])]),
        identities=identities,
        names=source_names(config.data) or [config.data.source],
    )


def note_changed_files(files: Sequence[TokenFile], run_dir: Path, report: Callable[[str], None]) -> None:
    """Report the large token files with another size or time than at the run's last start, and remember this one. The
    fingerprint holds 64 blocks of a large file."""
    large = [with_suffix(file.prefix, ".bin") for file in files if file.tokens.nbytes > HASH_WHOLE]
    now = {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in large}
    with suppress(UserError):  # there is no record, or a damaged one
        before = read_object(run_dir / RECORD)
        for path in [path for path, state in now.items() if before.get(path, state) != state]:
            scan = f"python -m megalite prepare --verify data=tokens data.path={path.removesuffix('.bin')}"
            report(f"{path} has another time than at the last start; samples of it are the same ({scan} reads all)")
    if now:
        with suppress(OSError):  # no room: the next start compares with an older one
            write_atomically(run_dir / RECORD, json.dumps(now, indent=1).encode())


def paths_of(data: DataConfig) -> list[str]:
    """data.path as a list."""
    return [data.path] if isinstance(data.path, str) else list(data.path)


def sets_of(config: Config) -> dict[str, DataConfig]:
    """data.validation by name, each set as data of its own; none where nothing is evaluated."""
    sets = config.data.validation if config.train.eval_interval > 0 else None
    return {name: replace(config.data, path=path) for name, path in (sets or {}).items()}


def source_names(data: DataConfig) -> list[str]:
    """Names of a blend's parts: the last part of each path, and what tells it from others of that name before it. Empty
    where there is no blend."""
    names, paths = list[str](), [PurePath(path).parts for path in paths_of(data)] if isinstance(data.path, list) else []
    for path in paths if len(paths) > 1 else ():
        tails = [path[-length:] for length in range(1, len(path) + 1)]
        tail = next((tail for tail in tails if sum(one[-len(tail) :] == tail for one in paths) == 1), path)
        name = "/".join(tail)
        names.append(name if name not in names else f"{name} ({len(names) + 1})")  # the same path twice
    return names


def digest(*facts: object) -> str:
    """A short name for `facts` (anything that JSON can hold): equal facts, equal name, on every machine."""
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())[:20]


def check_vocabulary(config: Config, needed: int) -> None:
    """Refuse a model that lacks some of the tokenizer's tokens."""
    wanted = config.model.vocab_size
    if wanted is not None and wanted < needed:
        hint = f"null, at least {needed}, or a tokenizer with fewer tokens (with checkpoint.init_from: its own)"
        raise UserError(Problem("model.vocab_size", wanted, f"the tokenizer has {needed:,} tokens", hint))


def _saved(file: TokenFile) -> tuple[TextTokenizer | None, str | None]:
    """The tokenizer that made a token file, and its identity, as far as they are known."""
    folder = with_suffix(file.prefix, ".tokenizer")
    saved = load_tokenizer(folder) if folder.is_dir() else None
    return saved, saved.identity if saved else file.facts.tokenizer


def _tokenizer(config: Config, files: list[TokenFile], given: TextTokenizer | None) -> TextTokenizer | None:
    """The tokenizer that made the token files, which must be one."""
    folders = [with_suffix(file.prefix, ".tokenizer") for file in files]
    saved, identities = zip(*map(_saved, files), strict=True)
    known = given.identity if given else next(filter(None, identities), None)
    if strange := [folder for folder, it in zip(folders, identities, strict=True) if it not in (None, known)]:
        others = "the one given" if given else "the parts before"
        rule = f"{strange[0].stem} was made by another tokenizer than {others}"
        hint = f"prepare it again with that tokenizer; to train a new model: tokenizer={strange[0]}"
        raise UserError(Problem("data.path", config.data.path, rule, hint))
    return given or next(filter(None, saved), None)


def _vocabulary(config: Config, files: list[TokenFile], tokenizer: TextTokenizer | None) -> tuple[int, list[str]]:
    """How many ids may occur, and the identity of each file. It is model.vocab_size, which covers the tokenizer's, or
    the tokenizer's. UserError for files that are too narrow, or have other ids in the parts that are checked."""
    needed = tokenizer.vocab_size if tokenizer else max(file.facts.vocab_size or 0 for file in files)
    size = config.model.vocab_size or needed
    if not size:
        rule = "token files without a tokenizer do not say how many tokens there are"
        hint = "set it to the vocabulary size of the tokenizer that made them, or give tokenizer=FOLDER"
        raise UserError(Problem("model.vocab_size", None, rule, hint))
    check_vocabulary(config, needed)

    def checked(file: TokenFile) -> str:
        dtype = file.tokens.dtype
        if np.iinfo(dtype).max < needed - 1:  # larger ids would have been cut when written
            rule = f"holds {dtype} ids, up to {np.iinfo(dtype).max:,}; the tokenizer has {needed:,} tokens"
            hint = "give the tokenizer that made it, or prepare the data again with this one"
            raise UserError(Problem("data.path", str(with_suffix(file.prefix, ".bin")), rule, hint))
        return file.identity(size)

    return size, collect_all(checked, files)


def _split(config: Config, files: list[TokenFile]) -> tuple[list[Part], list[Part]]:
    """Training and validation tokens of each file; no validation parts if there is no evaluation."""
    fraction, need = config.data.validation_fraction, config.train.seq_length + 1
    evaluated = fraction > 0 and config.train.eval_interval > 0
    train, validation, problems = list[Part](), list[Part](), list[Problem]()
    names = ["stdlib"] if config.data.source == "stdlib" else paths_of(config.data)
    for name, file in zip(names, files, strict=True):
        total = len(file.tokens)
        border = int(total * (1 - fraction))  # nanoGPT's rounding
        train.append(Part(file, 0, border))
        validation.append(Part(file, border, total))
        least = min(border, total - border) if evaluated else border
        if least < need:
            kind, share = "training" if least == border else "validation", 0.5 if evaluated else 0.0
            rule = f"{least:,} {kind} tokens (of {total:,}) of {name} are less than one sample of {need:,}"
            longest = max(1, min(need, int(total * (1 - share))) - 1)
            hint = f"data.validation_fraction={share} with train.seq_length={longest} or less, or more text"
            problems.append(Problem("data.path", name, rule, hint))
    refuse(problems)
    return train, validation if evaluated else []
