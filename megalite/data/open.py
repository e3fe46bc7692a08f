"""From a config to samples: maps what `prepare` made and checks what can be known before the first step, at any size.

The split is by position: the last `validation_fraction` of each part's tokens is for validation.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from megalite.config.derive import BUILT_IN_TOKENIZERS
from megalite.config.problems import Problem, UserError
from megalite.config.schema import Config
from megalite.data.blend import Blend, integer_weights
from megalite.data.cache import digest
from megalite.data.prepare import FORMAT, check_vocabulary, is_prepared, targets_of
from megalite.data.samples import Part, SampleSource, beyond_vocabulary
from megalite.data.sources import collected, paths_of
from megalite.data.token_file import TokenFile, ids_of, largest_id, with_suffix
from megalite.data.tokenizers import TextTokenizer, load_tokenizer, named_tokenizer

MEASURED = 1 << 18  # validation tokens from which bytes_per_token is taken, at most


@dataclass(frozen=True)
class OpenedData:
    """The data of a run. `bytes_per_token` is that of the validation tokens, or None where it cannot be known."""

    train: SampleSource
    validation: SampleSource | None
    tokenizer: TextTokenizer | None
    vocab_size: int
    fingerprint: str
    bytes_per_token: float | None
    description: str


def open_data(config: Config) -> OpenedData:
    """Open the data that `config` names; for text, `prepare(config)` came first."""
    prefixes = _prefixes(config)
    files = collected(lambda prefix: [TokenFile.open(prefix)], prefixes)
    weights = _weights(config, files)
    tokenizer = _tokenizer(config, files)
    vocab_size = _vocab_size(config, files, tokenizer)
    _check_ids(files, vocab_size)
    end = tokenizer.end_of_document if tokenizer else None
    if config.data.mask_end_of_document and end is None:
        rule = "the tokenizer has no end-of-document token" if tokenizer else "without a tokenizer its id is unknown"
        raise UserError(Problem("data.mask_end_of_document", True, rule, "set it to false, or use another tokenizer"))
    train, validation = _split(config, files)
    seq_length = config.train.seq_length
    opened_validation = SampleSource(validation, weights, seq_length, vocab_size, None, end) if validation else None
    fraction = config.data.validation_fraction
    return OpenedData(
        train=SampleSource(train, weights, seq_length, vocab_size, config.seed, end),
        validation=opened_validation,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        fingerprint=digest(FORMAT, [file.identity() for file in files], seq_length, fraction, weights),
        bytes_per_token=_bytes_per_token(config, opened_validation, tokenizer),
        description=_description(config, files, tokenizer),
    )


def _prefixes(config: Config) -> list[Path]:
    if config.data.source == "tokens":
        return [Path(path).expanduser().absolute() for path in paths_of(config.data)]
    _, targets = targets_of(config)
    for target in targets:
        if not is_prepared(target.prefix):
            rule = "is not prepared, or its files changed since"
            raise UserError(
                Problem("data.path", target.source.label, rule, "start again; prepare(config) makes its tokens")
            )
    return [target.prefix for target in targets]


def _weights(config: Config, files: list[TokenFile]) -> tuple[int, ...]:
    """The blend's proportions: as set, else by the number of tokens."""
    weights = config.data.weights
    if weights is None:
        return tuple(len(file.tokens) for file in files)
    if len(weights) != len(files):
        rule = f"{len(weights)} weights for {len(files)} paths"
        raise UserError(Problem("data.weights", list(weights), rule, "one weight per entry of data.path"))
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        remedy = "leave out the path of a part that is not wanted"
        raise UserError(Problem("data.weights", list(weights), "weights must be above 0", remedy))
    return integer_weights(weights)


def _tokenizer(config: Config, files: list[TokenFile]) -> TextTokenizer | None:
    """The tokenizer that made the token files, which must be one."""
    saved = {file.prefix: with_suffix(file.prefix, ".tokenizer") for file in files}
    loaded = {prefix: load_tokenizer(folder) for prefix, folder in saved.items() if folder.is_dir()}
    identities = {prefix: str(facts["tokenizer"]) for prefix, facts in _sidecars(files) if "tokenizer" in facts}
    identities |= {prefix: tokenizer.identity for prefix, tokenizer in loaded.items()}
    if len(set(identities.values())) > 1:
        rule = "the parts were made with different tokenizers: " + ", ".join(
            f"{prefix.name} ({identity[:8]})" for prefix, identity in identities.items()
        )
        raise UserError(Problem("data.path", config.data.path, rule, "prepare all parts with one tokenizer"))
    if loaded:
        return next(iter(loaded.values()))
    return None if config.tokenizer in BUILT_IN_TOKENIZERS else named_tokenizer(config.tokenizer)


def _sidecars(files: list[TokenFile]) -> list[tuple[Path, dict[str, object]]]:
    return [(file.prefix, file.sidecar()) for file in files]


