"""A run's folder `tokenizer`: what its token ids mean, as transformers reads it.

Every checkpoint tells the hash of each of its files, so that damage is found wherever they are read; a start of the
run, which knows the tokenizer from its data, mends it.
"""

from collections.abc import Mapping
from pathlib import Path

from megalite.checkpoint.manifest import digest
from megalite.config.durable_files import write_atomically
from megalite.config.user_files import read_bytes
from megalite.errors.problems import Problem, UserError

TOKENIZER = "tokenizer"
MEND = "start the run again, which writes it anew, or copy it from the run's first place"


def keep_tokenizer(run_dir: Path, files: Mapping[str, bytes], known: Mapping[str, str]) -> dict[str, str]:
    """Write the files unless they are there and as they should be; the hash of each. `known`: as the checkpoint that
    the run continues from tells them, which another version of a library may have written."""
    folder, expected = run_dir / TOKENIZER, {name: digest(content) for name, content in files.items()}
    if known and not _fault(run_dir, known):
        return dict(known)
    if _fault(run_dir, expected):
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
    return expected


def check_tokenizer(run_dir: Path, known: Mapping[str, str]) -> None:
    """UserError unless every file is as the checkpoint tells it."""
    if fault := _fault(run_dir, known):
        raise fault


def _fault(run_dir: Path, known: Mapping[str, str]) -> UserError | None:
    for name, expected in known.items():
        path = run_dir / TOKENIZER / name
        try:
            if digest(read_bytes(path, MEND, follow_links=False)) != expected:
                return UserError(Problem(TOKENIZER, str(path), "is not what the run has written", MEND))
        except UserError as error:
            return error
    return None
