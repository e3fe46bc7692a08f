"""What a saved model computes: its loss on data, and text. Files, ids and mathematics are those of training.

On a run's own validation part the losses are those of training: the same batches, the same sums. Other data is
evaluated whole, in windows without overlap: every token of a file but the first is predicted once. A prompt is computed
once; from then on every step computes the newest token of each text alone.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.compose import load_part, names_of
from megalite.config.derive import BUILT_IN_TOKENIZERS
from megalite.config.files import read_object, refusing
from megalite.config.schema import Config
from megalite.config.settings import value_of, with_values
from megalite.data.batch import Batch, unscored
from megalite.data.batches import read_batch, validation_batches
from megalite.data.open import OpenedData, open_data
from megalite.data.samples import SampleSource
from megalite.errors.problems import NO_VALUE, Problem, UserError, collect_all
from megalite.hf.saved_model import SavedModel, open_model
from megalite.launch.device import PRECISIONS
from megalite.model.attention import Attention, BlockInputs
from megalite.model.gpt import GPT
from megalite.prepare.prepare import prepare
from megalite.train.evaluate import Sums

NAME_DATA = "name the data to evaluate on: data=stdlib, or data=text data.path=FILE"
Work = tuple[Config, OpenedData, SampleSource, str]  # a part of the opened data, which is said in words
MASKS = ("data.mask_end_of_document", "data.cross_document_attention")
NEW_TOKENS = 100  # where nobody says how many
TOGETHER = 32  # samples of a prompt that grow at the same time


@torch.no_grad()
def evaluate_saved(
    folder: Path, words: Sequence[str], step: int | None, rows: int, max_tokens: int | None, *, ema: bool = False
) -> dict[str, Any]:
    """Results of the model in `folder`, a run's (its newest checkpoint, or that of `step`; with `ema` of its averaged
    weights) or one of transformers. The loss is the mean over the predicted tokens, in nats.

    Where the overrides `words` name no data, a run is evaluated on what it held out; of other data, at most
    `max_tokens` tokens, `rows` sequences at a time.
    """
    named = names_of(words)
    own_data = not any(name.partition(".")[0] == "data" for name in named)
    reads = ("train.eval_batches",) if own_data else ("data", "data.*", "train.seq_length")
    doer = "an evaluation of its own data" if own_data else "an evaluation"
    asked = load_part(words, doer, ("device", "precision", *reads))
    if own_data and max_tokens is not None:
        rule = "has no effect: a run's own validation part is evaluated as in training"
        raise UserError(Problem("--max-tokens", max_tokens, rule, NAME_DATA))
    saved = open_model(folder, step, ema=ema)
    config, opened, source, description = (_own_data if own_data else _other_data)(saved, asked, named)
    batches = _windows(source, config, rows, max_tokens or source.tokens)
    if own_data:
        steps = validation_batches(source, config, torch.device("cpu"))
        batches = (batch for step in steps for batch in step)
    model = saved.load(replace(config, device=asked.device, precision=asked.precision))
    one = torch.ones((), dtype=torch.promote_types(model.dtype, torch.float32), device=model.device)
    sums = Sums(opened.bytes_of_ids, model.device)
    for batch in (batch.to(model.device) for batch in batches):
        sums.add(model.loss(batch, one), [batch])
    found = sums.metrics()
    return {
        "model": str(folder),
        "step": saved.found.manifest.step if saved.found else None,
        "weights": "averages" if ema else None,
        "data": description,
        "tokens": found.tokens,
        "seq_length": config.train.seq_length,
        "precision": PRECISIONS[model.dtype],
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,  # None: the bytes of the text are not known
        "bytes_per_token": found.bytes / found.tokens if found.bytes else None,
    }


def _own_data(saved: SavedModel, asked: Config, named: Set[str]) -> Work:
    """The data that the run held out."""
    config, state = saved.config, saved.state
    if state is None:
        raise UserError(Problem("data", None, "a model of transformers has no data of its own", NAME_DATA))
    count = (asked if "train.eval_batches" in named else config).train.eval_batches
    values: dict[str, Any] = {"train.eval_interval": config.train.eval_interval or 1, "data.validation": None}
    if config.phases and config.tokenizer in BUILT_IN_TOKENIZERS and saved.tokenizer_folder:
        values["tokenizer"] = str(saved.tokenizer_folder.absolute())  # that of the first phase
    config = with_values(config, {**values, "train.eval_batches": count})
    opened, known = open_data(config, prepare(config)), state.data
    if opened.fingerprint != known["fingerprint"]:
        rule = f"it is not the data of the run any more: {opened.description} now, {known['description']} then"
        raise UserError(Problem("data", config.data.path, rule, NAME_DATA))
    if opened.validation is None:
        rule = "the run holds out nothing for validation"
        raise UserError(Problem("data.validation_fraction", config.data.validation_fraction, rule, NAME_DATA))
    return config, opened, opened.validation, f"the validation part of {opened.description}"


def _other_data(saved: SavedModel, asked: Config, named: Set[str]) -> Work:
    """The data that the overrides name, read with the model's tokenizer, and masked as the run's own where the user
    does not say. Nothing is held out unless the user says so."""
    seq_length = asked.train.seq_length if "train.seq_length" in named else saved.config.train.seq_length
    positions = saved.config.model.max_positions
    if saved.config.model.position == "learned" and positions is not None and seq_length > positions:
        rule = f"the model has {positions:,} positions"
        raise UserError(Problem("train.seq_length", seq_length, rule, f"at most {positions}, or leave it out"))
    if asked.data.source != "tokens":
        saved.known_tokenizer()
    held_out = asked.data.validation_fraction if "data.validation_fraction" in named else 0.0
    values = {name: value_of(saved.config, name) for name in MASKS if saved.found and name not in named}
    values |= {"data.validation_fraction": held_out, "train.eval_interval": int(held_out > 0)}
    values |= {"tokenizer": str(saved.tokenizer_folder.absolute()) if saved.tokenizer_folder else "byte"}
    config = with_values(replace(asked, model=saved.config.model), {**values, "train.seq_length": 1})  # opens any text
    opened = open_data(config, prepare(config))
    source = replace(opened.validation or opened.train, weights=(1,), seq_length=seq_length, seed=None)
    description = opened.description + (", the part held out" if opened.validation else "")
    return with_values(config, {"train.seq_length": seq_length}), opened, source, description


def _windows(source: SampleSource, config: Config, rows: int, left: int) -> Iterator[Batch]:
    """Batches that predict the first `left` tokens: of each part `rows` windows at a time, then a shorter one."""
    for part in source.parts:
        part = replace(part, stop=part.first + min(part.tokens, left + 1))  # the first is not predicted
        left -= max(0, part.tokens - 1)
        count = part.samples(source.seq_length)
        for first in range(0, count, rows):
            yield read_batch(replace(source, parts=[part]), first, min(rows, count - first), config)
        rest = replace(part, first=part.first + count * source.seq_length)
        if rest.tokens > 1:
            yield read_batch(replace(source, parts=[rest], seq_length=rest.tokens - 1), 0, 1, config)


@dataclass(frozen=True)
class Sampling:
    """A token is the likeliest one at `temperature` 0, else it is drawn by its share among the `top_k` likeliest (0:
    all) and, of these, among the fewest whose shares add up to `top_p`. A prompt is continued `num_samples` times."""

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    num_samples: int = 1
    max_new_tokens: int | None = None

    def draw(self, logits: Tensor, dice: torch.Generator) -> Tensor:
        """logits [n, vocab] -> tokens [n]"""
        if not logits.isfinite().all():
            rule = "its logits are not finite numbers: the weights are too large for the precision"
            raise UserError(Problem("precision", NO_VALUE, rule, "precision=fp32, or other weights"))
        if self.temperature == 0:
            return logits.argmax(1).cpu()
        shares, tokens = self.shares(logits)
        return tokens.gather(1, torch.multinomial(shares, 1, generator=dice))[:, 0]

    def shares(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What each token is drawn with (not yet of the sum 1), and the tokens, the likeliest first: [n, <= vocab]"""
        size = logits.shape[1]
        best, tokens = logits.double().cpu().topk(min(self.top_k or size, size))
        shares = torch.softmax((best - best[:, :1]) / self.temperature, dim=1)
        return shares.masked_fill(shares.cumsum(1) - shares >= self.top_p, 0.0), tokens