def _vocab_size(config: Config, files: list[TokenFile], tokenizer: TextTokenizer | None) -> int:
    """The ids that may occur: model.vocab_size, which covers the tokenizer's, or the tokenizer's."""
    known = [int(str(facts["vocab_size"])) for _, facts in _sidecars(files) if "vocab_size" in facts]
    needed = tokenizer.vocab_size if tokenizer else max(known, default=None)
    if needed is not None:
        _check_width(files, needed)
    wanted = config.model.vocab_size
    if wanted is None and needed is None:
        rule = "token files without a tokenizer do not say how many tokens there are"
        remedy = "set it to the vocabulary size of the tokenizer that made them, or give tokenizer=FOLDER"
        raise UserError(Problem("model.vocab_size", None, rule, remedy))
    check_vocabulary(config, needed or 0)
    size = wanted if wanted is not None else needed
    assert size is not None
    return size


def _check_width(files: list[TokenFile], vocab_size: int) -> None:
    """Refuse files that cannot hold all ids of the tokenizer: larger ones would have been cut when written."""
    problems = []
    for file in files:
        largest = largest_id(file.tokens.dtype)
        if largest < vocab_size - 1:
            rule = f"holds {file.tokens.dtype} ids, up to {largest:,}; the tokenizer has {vocab_size:,} tokens"
            remedy = "give the tokenizer that made it, or prepare the data again with this one"
            problems.append(Problem("data.path", str(with_suffix(file.prefix, ".bin")), rule, remedy))
    if problems:
        raise UserError(problems)


def _check_ids(files: list[TokenFile], vocab_size: int) -> None:
    """Refuse what a look at parts of each file finds, before a run begins: the ids of another tokenizer, mostly."""
    found = [(file, file.first_beyond(vocab_size)) for file in files]
    problems = [beyond_vocabulary(file, at, vocab_size) for file, at in found if at is not None]
    if problems:
        raise UserError(problems)


def _split(config: Config, files: list[TokenFile]) -> tuple[list[Part], list[Part]]:
    """Training and validation tokens of each file; no validation parts if there is no evaluation."""
    fraction, need = config.data.validation_fraction, config.train.seq_length + 1
    evaluated = fraction > 0 and config.train.eval_interval > 0
    train, validation = [], []
    problems: list[Problem] = []
    names = ["stdlib"] if config.data.source == "stdlib" else paths_of(config.data)
    for name, file in zip(names, files, strict=True):
        total = len(file.tokens)
        border = int(total * (1 - fraction))  # nanoGPT's rounding
        train.append(Part(file, 0, border))
        validation.append(Part(file, border, total))
        if border < need:
            rule = (
                f"{border:,} training tokens (of {total:,}) are less than one sample of {need:,} (train.seq_length + 1)"
            )
            remedy = "use more text"
            remedy += f", or train.seq_length={border - 1} or less" if border > 1 else ""
            problems.append(Problem("data.path", name, rule, remedy))
        elif evaluated and total - border < need:
            rule = f"{total - border:,} validation tokens (of {total:,}) of {name} are less than one sample of {need:,}"
            share = math.ceil(1000 * (need + 1) / total) / 1000
            remedy = f"data.validation_fraction={share} or more, or " if int(total * (1 - share)) >= need else ""
            problems.append(
                Problem("data.validation_fraction", fraction, rule, remedy + "train.eval_interval=0 (no evaluation)")
            )
    if problems:
        raise UserError(problems)
    return train, validation if evaluated else []


def _bytes_per_token(config: Config, validation: SampleSource | None, tokenizer: TextTokenizer | None) -> float | None:
    """Bytes of text per label of the loss, over the front of the validation tokens, where evaluation takes them."""
    if validation is None or tokenizer is None:
        return None
    evaluated = config.train.eval_batches * config.train.global_batch_size * config.train.seq_length
    shares = Blend(validation.weights).counts(min(evaluated, MEASURED))
    size = labels = 0
    for part, share in zip(validation.parts, shares, strict=True):
        tokens = ids_of(part.file.tokens[part.first : min(part.stop, part.first + share)])
        inside = tokens[(tokens >= 0) & (tokens < tokenizer.vocab_size)]
        if tokenizer.end_of_document is not None:
            inside = inside[inside != tokenizer.end_of_document]
        size += len(tokenizer.decode(inside.astype(int).tolist()).encode())
        labels += len(inside) if config.data.mask_end_of_document else len(tokens)
    return size / labels if labels and size else None


def _description(config: Config, files: list[TokenFile], tokenizer: TextTokenizer | None) -> str:
    """One line for the header of a run."""
    tokens, documents = sum(len(file.tokens) for file in files), sum(file.documents for file in files)
    parts = f" in {len(files)} parts" if len(files) > 1 else ""
    made_by = f"; {tokenizer.name}" if tokenizer else ""
    return f"{config.data.source}: {tokens:,} tokens, {documents:,} documents{parts}{made_by}"
