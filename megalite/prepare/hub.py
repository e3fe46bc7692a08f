"""Gets data sets and tokenizers by name from the Hugging Face hub, or refuses within seconds.

Without network the libraries retry for 23 s (data sets) to 47 s (tokenizers). So one short request comes first, and
what is not reachable is looked for in the local cache only. Data set scripts and remote code are never run.
"""

import os
import threading
from contextlib import nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from megalite.config.files import private_files
from megalite.errors.problems import Problem, UserError

PATIENCE = 3.0  # seconds for the hub to answer
NO_ANSWER = f"the hub does not answer within {PATIENCE:.0f} s and it is not in the local cache"
TOKENIZER_FILES = [  # all that decide about ids and the end of document
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "config.json", "generation_config.json"),
    *("vocab.*", "merges.txt", "*.model", "*.tiktoken"),
]


@lru_cache(maxsize=1)
def reachable() -> bool:
    """Whether the hub answers within PATIENCE seconds, name resolution included; asked once."""
    # They know the user's proxies and certificates, and refuse where HF_HUB_OFFLINE is set.
    from huggingface_hub import constants, get_session

    def ask() -> None:
        with suppress(Exception):  # of several libraries
            status: int = get_session().head(constants.ENDPOINT, timeout=PATIENCE).status_code
            answers.append(status < 500 and status not in (403, 407))  # a proxy's refusal is no answer of the hub

    answers: list[bool] = []
    thread = threading.Thread(target=ask, daemon=True)  # a resolver may hang
    thread.start()
    thread.join(PATIENCE)
    return answers == [True]


@lru_cache(maxsize=4)  # the shards of one data set come one after the other
def load_dataset(name: str, subset: str | None, split: str, streaming: bool) -> Any:
    """A `datasets` data set, from the hub, its cache, or a local folder."""
    import datasets
    from huggingface_hub import constants

    is_here = os.path.exists(name)
    if offline := not is_here and not reachable():
        os.environ["HF_HUB_OFFLINE"] = "1"  # for worker processes
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    datasets.disable_progress_bars()
    try:
        if not any(Path(name, state).exists() for state in ("state.json", "dataset_dict.json")):
            with private_files() if is_here else nullcontext():  # the library keeps a copy of the text
                return datasets.load_dataset(name, subset, split=split, streaming=streaming)
        saved = datasets.load_from_disk(name)  # what `save_to_disk` wrote
        splits = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or split): saved}
        if subset is not None or split not in splits:
            raise ValueError(f"it was saved with the splits {', '.join(map(str, splits))} and no subsets")
        return splits[split].to_iterable_dataset() if streaming else splits[split]
    except Exception as error:  # the library raises a dozen types, and all are about the user's choice
        reason = (error.__cause__ or error) if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        rule = f"cannot be loaded: {type(reason).__name__}: {reason}".splitlines()[0]
        hint = "check data.subset, data.split, network (scripts are never run); to work offline, a folder of parquet"
        raise UserError(Problem("data.path", name, f"{NO_ANSWER}: {rule}" if offline else rule, hint)) from error


def tokenizer_folder(name: str) -> Path:
    """The folder of that name, or that of a hub tokenizer: from the cache, or downloaded."""
    folder = Path(name).expanduser()
    if os.path.isdir(folder):
        return folder
    from huggingface_hub import snapshot_download

    with suppress(Exception):  # not cached, in whichever way the library says so
        cached = Path(snapshot_download(name, allow_patterns=TOKENIZER_FILES, local_files_only=True))
        if any(cached.glob("tokenizer*")) or any(cached.glob("vocab.*")):
            return cached
    try:
        if not reachable():
            raise OSError(NO_ANSWER)
        return Path(snapshot_download(name, allow_patterns=TOKENIZER_FILES, etag_timeout=PATIENCE))
    except Exception as error:  # unknown, gated, private, no space: the library's own words say which
        rule = f"is no folder here, and as a name on the hub: {error}".splitlines()[0]
        hint = "use bpe, byte, char or a folder that exists; to work offline, one by AutoTokenizer.save_pretrained"
        raise UserError(Problem("tokenizer", name, rule, hint)) from error
