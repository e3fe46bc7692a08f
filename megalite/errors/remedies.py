"""What mends a failure of the system, and the word that was most likely meant."""

import errno
from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

OF_THE_MACHINE = {  # failures of the system that have nothing to do with a place on disk, and what mends them
    errno.EMFILE: "raise the limit of open files (ulimit -n 65536) and start again",
    errno.ENOMEM: "free some memory and start again",
}
CAUSES = OF_THE_MACHINE | {
    errno.ENOSPC: "free some space or, where df -i shows none, some files of that disk",
    errno.EDQUOT: "delete some files of this user's, whose quota there is used up, or have it raised",
    errno.EIO: "the disk, or the network to it, fails (see dmesg): start again once it works",
    errno.ESTALE: "the network's disk was mounted anew: start again",
    errno.EROFS: "mount that disk for writing",
    errno.EACCES: "allow this user to read and write there (ls -l shows who may)",
    errno.EPERM: "allow this user to read and write there (ls -l and lsattr show who may)",
}


def of_system(error: OSError, otherwise: str) -> str:
    """What mends a failure of the system, by its cause; `otherwise` where the cause says nothing."""
    return CAUSES.get(error.errno or 0, otherwise)


def similarity(one: str, other: str) -> float:
    """1 for equal words, 0 for words that share nothing."""
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()


def nearest(word: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The candidate spelled most like `word`, or None where none is near."""
    found = get_close_matches(word, list(candidates), n=1, cutoff=cutoff)
    return found[0] if found else None
