"""The files that benchmarks write."""

import json
from pathlib import Path
from typing import Any

from megalite.config.files import Kind, write_atomically

MARK = rb'\{\n  "hardware": "|\[\n  \{\n    "model": "[\w.]+",\n    "(precision|layer)": '
FIGURES = Kind("figures of a benchmark", "speed.json", MARK)


def write_figures(path: Path, figures: Any) -> None:
    """Write what JSON can hold; another benchmark's file of figures is replaced, no other file is."""
    write_atomically(path, json.dumps(figures, indent=2).encode(), FIGURES)
