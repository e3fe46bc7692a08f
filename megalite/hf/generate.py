"""Text from a saved model, read and computed as an evaluation does: the same files, the same ids, the same mathematics.

A prompt is computed once. From then on every step computes the newest token of each text alone: attention keeps keys
and values of the tokens before it.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.schema import Config
from megalite.config.user_files import read_object, refusing
from megalite.data.batch import unscored
from megalite.errors.problems import NO_VALUE, Problem, UserError, collect_all
from megalite.hf.saved_model import SavedModel
from megalite.model.attention import Attention, BlockInputs
from megalite.model.gpt import GPT

NEW_TOKENS = 100  # where nobody says how many
TOGETHER = 32  # samples of a prompt that grow at the same time


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
    kept = [torch.empty(0), torch.empty(0)]  # keys and values [b, groups, s, d], once there are some

    def attend(queries: Tensor, keys: Tensor, values: Tensor, inputs: BlockInputs) -> Tensor:
        queries, *new = (part.flatten(2, 3).permute(1, 2, 0, 3) for part in (queries, keys, values))
        is_first = not kept[0].numel()
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
    if saved.tokenizer is None:
        rule = "it holds no tokenizer, so there is nothing to read a prompt with"
        raise UserError(Problem("model", str(saved.folder), rule, "put the tokenizer of its tokens there"))
    begun = collect_all(lambda prompt: read_prompt(saved, prompt), prompts)
    counts = collect_all(lambda ids: _new_tokens(saved, len(ids), sampling.max_new_tokens), begun)
    path = saved.folder / "generation_config.json"  # of which nothing else is read
    named: Any = read_object(path).get("eos_token_id") if saved.found is None and path.is_file() else None
    ends = {saved.tokenizer.end_of_document, *(named if isinstance(named, list) else [named])} - {None}
    model = saved.load(config)
    for prompt, ids, count in zip(prompts, begun, counts, strict=True):
        dice = torch.Generator().manual_seed(config.seed)
        for first in range(0, sampling.num_samples, TOGETHER):
            texts = torch.tensor([ids] * min(TOGETHER, sampling.num_samples - first))
            for row in continued(model, texts, count, sampling, dice, ends).tolist():
                end = next((at for at in range(len(ids), len(row)) if row[at] in ends), None)
                yield prompt, saved.tokenizer.decode(row[:end], skip_special_tokens=True)


def read_prompt(saved: SavedModel, prompt: str) -> list[int]:
    """The ids of a prompt, as evaluation reads a text; special tokens that are spelled out are those tokens."""
    assert saved.tokenizer is not None
    backend, known = saved.tokenizer.backend, saved.config.model.vocab_size or 0
    with refusing("--prompt", "UTF-8 text"):
        saved.tokenizer.encode(prompt)  # says which symbol is unknown, and where
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
