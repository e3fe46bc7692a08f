"""What a run is called, so that its name says what it is: `tiny-stdlib-lr3e-4-5f0c21aa`.

Model, data, the settings in which the command departs from its presets, and a hash of all that defines the training.
"""

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from megalite.config.settings import SETTINGS
from megalite.errors.words import plain_number

LONGEST = 100
NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._=+-]{{0,{LONGEST - 1}}}")  # a folder of that name works everywhere
SETTINGS_SHOWN = 4
LONGEST_SETTING = 24


def run_name(model: str, data: str, departures: Iterable[tuple[str, Any]], digest: str) -> str:
    """The name, of letters that any file system takes. `departures`: name and value of settings; as many of the first
    are in it as there is room for."""
    words = [word for name, value in departures if (word := _in_one_word(name, value))][:SETTINGS_SHOWN]
    while len(name := "-".join([model, data, *words, digest])) > LONGEST and words:
        words.pop()
    return name


def _in_one_word(name: str, value: Any) -> str:
    """`lr3e-4`, `num_layers12`, `rmsnorm`, `no_bias`; of a path, the name of what it leads to."""
    leaf = SETTINGS[name].leaf
    if isinstance(value, bool) or value is None:
        word = leaf if value else f"no_{leaf}"
    elif isinstance(value, str):
        word = PurePath(value).stem
    else:
        numbers = value if isinstance(value, list) else [value]
        word = leaf + "_".join(plain_number(one) if isinstance(one, float) else str(one) for one in numbers)
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", word).strip("_.-")[:LONGEST_SETTING]
