"""A run's folder `tokenizer`: what its token ids mean, as transformers reads it.

Every checkpoint holds the hash of each file, so that damage is found wherever the files are read. A start of the run,
which knows the tokenizer from its data, mends them.
"""

from collections.abc import Mapping
from pathlib import Path

from megalite.checkpoint.manifest import digest
from megalite.config.durable_files import write_atomically
from megalite.config.user_files import read_bytes
from megalite.errors.problems import Problem, UserError, collect

TOKENIZER = "tokenizer"
MEND = "start the run again, which writes it anew, or copy it from the run's first place"


def keep_tokenizer(run_dir: Path, files: Mapping[str, bytes], known: Mapping[str, str]) -> dict[str, str]:
    """Write the files unless they are there and as they should be; the hash of each. `known`: the hashes in the
    checkpoint from which the run continues, whose files another version of a library may have written."""
    folder, hashes = run_dir / TOKENIZER, {name: digest(content) for name, content in files.items()}
    if known and _is_whole(run_dir, known):
        return dict(known)
    if not _is_whole(run_dir, hashes):
        try:
            if folder.is_symlink():
                folder.unlink()
            folder.mkdir(exist_ok=True)
            for name, content in files.items():
                write_atomically(folder / name, content)
        except OSError as error:
            rule = f"its folder {TOKENIZER} cannot be written: {error.strerror}"
            remedy = "move away what is in its place, or set another run_dir"
            raise UserError(Problem("run_dir", str(run_dir), rule, remedy)) from error
    return hashes


def check_tokenizer(run_dir: Path, known: Mapping[str, str]) -> None:
    """UserError unless every file has the hash that the checkpoint holds."""
    for name, expected in known.items():
        path = run_dir / TOKENIZER / name
        if digest(read_bytes(path, MEND, follow_links=False)) != expected:
            raise UserError(Problem(TOKENIZER, str(path), "is not what the run has written", MEND))


def _is_whole(run_dir: Path, known: Mapping[str, str]) -> bool:
    problems: list[Problem] = []
    collect(lambda: check_tokenizer(run_dir, known), problems)
    return not problems
