"""The house keeps its floors: a room imports only from rooms below it, and torch stays out of what must start fast."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megalite"
FLOORS = [
    {"config", "parallel"},
    {"tensor_parallel", "data"},
    {"model"},
    {"optim", "pipeline"},
    {"checkpoint", "hf"},
    {"train"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def imported_rooms(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name.split(".")[1] for name in names if name.startswith("megalite.")}


@pytest.mark.parametrize("room", sorted(FLOOR_OF))
def test_rooms_import_only_from_below(room: str) -> None:
    for path in (PACKAGE / room).glob("**/*.py"):
        for other in imported_rooms(path) - {room}:
            allowed = FLOOR_OF[other] < FLOOR_OF[room] or FLOOR_OF[other] == FLOOR_OF[room] == 0
            assert allowed, f"{path.relative_to(PACKAGE)} imports from {other}"


def test_every_room_has_a_floor() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(FLOOR_OF)


@pytest.mark.parametrize(
    "module",
    [
        "megalite.config.compose",
        "megalite.model.parameters",
        *(f"megalite.pipeline.{name}" for name in ("checker", "painter", "recording", "rehearsal", "schedules")),
        *(f"megalite.optim.{name}" for name in ("buffer_layout", "buffer_table", "memory", "rank_buffers")),
        *(f"megalite.parallel.{name}" for name in ("environment", "groups", "layout_rules", "stages", "tables")),
    ],
)
def test_arithmetic_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
