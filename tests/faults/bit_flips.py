"""Single flipped bits in the files of a checkpoint, and whether a start would notice."""

import random
import shutil
from pathlib import Path

from megalite.checkpoint.reading import inspect
from megalite.launch.context import ParallelContext


def flip(path: Path, dice: random.Random) -> None:
    """Flip one random bit of a file."""
    with path.open("r+b") as file:
        at = dice.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << dice.randrange(8)]))


def fault_of(checkpoint: Path) -> str | None:
    """What a start finds wrong with one checkpoint; None: it is whole."""
    found = inspect(checkpoint, ParallelContext())
    return found if isinstance(found, str) else None


def flip_bits(checkpoint: Path, flips: int, seed: int) -> list[str]:
    """Flip random bits over all files of a copy of a checkpoint, one at a time; those that a start would not notice."""
    dice, unnoticed = random.Random(seed), []
    copy = checkpoint.parent / "flipped" / checkpoint.name
    shutil.copytree(checkpoint, copy)
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    for number in range(flips):
        path = files[number % len(files)]
        content = path.read_bytes()
        flip(path, dice)
        if fault_of(copy) is None:
            unnoticed.append(f"flip {number}, in {path.name}")
        path.write_bytes(content)
    shutil.rmtree(copy.parent)
    return unnoticed
