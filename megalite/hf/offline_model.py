"""A folder of transformers as its model and tokenizer: from this machine alone, as data alone.

Nothing is downloaded, no code that comes with a model is run, nothing is unpickled, and no weight that the folder lacks
is drawn at random in silence.
"""

import json
from pathlib import Path
from typing import Any

import torch

from megalite.data.offline import go_offline
from megalite.errors.problems import Problem, UserError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_model(folder: Path, device: torch.device) -> Any:
    """The causal language model in `folder`, in the dtype that it was saved in, ready to generate."""
    go_offline()  # before transformers is imported, which reads it once
    import transformers

    _be_quiet()
    _refuse_remote_code(folder, transformers.CONFIG_MAPPING)
    try:
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype="auto",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # whatever is wrong with a foreign folder
        raise _not_loaded(folder, error) from error
    lacking = sorted({*told["missing_keys"], *(str(one[0]) for one in told["mismatched_keys"])})
    if lacking:
        rule = f"weights are missing or of another shape: {', '.join(lacking[:5])}{', ...' if lacking[5:] else ''}"
        raise UserError(Problem("model", str(folder), rule, "copy or export it again"))
    return model.to(device).eval()


def load_text_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder` as transformers' own class, with whatever it adds to a text."""
    go_offline()
    import transformers

    _be_quiet()
    _refuse_remote_code(folder, transformers.CONFIG_MAPPING)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):  # transformers would make up an empty one
        rule = f"it holds no tokenizer (none of {', '.join(TOKENIZER_FILES)})"
        raise UserError(Problem("model", str(folder), rule, "save the model's tokenizer into it"))
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise _not_loaded(folder, error) from error


def _refuse_remote_code(folder: Path, known: Any) -> None:
    """transformers itself would only say what to type so that the code is run."""
    try:
        found = json.loads((folder / "config.json").read_bytes())
        kind, brings_code = found.get("model_type"), "auto_map" in found
    except (OSError, ValueError, AttributeError) as error:
        raise _not_loaded(folder, error) from error
    if brings_code and kind not in known:
        rule = f"a {kind} model needs the code that comes with it, and such code is never run"
        raise UserError(Problem("model", str(folder), rule, "use a model of a kind that transformers has itself"))


def _be_quiet() -> None:
    """No bars and no advice about what was passed on purpose."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _not_loaded(folder: Path, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    remedy = "name a folder that save_pretrained or scripts/export_hf.py has written, with safetensors"
    return UserError(Problem("model", str(folder), f"transformers cannot load it ({reason})", remedy))
