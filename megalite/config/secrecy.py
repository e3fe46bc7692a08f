"""What looks like a secret: such overrides are refused, because command lines and saved configs are read by others.

Real settings and near misses of them are none; 40 hexadecimal digits only on their own (hashes are in paths).
"""

import re

from megalite.config.settings import SETTINGS
from megalite.errors.problems import Problem
from megalite.errors.words import similarity

ADVICE = "pass secrets in the environment (HF_TOKEN, WANDB_API_KEY), and change one that was typed: logs keep commands"
# In a name of small letters. Short words count where a word of the name ends in them: APIKEY and PGPASS, not KEYBOARD.
_NAME = re.compile(r"token|secret|passw|passphrase|credential|(?:key|pass|pwd|auth|bearer|cookie)s?(?![a-z])")
_HARMLESS = re.compile(r"tokeni[sz][a-z]*|tokens|key_value|^(?:old)?pwd$|compass")
_VALUE = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{30,}|(?:gh[pousr]_|github_pat_|glpat-|wandb_v\d_)[\w-]{16,}"
    r"|sk-(?:(?:proj|ant|or|svcacct)-[\w-]{20,}|[A-Za-z0-9]{20,})"  # OpenAI and others
    r"|xox[a-z]-[\w-]{10,}|A[KS]IA[0-9A-Z]{12,}|AIza[\w-]{30,}|ya29\.[\w-]{20,}"  # Slack, AWS, Google
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,})"  # JSON web token
    r"|://[^/\s:@]+:[^/\s@]+@"  # user:password in an address
    r"|(?:^|[=\[,:\s'\"])[0-9a-fA-F]{40}(?:$|[\],\s'\"}])"  # W&B, old form
)


def secret_problem(name: str) -> Problem:
    """The problem with a setting that holds a secret; its value is not shown."""
    return Problem(name, "(not shown)", "looks like a secret", ADVICE)


def secret_name(name: str) -> bool:
    """Whether a setting of this name would hold a secret. Known settings and slips of them never do."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.lstrip("+~-")).lower()  # accessKeyId
    leaf = name.rpartition(".")[2]
    return bool(_NAME.search(_HARMLESS.sub("", words))) and all(
        similarity(leaf, setting.leaf) < 0.85 for setting in SETTINGS.values()
    )


def secret_value(text: str) -> bool:
    """Whether the text holds something of the form of a known kind of secret."""
    return bool(_VALUE.search(text))


def secret_override(text: str) -> bool:
    """Whether `name=value`, in any form, names or holds a secret; names inside `{name: value}` count too."""
    name, _, value = text.partition("=")
    names = re.findall(r"(?<![\w.-])([\w.-]+)\s*:", value.partition("{")[2])
    return secret_value(text) or any(map(secret_name, (name, *names)))
