"""The house keeps its floors: a room imports only from rooms below it, and torch stays out of what must start fast."""

import ast
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, MutableSequence, MutableSet, Sequence, Set
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megalite"
FLOORS = [
    {"errors", "layout"},
    {"config", "launch", "kernels"},
    {"tensor_parallel", "data", "checkpoint"},
    {"context_parallel", "moe"},
    {"model"},
    {"optim", "pipeline"},
    {"train"},
    {"prepare", "hf", "observe", "verify", "plan"},
    {"commands"},
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
            allowed = FLOOR_OF[other] < FLOOR_OF[room]
            assert allowed, f"{path.relative_to(PACKAGE)} imports from {other}"


def test_every_room_has_a_floor() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(FLOOR_OF)


@pytest.mark.parametrize(
    "module",
    [
        "megalite.config.compose",
        "megalite.model.parameters",
        *(f"megalite.pipeline.{name}" for name in ("checker", "schedules")),
        *(f"megalite.optim.{name}" for name in ("memory", "rank_buffers")),
        "megalite.layout.summary",
        *(f"megalite.layout.{name}" for name in ("buffer_layout", "groups", "ranks", "stages")),
        "megalite.launch.environment",
        *(f"megalite.plan.{name}" for name in ("buffers_table", "ranks_table", "recording", "schedule_picture")),
    ],
)
def test_arithmetic_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CHANGING = {*dir(MutableMapping), *dir(MutableSequence), *dir(MutableSet)} - {*dir(Mapping), *dir(Sequence), *dir(Set)}


def test_an_assert_does_nothing() -> None:
    """`python -O` leaves it out. Only what built-in types and torch call a change by its name is seen here."""
    scripts = [
        PACKAGE.parent / "pretrain_gpt.py",
        *PACKAGE.parent.glob("scripts/*.py"),
        *PACKAGE.parent.glob("benchmarks/*.py"),
    ]
    for path in [*scripts, *PACKAGE.glob("**/*.py")]:
        for each in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)):
            acting = [ast.unparse(node) for node in ast.walk(each) if acts(node)]
            assert not acting, f"{path.name}:{each.lineno}"


def acts(node: ast.AST) -> bool:
    if isinstance(node, ast.NamedExpr) or not isinstance(node, ast.Call):
        return isinstance(node, ast.NamedExpr)
    name = ast.unparse(node.func).rpartition(".")[2]
    return name in {*CHANGING, "next", "sort"} or (name.endswith("_") and not name.startswith("_"))
