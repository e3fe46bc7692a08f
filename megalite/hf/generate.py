"""Text from a saved model, sampled by transformers: what its users will get, and so a check of the export, too.

A folder of transformers is loaded from this machine alone and as data alone: nothing is downloaded, no code that comes
with a model is run, nothing is unpickled, and no weight that the folder lacks is drawn at random in silence.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.config.user_files import read_object
from megalite.data.offline import go_offline
from megalite.data.tokenizers import load_tokenizer
from megalite.errors.problems import NO_VALUE, Problem, UserError
from megalite.hf.export import export_checkpoint
from megalite.hf.saved_model import is_run, open_model

NEW_TOKENS = 100  # where nobody says how many
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


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
        wanted = self.max_new_tokens
        for name, value, good, rule in (
            ("--max-new-tokens", wanted, wanted is None or wanted >= 1, "at least 1"),
            ("--temperature", self.temperature, 0 <= self.temperature < float("inf"), "at least 0 (likeliest token)"),
            ("--top-k", self.top_k, self.top_k >= 0, "at least 0 (all tokens)"),
            ("--top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1 (all tokens)"),
            ("--num-samples", self.num_samples, self.num_samples >= 1, "at least 1"),
        ):
            if not good:
                yield Problem(name, value, f"must be {rule}", f"leave it out, or {name} 1")
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
    with _as_transformers_folder(folder, step, report) as loadable:
        if (loadable / "tokenizer.json").is_file():
            load_tokenizer(loadable).encode(prompt)  # says which symbol is unknown, and where
        tokenizer = load_text_tokenizer(loadable)
        model = load_model(loadable, device)
    return _sampled(model, tokenizer, prompt, sampling, report)


@contextmanager
def _as_transformers_folder(folder: Path, step: int | None, report: Callable[[str], None]) -> Iterator[Path]:
    """`folder` itself or, where it is a run's, an export of it that lasts as long as the body."""
    if not is_run(folder, step):
        yield folder
        return
    model = open_model(folder, report, step)
    if model.tokenizer is None:
        rule = "its tokens were prepared elsewhere, and their tokenizer is not known"
        raise UserError(Problem("model", str(folder), rule, "train with tokenizer=FOLDER to have it kept with the run"))
    with tempfile.TemporaryDirectory(prefix="megalite-generate-") as place:
        export_checkpoint(model, Path(place) / "model")
        yield Path(place) / "model"


def load_model(folder: Path, device: torch.device) -> Any:
    """The causal language model in `folder`, in the dtype that it was saved in, ready to generate."""
    with _loading(folder) as transformers:
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype="auto",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    if lacking := sorted({*told["missing_keys"], *(str(one[0]) for one in told["mismatched_keys"])}):
        rule = f"weights are missing or of another shape: {', '.join(lacking[:5])}{', ...' if lacking[5:] else ''}"
        raise UserError(Problem("model", str(folder), rule, "copy or export it again"))
    return model.to(device).eval()


def load_text_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder` as transformers' own class, with whatever it adds to a text."""
    with _loading(folder) as transformers:
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):  # transformers would make up an empty one
            rule = f"it holds no tokenizer (none of {', '.join(TOKENIZER_FILES)})"
            raise UserError(Problem("model", str(folder), rule, "save the model's tokenizer into it"))
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


@contextmanager
def _loading(folder: Path) -> Iterator[Any]:
    """transformers, offline and quiet, for a folder that needs no code of its own. Whatever is wrong with a foreign
    folder is a UserError."""
    go_offline()  # before transformers is imported, which reads it once
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    about = read_object(folder / "config.json")
    if "auto_map" in about and about.get("model_type") not in transformers.CONFIG_MAPPING:
        rule = f"a {about.get('model_type')} model needs the code that comes with it, and such code is never run"
        raise UserError(Problem("model", str(folder), rule, "use a model of a kind that transformers has itself"))
    try:
        yield transformers
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = "name a folder that save_pretrained or scripts/export_hf.py has written, with safetensors"
        raise UserError(Problem("model", str(folder), f"transformers cannot load it ({reason})", remedy)) from error


def _sampled(model: Any, tokenizer: Any, prompt: str, sampling: Sampling, report: Callable[[str], None]) -> list[str]:
    try:
        tokens = torch.tensor([tokenizer(prompt)["input_ids"]], dtype=torch.int64, device=model.device)
    except Exception as error:  # the library raises plain Exception for a symbol that it does not know
        rule = f"the tokenizer cannot encode it ({error})"
        raise UserError(Problem("--prompt", prompt, rule, "use symbols of the training text")) from error
    known = model.get_input_embeddings().weight.shape[0]
    if not tokens.numel() or int(tokens.max()) >= known:
        rule = f"the tokenizer gives the ids {tokens.tolist()[0]}, and the model knows those below {known:,}"
        remedy = "another prompt, or the tokenizer that the model was trained with"
        raise UserError(Problem("--prompt", prompt, rule, remedy))
    count = _new_tokens(model, tokenizer, tokens.numel(), sampling.max_new_tokens, report)
    drawing: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        drawing = {"do_sample": True, "temperature": sampling.temperature}
        drawing |= {"top_k": sampling.top_k, "top_p": sampling.top_p}
    padding = next((it for it in (tokenizer.pad_token_id, tokenizer.eos_token_id) if it is not None), 0)
    torch.manual_seed(sampling.seed)
    with torch.inference_mode():
        rows = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
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
        remedy = f"at most {max(1, positions - prompt)}, with a prompt of at most {positions - 1:,} tokens"
        raise UserError(Problem("--max-new-tokens", NO_VALUE if wanted is None else wanted, rule, remedy))
    if prompt + count > trained:
        report(f"from token {trained:,} on the text is longer than any that the model was trained on")
    return count