def keeping_keys() -> Callable[..., Tensor]:
    """A function in place of `Attention.attend` that attends to all tokens so far. Its first call brings whole texts,
    every other one token of each."""
    kept = list[Tensor]()  # keys and values [b, groups, s, d], once there are some

    def attend(queries: Tensor, keys: Tensor, values: Tensor, inputs: BlockInputs) -> Tensor:
        queries, *new = (part.flatten(2, 3).permute(1, 2, 0, 3) for part in (queries, keys, values))
        is_first = not kept
        kept[:] = new if is_first else [torch.cat(parts, dim=2) for parts in zip(kept, new, strict=True)]
        keys, values = kept
        is_grouped = queries.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=is_first, enable_gqa=is_grouped)
        return out.permute(2, 0, 1, 3).flatten(2)

    return attend


@torch.inference_mode()
def texts_of(
    saved: SavedModel, prompts: Sequence[str], config: Config, sampling: Sampling
) -> Iterator[tuple[str, str]]:
    """Prompts with the texts that they begin. A text depends on `config.seed` and on no other prompt. All that is wrong
    is refused before the first text."""
    tokenizer = saved.known_tokenizer()
    begun = collect_all(lambda prompt: read_prompt(saved, prompt), prompts)
    counts = collect_all(lambda ids: _new_tokens(saved, len(ids), sampling.max_new_tokens), begun)
    path = saved.folder / "generation_config.json"  # of which nothing else is read
    named: Any = read_object(path).get("eos_token_id") if saved.found is None and path.is_file() else None
    ends = {tokenizer.end_of_document, *(named if isinstance(named, list) else [named])} - {None}
    model = saved.load(config)
    for prompt, ids, count in zip(prompts, begun, counts, strict=True):
        dice = torch.Generator().manual_seed(config.seed)
        for first in range(0, sampling.num_samples, TOGETHER):
            texts = torch.tensor([ids] * min(TOGETHER, sampling.num_samples - first))
            for row in continued(model, texts, count, sampling, dice, ends).tolist():
                end = next((at for at in range(len(ids), len(row)) if row[at] in ends), None)
                yield prompt, tokenizer.decode(row[:end], skip_special_tokens=True)


