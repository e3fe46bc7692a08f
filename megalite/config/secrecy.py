"""What looks like a secret: such overrides are refused, because command lines and saved configs are read by others.

The finding never holds the secret itself. Names of real settings (`tokenizer`, `model.num_key_value_heads`) and near
misses of them are no secrets; 40 hexadecimal digits are one only on their own (paths of the hub's cache hold hashes).
"""

import re

from megalite.config.settings import SETTINGS
from megalite.config.suggest import similarity

HIDDEN = "(not shown)"
ADVICE = (
    "pass secrets in the environment (HF_TOKEN, WANDB_API_KEY) or by the service's own login command; "
    "if this one was real, change it: shells and job logs keep command lines"
)

_NAME = re.compile(r"token|key|secret|passw|credential", re.IGNORECASE)
_HARMLESS = re.compile(r"tokeni[sz]\w*|tokens|key_value", re.IGNORECASE)
_VALUE = re.compile(
    r"""(?<![A-Za-z0-9])(?:
        hf_[A-Za-z0-9]{16,}                             # Hugging Face
      | hf_(?=\w*[0-9])(?=\w*[A-Z])[A-Za-z0-9]{8,}      # the same, cut short
      | sk-[A-Za-z0-9_-]{12,}                           # OpenAI and others
      | gh[pousr]_[A-Za-z0-9]{16,} | github_pat_\w{16,} # GitHub
      | AKIA[0-9A-Z]{12,}                               # AWS
      | wandb_v\d_\w{16,}                               # Weights & Biases, new form
    )
    | ://[^/\s:@]+:[^/\s@]+@                            # user:password in an address
    """,
    re.VERBOSE,
)
_ALONE = re.compile(r"""(?:^|[=\[,:\s'"])[0-9a-fA-F]{40}(?:$|[\],\s'"}])""")  # Weights & Biases, old form


def secret_name(name: str) -> bool:
    """Whether a setting of this name would hold a secret. Known settings and slips of them never do."""
    name = name.lstrip("+~-")
    if name in SETTINGS or not _NAME.search(_HARMLESS.sub("", name)):
        return False
    leaf = name.rpartition(".")[2]
    return all(similarity(leaf, setting.leaf) < 0.85 for setting in SETTINGS.values())


def secret_value(text: str) -> bool:
    """Whether the text holds something of the form of a known kind of secret."""
    return bool(_VALUE.search(text) or _ALONE.search(text))


def secret_override(text: str) -> bool:
    """Whether `name=value`, in any form, names or holds a secret; names inside `{name: value}` count too."""
    if secret_value(text):
        return True
    names = [text.partition("=")[0], *re.findall(r"([\w.-]+)\s*:", text.partition("=")[2])]
    return any(secret_name(name) for name in names)
