"""Text from a saved model, sampled by transformers: what its users will get, and so a check of the export, too."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.data.tokenizers import load_tokenizer
from megalite.errors.problems import NO_VALUE, Problem, UserError
from megalite.hf.export import export_run
from megalite.hf.offline_model import load_model, load_text_tokenizer
from megalite.hf.saved_run import is_run, open_run

NEW_TOKENS = 100  # where nobody says how many


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. `temperature` 0 takes the likeliest; `top_k` 0 and `top_p` 1 leave none out."""

    max_new_tokens: int | None = None  # None: NEW_TOKENS, or as many as there is room for
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0
    num_samples: int = 1

    def problems(self) -> Iterator[Problem]:
        """What is wrong with it, in the words of the command line."""
        rules = [
            ("--max-new-tokens", self.max_new_tokens, self.max_new_tokens is None or self.max_new_tokens >= 1, "1"),
            ("--temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 (the likeliest token)"),
            ("--top-k", self.top_k, self.top_k >= 0, "0 (all tokens)"),
            ("--num-samples", self.num_samples, self.num_samples >= 1, "1"),
        ]
        for name, value, good, least in rules:
            if not good:
                yield Problem(name, value, f"must be at least {least.partition(' ')[0]}", f"{name} {least}, or more")
        if not 0 < self.top_p <= 1:
            yield Problem("--top-p", self.top_p, "must be above 0 and at most 1", "--top-p 1 (all tokens)")
        if self.temperature == 0 and self.num_samples > 1:
            rule = "at --temperature 0 all of them are the same"
            yield Problem("--num-samples", self.num_samples, rule, "--num-samples 1, or a higher temperature")


def generate(
    folder: Path,
    prompt: str,
    sampling: Sampling,
    device: torch.device,
    report: Callable[[str], None],
    step: int | None = None,
) -> list[str]:
    """The prompt with what follows it, `sampling.num_samples` times.

    `folder` is a run's (of which `step` picks a checkpoint) or one of transformers. `report` is told what is worth
    knowing but no mistake. The same seed gives the same text on the same machine.
    """
    problems = list(sampling.problems())
    if not prompt:
        problems.append(Problem("--prompt", prompt, "there is nothing to continue", "--prompt 'Once upon a time'"))
    if problems:
        raise UserError(problems)
    with _as_transformers_folder(folder, prompt, step, report) as loadable:
        tokenizer = load_text_tokenizer(loadable)
        tokens = _encoded(tokenizer, prompt)
        model = load_model(loadable, device)
    return _sampled(model, tokenizer, tokens, sampling, report)


@contextmanager
def _as_transformers_folder(
    folder: Path, prompt: str, step: int | None, report: Callable[[str], None]
) -> Iterator[Path]:
    """`folder` itself or, where it is a run's, an export of it that lasts as long as the body."""
    if not is_run(folder):
        if step is not None:
            raise UserError(Problem("step", step, "a model of transformers has no steps", "leave it out"))
        if (folder / "tokenizer.json").is_file():
            load_tokenizer(folder).encode(prompt)  # says which symbol is unknown, and where
        yield folder
        return
    run = open_run(folder, report, step)
    tokenizer = run.tokenizer()
    if tokenizer is None:
        rule = "its tokens were prepared elsewhere, and their tokenizer is not known"
        raise UserError(Problem("model", str(folder), rule, "train with tokenizer=FOLDER to have it kept with the run"))
    tokenizer.encode(prompt)
    with tempfile.TemporaryDirectory(prefix="megalite-generate-") as place:
        export_run(run, Path(place) / "model")
        yield Path(place) / "model"


def _encoded(tokenizer: Any, prompt: str) -> list[int]:
    try:
        tokens = [int(token) for token in tokenizer(prompt)["input_ids"]]
    except Exception as error:  # the library raises plain Exception for a symbol that it does not know
        rule = f"the tokenizer cannot encode it ({error})"
        raise UserError(Problem("--prompt", prompt, rule, "use symbols of the training text")) from error
    if not tokens:
        raise UserError(Problem("--prompt", prompt, "the tokenizer makes no token of it", "give a word"))
    return tokens


def _sampled(
    model: Any, tokenizer: Any, tokens: list[int], sampling: Sampling, report: Callable[[str], None]
) -> list[str]:
    known = model.get_input_embeddings().weight.shape[0]
    if max(tokens) >= known:
        rule = f"the tokenizer gives id {max(tokens):,}, and the model knows {known:,} tokens"
        raise UserError(Problem("model", model.name_or_path, rule, "use the tokenizer that the model was trained with"))
    count = _new_tokens(model, tokenizer, len(tokens), sampling.max_new_tokens, report)
    drawing: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        drawing = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k}
        drawing["top_p"] = sampling.top_p
    prompt = torch.tensor([tokens], device=model.device)
    padding = next((it for it in (tokenizer.pad_token_id, tokenizer.eos_token_id) if it is not None), 0)
    torch.manual_seed(sampling.seed)
    with torch.inference_mode():
        rows = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            num_return_sequences=sampling.num_samples,
            pad_token_id=padding,
            **drawing,
        )
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]


def _new_tokens(model: Any, tokenizer: Any, prompt: int, wanted: int | None, report: Callable[[str], None]) -> int:
    """How many tokens to add. Learned positions end where their table does; others go on, beyond what was trained."""
    positions = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    trained = min(positions, tokenizer.model_max_length)  # a table may be longer than the sequences of the training
    count = wanted or (min(NEW_TOKENS, trained - prompt) if prompt < trained else NEW_TOKENS)
    if model.config.model_type == "gpt2" and prompt + count > positions:
        rule = f"the prompt takes {prompt:,} of the model's {positions:,} positions"
        if prompt < positions:
            remedy = f"--max-new-tokens {positions - prompt}, or a shorter prompt"
            raise UserError(Problem("--max-new-tokens", count, rule, remedy))
        raise UserError(Problem("--prompt", NO_VALUE, rule, f"a prompt of at most {positions - 1:,} tokens"))
    if prompt + count > trained:
        report(f"from token {trained:,} on the text is longer than any that the model was trained on")
    return count
