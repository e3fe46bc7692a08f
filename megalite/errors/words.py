"""How numbers, values and failures of the system are written for people, and which word was most likely meant."""

import errno
import re
from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

CAUSES = {  # failures of the system, and what mends them
    errno.EMFILE: "raise the limit of open files (ulimit -n 65536) and start again",
    errno.ENOMEM: "free some memory and start again",
    errno.ENOSPC: "free some space or, where df -i shows none, some files of that disk",
    errno.EDQUOT: "delete some files of this user's, whose quota there is used up, or have it raised",
    errno.EIO: "the disk, or the network to it, fails (see dmesg): start again once it works",
    errno.ESTALE: "the network's disk was mounted anew: start again",
    errno.EROFS: "mount that disk for writing",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "allow this user to read and write there (see ls -l and lsattr)"),
}


def of_system(error: OSError, otherwise: str) -> str:
    """What mends a failure of the system, by its cause; `otherwise` where the cause says nothing."""
    return CAUSES.get(error.errno or 0, otherwise)


def similarity(one: str, other: str) -> float:
    """1 for equal words, 0 for words that share nothing."""
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()


def nearest(word: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The candidate spelled most like `word`, or None where none is near."""
    return next(iter(get_close_matches(word, list(candidates), n=1, cutoff=cutoff)), None)


def rounded(value: float) -> float:
    """The number without the digits that computing has blurred: 3e-05 for 2.9999999999999997e-05."""
    return float(f"{value:.12g}")


def plain(value: object) -> str:
    """A setting as one writes it: 3e-4, 0.1, [1,2], null."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(plain, value))}]"
    if not isinstance(value, float):
        return str(value)
    text = f"{value:.11e}" if 0 < abs(value) < 0.001 or abs(value) >= 1e15 else f"{value:.12g}"
    return re.sub(r"\.?0*e(-?)\+?0*", r"e\1", text)


def several(number: float, what: str) -> str:
    """1 layer, 12 layers, 2 batches, 0.5 epochs."""
    text = f"{number:,}" if isinstance(number, int) else f"{number:.3g}"
    return f"{text} {what}{'' if text == '1' else 'es' if what.endswith('tch') else 's'}"
