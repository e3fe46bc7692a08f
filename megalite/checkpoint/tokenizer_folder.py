"""A run's folder `tokenizer`: what its token ids mean, as transformers reads it.

It appears as a whole. Every checkpoint tells the hash of each of its files, so that damage is found wherever they are
read; a start of the run, which knows the tokenizer from its data, mends it.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from megalite.checkpoint.manifest import digest
from megalite.config.durable_files import draft_of, sync_folder, write_new
from megalite.config.user_files import read_bytes
from megalite.errors.problems import Problem, UserError

TOKENIZER = "tokenizer"
MEND = "start the run again, which writes it anew, or copy it from the run's first place"


def keep_tokenizer(run_dir: Path, files: Mapping[str, bytes], known: Mapping[str, str]) -> dict[str, str]:
    """Write the folder unless it is there and as it should be; the hash of each file. `known`: as the checkpoint that
    the run continues from tells them, which another version of a library may have written."""
    expected = {name: digest(content) for name, content in files.items()}
    if known and not _fault(run_dir, known):
        return dict(known)
    if _fault(run_dir, expected):
        try:
            _write(run_dir, files)
        except OSError as error:
            rule = f"its folder {TOKENIZER} cannot be written: {error.strerror}"
            raise UserError(Problem("run_dir", str(run_dir), rule, "a folder where you may write")) from error
    return expected


def check_tokenizer(run_dir: Path, known: Mapping[str, str]) -> None:
    """UserError unless every file is as the checkpoint tells it."""
    if fault := _fault(run_dir, known):
        raise fault


def _fault(run_dir: Path, known: Mapping[str, str]) -> UserError | None:
    for name, expected in known.items():
        path = run_dir / TOKENIZER / name
        try:
            found = digest(read_bytes(path, MEND, follow_links=False))
        except UserError as error:
            return error
        if found != expected:
            rule = f"{path} is not what the run has written: it hashes to {found[:8]}, not {expected[:8]}"
            return UserError(Problem(TOKENIZER, str(run_dir / TOKENIZER), rule, MEND))
    return None


def _write(run_dir: Path, files: Mapping[str, bytes]) -> None:
    folder = run_dir / TOKENIZER
    for left in run_dir.glob(f".{TOKENIZER}.tmp-*"):  # by a start that was killed here
        shutil.rmtree(left)
    draft = draft_of(folder)
    draft.mkdir()
    for name, content in files.items():
        write_new(draft / name, content)
    sync_folder(draft)
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)
    os.rename(draft, folder)
    sync_folder(run_dir)
