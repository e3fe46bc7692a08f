"""Text from a saved model, sampled by transformers: what its users will get, and so a check of the export, too.

A folder of transformers is loaded from this machine alone and as data alone: nothing is downloaded, no code that comes
with a model is run, nothing is unpickled, and no weight that the folder lacks is drawn at random in silence.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megalite.data.offline import go_offline
from megalite.data.tokenizers import load_tokenizer
from megalite.errors.problems import NO_VALUE, Problem, UserError
from megalite.hf.export import export_checkpoint
from megalite.hf.saved_model import is_run, open_model

NEW_TOKENS = 100  # where nobody says how many
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def generate(
    folder: Path,
    prompt: str,
    device: torch.device,
    report: Callable[[str], None],
    *,
    step: int | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    num_samples: int = 1,
    seed: int = 0,
) -> list[str]:
    """The prompt with what follows it, `num_samples` times.

    `folder` is a run's (of which `step` picks a checkpoint) or one of transformers. `report` is told what is worth
    knowing but no mistake. `temperature` 0 takes the likeliest token; `top_k` 0 and `top_p` 1 leave none out. The same
    seed gives the same text on the same machine.
    """
    if not prompt:
        raise UserError(Problem("--prompt", prompt, "there is nothing to continue", "--prompt 'Once upon a time'"))
    with _as_transformers_folder(folder, step, report) as loadable:
        if (loadable / "tokenizer.json").is_file():
            load_tokenizer(loadable).encode(prompt)  # says which symbol is unknown, and where
        tokenizer = load_text_tokenizer(loadable)
        model = load_model(loadable, device)
    tokens = torch.tensor([tokenizer(prompt)["input_ids"]], dtype=torch.int64, device=device)
    embeddings = model.get_input_embeddings().num_embeddings
    if not tokens.numel() or int(tokens.max()) >= embeddings:  # on a GPU this would end the process
        rule = f"its tokens are {tokens.tolist()[0]!s:.60}, and the model knows those below {embeddings:,}"
        raise UserError(Problem("--prompt", prompt, rule, "give the tokenizer that the model was trained with"))
    count = _new_tokens(model, tokenizer, tokens.numel(), max_new_tokens, report)
    drawing = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    padding = next((it for it in (tokenizer.pad_token_id, tokenizer.eos_token_id) if it is not None), 0)
    torch.manual_seed(seed)
    try:
        with torch.inference_mode():
            rows = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=count,
                num_return_sequences=num_samples,
                pad_token_id=padding,
                **({"do_sample": False} if temperature == 0 else drawing),
            )
    except ValueError as error:  # options that contradict each other
        remedy = "leave options out"
        raise UserError(Problem("generating", NO_VALUE, f"transformers cannot: {error}", remedy)) from error
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]


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
        if lacking := sorted(told["missing_keys"]):
            raise ValueError(f"weights are missing: {', '.join(lacking[:5])}")
    return model.to(device).eval()


def load_text_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder` as transformers' own class, with whatever it adds to a text."""
    with _loading(folder) as transformers:
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):  # transformers would make up an empty one
            raise ValueError(f"it holds no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


@contextmanager
def _loading(folder: Path) -> Iterator[Any]:
    """transformers, offline and quiet. Whatever is wrong with a foreign folder is a UserError."""
    go_offline()  # before transformers is imported, which reads it once
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield transformers
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = "name a folder as save_pretrained writes it, with safetensors and tokenizer; code in it is never run"
        raise UserError(Problem("model", str(folder), f"transformers cannot load it ({reason})", remedy)) from error


def _new_tokens(model: Any, tokenizer: Any, prompt: int, wanted: int | None, report: Callable[[str], None]) -> int:
    """How many tokens to add. Learned positions end where their table does; others go on, beyond what was trained."""
    positions = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    trained = min(positions, tokenizer.model_max_length)  # a table may be longer than the sequences of the training
    room = trained - prompt if prompt < trained else NEW_TOKENS
    count = min(NEW_TOKENS, room) if wanted is None else wanted
    if model.config.model_type == "gpt2" and prompt + count > positions:
        rule = f"the prompt takes {prompt:,} of the model's {positions:,} positions"
        remedy = f"at most {max(1, positions - prompt)}, with a prompt of at most {positions - 1:,} tokens"
        raise UserError(Problem("--max-new-tokens", NO_VALUE if wanted is None else wanted, rule, remedy))
    if prompt + count > trained:
        report(f"from token {trained:,} on the text is longer than any that the model was trained on")
    return count
