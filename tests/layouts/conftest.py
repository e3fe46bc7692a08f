"""Where the layouts train."""

import json
import random
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A text of short documents, so that loss masks are ragged, and a cache folder."""
    folder = tmp_path_factory.mktemp("layouts")
    dice = random.Random(0)
    lines = [json.dumps({"text": "".join(dice.choices("abcdefgh ", k=dice.randint(1, 30)))}) for _ in range(2000)]
    text = folder / "text.jsonl"
    text.write_text("\n".join(lines))
    for name, alphabet in (("web.jsonl", "uvwxyz"), ("code.jsonl", "()+-")):  # parts of a blend
        rows = (json.dumps({"text": "".join(dice.choices(alphabet, k=dice.randint(1, 30)))}) for _ in range(900))
        text.with_name(name).write_text("\n".join(rows))
    return text, folder / "cache"
