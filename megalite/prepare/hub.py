"""Gets data sets and tokenizers by name from the Hugging Face hub, or refuses within seconds.

Without network the libraries retry for 23 s (data sets) to 47 s (tokenizers). So one short request comes first, and
what is not reachable is looked for in the local cache only. Data set scripts and remote code are never run.
"""

import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from megalite.config.derive import BUILT_IN_TOKENIZERS
from megalite.config.schema import Config
from megalite.data.offline import go_offline
from megalite.errors.problems import Problem, UserError
from megalite.launch.environment import ProcessEnvironment

PATIENCE = 3.0  # seconds for the hub to answer
GRACE = 0.5  # of them at least are waited for when the answer is needed
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
TOKENIZER_FILES = [  # all that decide about ids and the end of document
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
    "generation_config.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
]


SAVED_TO_DISK = ("state.json", "dataset_dict.json")  # in a folder that `Dataset.save_to_disk` wrote


def ask_early(config: Config, environment: ProcessEnvironment) -> None:
    """Ask the hub, if data or tokenizer will be looked for there, while the program still imports what it needs. One
    rank of a node does: the one that prepares the data."""
    data, tokenizer = str(config.data.path), config.tokenizer
    of_data = config.data.source == "hf" and not _is_here(data)
    of_tokenizer = config.data.source != "tokens" and tokenizer not in BUILT_IN_TOKENIZERS
    of_tokenizer = of_tokenizer and not _is_here(tokenizer) and not _hub_cache(_entry("models", tokenizer)).exists()
    if (of_data or of_tokenizer) and not environment.local_rank and not _told_offline():
        _ask(_endpoint())


def _is_here(name: str) -> bool:
    return Path(name).expanduser().exists()


def reachable() -> bool:
    """Whether the hub answers within PATIENCE seconds of being asked, name resolution included."""
    return not _told_offline() and _ask(_endpoint()).there()


class _Question:
    """One request, in a thread of its own: a resolver may hang for longer than we wait."""

    def __init__(self, endpoint: str) -> None:
        self.answers: list[bool] = []
        self.thread = threading.Thread(target=lambda: self.answers.append(_answers(endpoint)), daemon=True)
        self.until = time.monotonic() + PATIENCE
        self.thread.start()

    def there(self) -> bool:
        # Importing large libraries may have left the thread no time to run.
        self.thread.join(max(GRACE, self.until - time.monotonic()))
        return self.answers == [True]


_ask = lru_cache(maxsize=1)(_Question)  # once in a process


def _told_offline() -> bool:
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in OFFLINE)


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def _answers(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=PATIENCE):
            return True
    except urllib.error.HTTPError as error:
        return error.code not in (403, 407) and error.code < 500  # a proxy's refusal is no answer of the hub
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # there, behind a certificate that the hub's library may know
    except (OSError, ValueError):
        return False


@lru_cache(maxsize=4)  # the shards of one data set come one after the other
def load_dataset(name: str, subset: str | None, split: str, streaming: bool) -> Any:
    """A `datasets` data set, from the hub, its cache, or a local folder or file."""
    _require_dataset(name)
    if (file := Path(name).absolute()).is_file() and subset is not None:
        rule = f"data.path names the single file {file.name}, which has no subsets"
        raise UserError(Problem("data.subset", subset, rule, "leave it out, or give the data set's name or folder"))
    import datasets

    datasets.disable_progress_bars()
    try:
        if file.is_file():
            return datasets.load_dataset(str(file.parent), data_files=file.name, split=split, streaming=streaming)
        if any((file / name).exists() for name in SAVED_TO_DISK):
            saved = datasets.load_from_disk(name)
            if subset is not None:
                raise ValueError("a data set that was saved to disk has no subsets: leave data.subset out")
            splits = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or split): saved}
            if split not in splits:
                raise ValueError(f"there is no split {split!r}, but {', '.join(map(str, splits))}")
            found = splits[split]
            return found.to_iterable_dataset() if streaming else found
        return datasets.load_dataset(name, subset, split=split, streaming=streaming)
    except Exception as error:  # the library raises a dozen types, and all are about the user's choice
        rule = f"cannot be loaded ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
        remedy = "check the name, data.subset and data.split; loading scripts are never run (use one in parquet)"
        raise UserError(Problem("data.path", name, rule, remedy)) from error


def _require_dataset(name: str) -> None:
    """Refuse at once what is neither local, nor cached, nor reachable."""
    if _is_here(name):
        return
    cached = _hub_cache(_entry("datasets", name)).exists() or _datasets_cache(name).exists()
    if reachable():
        return
    if not cached:
        rule = f"the hub does not answer within {PATIENCE:.0f} s and the data set is not in the local cache"
        remedy = (
            "check the network; to work offline, download it elsewhere and use data=text data.path=FOLDER "
            "(jsonl, parquet), or copy that machine's Hugging Face cache here (HF_HOME)"
        )
        raise UserError(Problem("data.path", name, rule, remedy))
    go_offline()


def tokenizer_folder(name: str) -> Path:
    """The folder of that name, or that of a hub tokenizer: downloaded, or from the cache."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        rule = "is a file, not a folder" if folder.exists() else "there is no such folder"
        raise UserError(Problem("tokenizer", name, rule, "bpe, byte, char, or a folder that holds tokenizer.json"))
    if not _hub_cache(_entry("models", name)).exists() and not reachable():
        raise _no_tokenizer(name, f"the hub does not answer within {PATIENCE:.0f} s and it is not in the local cache")
    import huggingface_hub

    with suppress(Exception):  # not cached, in whichever way the library says so
        cached = Path(huggingface_hub.snapshot_download(name, allow_patterns=TOKENIZER_FILES, local_files_only=True))
        if any(cached.glob("tokenizer*")) or any(cached.glob("vocab.*")):
            return cached
    if not reachable():
        raise _no_tokenizer(
            name, f"the hub does not answer within {PATIENCE:.0f} s and the local cache lacks its files"
        )
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=TOKENIZER_FILES, etag_timeout=PATIENCE))
    except Exception as error:  # unknown, gated, private, no space: the library's own words say which
        raise _no_tokenizer(name, f"cannot be loaded ({(str(error).splitlines() or [''])[0]})") from error


def _no_tokenizer(name: str, why: str) -> UserError:
    remedy = (
        "use bpe, byte, char or a folder that exists; to work offline, save the tokenizer elsewhere "
        "(AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)) and give tokenizer=FOLDER"
    )
    return UserError(Problem("tokenizer", name, f"is no folder here, and as a name on the hub: {why}", remedy))


def _entry(kind: str, name: str) -> str:
    return f"{kind}--{name.replace('/', '--')}"


def _hub_home() -> Path:
    fallback = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or fallback)


def _hub_cache(entry: str) -> Path:
    return Path(os.environ.get("HF_HUB_CACHE") or _hub_home() / "hub") / entry


def _datasets_cache(name: str) -> Path:
    return Path(os.environ.get("HF_DATASETS_CACHE") or _hub_home() / "datasets") / name.replace("/", "___")