def read_prompt(saved: SavedModel, prompt: str) -> list[int]:
    """The ids of a prompt, as evaluation reads a text; special tokens that are spelled out are those tokens."""
    backend, known = saved.known_tokenizer().backend, saved.config.model.vocab_size or 0
    with refusing("--prompt", "UTF-8 text"):
        saved.known_tokenizer().encode(prompt)  # refuses a symbol without a token
    backend.encode_special_tokens = False
    ids = backend.encode(prompt, add_special_tokens=False).ids
    backend.encode_special_tokens = True
    if not ids or max(ids) >= known:  # on a GPU this would end the process
        rule = f"its tokens are {ids!s:.60}, and the model knows those below {known:,}"
        raise UserError(Problem("--prompt", prompt, rule, "give the tokenizer that the model was trained with"))
    return ids


def _new_tokens(saved: SavedModel, prompt: int, wanted: int | None) -> int:
    """How many tokens to add. Learned positions end where their table does; others go on, beyond what was trained."""
    model, length = saved.config.model, saved.config.train.seq_length
    table = model.max_positions if model.position == "learned" else None
    room = min(length, table or length) - prompt
    count = wanted or min(NEW_TOKENS, room if room > 0 else NEW_TOKENS)
    if table is not None and prompt + count > table:
        rule = f"the prompt takes {prompt:,} of the model's {table:,} positions"
        remedy = f"at most {max(1, table - prompt)}, with a prompt of at most {table - 1:,} tokens"
        raise UserError(Problem("--max-new-tokens", NO_VALUE if wanted is None else wanted, rule, remedy))
    return count


def continued(
    model: GPT, texts: Tensor, count: int, sampling: Sampling, dice: torch.Generator, ends: Set[Any] = frozenset()
) -> Tensor:
    """texts [n, s] -> [n, s + count], or fewer where all of them have come to an end."""
    for attention in (module for module in model.modules() if isinstance(module, Attention)):
        attention.attend = keeping_keys()  # type: ignore[method-assign]
    over, newest = torch.zeros(len(texts), dtype=torch.bool), texts
    while count and not over.all():
        batch = unscored(newest)
        batch = replace(batch, positions=batch.positions + texts.shape[1] - newest.shape[1]).to(model.device)
        newest = sampling.draw(model.head_logits(model(batch)[-1]), dice)[:, None]
        texts, count = torch.cat([texts, newest], dim=1), count - 1
        over |= torch.tensor([token in ends for token in newest[:, 0].tolist()])
    return texts
