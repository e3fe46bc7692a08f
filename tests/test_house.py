"""The house keeps its floors: a room imports only from rooms below it, and torch stays out of what must start fast."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, MutableSet, Sequence, Set
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megalite"
FLOORS = [
    {"errors", "layout"},
    {"hf.families"},  # data that settings are read with, too
    {"config", "launch", "kernels"},
    {"tensor_parallel", "data", "checkpoint"},
    {"context_parallel", "moe"},
    {"model"},
    {"optim", "pipeline"},
    {"train"},
    {"prepare"},
    {"hf", "verify", "plan"},
    {"observe"},
    {"commands"},
]
# Lines of .py files; docstrings, comments and blank lines count. A change that needs more raises a number and says why.
BUDGET = {
    "the package": 24_600,
    "what train.run imports": 15_900,  # imports inside of functions included
    "a file": 400,
    "a function": 60,
}
GENITIVES = re.compile(r"(?:^|[.:?!]\s+)(?:Of|By|Those|As|So many|None of|Nor)\b")
LONGER = {  # functions that are allowed more
    "TrainStep.__call__": 105,
}
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def imported_names(path: Path) -> set[str]:
    """What a file imports anywhere; of `from a import b` both `a` and `a.b`, which may be a module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name for name in names if name.startswith("megalite.")}


def imported_rooms(path: Path) -> set[str]:
    inside = [name.removeprefix("megalite.") for name in imported_names(path)]
    return {
        next((room for room in FLOOR_OF if "." in room and name.startswith(room)), name.split(".")[0])
        for name in inside
    } - {"__version__"}


@pytest.mark.parametrize("room", sorted(FLOOR_OF))
def test_rooms_import_only_from_below(room: str) -> None:
    for path in PACKAGE.joinpath(*room.split(".")).glob("**/*.py"):
        for other in imported_rooms(path) - {room}:
            allowed = FLOOR_OF[other] < FLOOR_OF[room]
            assert allowed, f"{path.relative_to(PACKAGE)} imports from {other}"


def test_every_room_has_a_floor() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == {
        room for room in FLOOR_OF if "." not in room
    }


@pytest.mark.parametrize(
    "module",
    [
        "megalite.config.compose",
        "megalite.hf.families",
        "megalite.model.parameters",
        *(f"megalite.pipeline.{name}" for name in ("checker", "schedules")),
        *(f"megalite.optim.{name}" for name in ("groups", "rank_buffers")),
        *(f"megalite.layout.{name}" for name in ("buffer_layout", "ranks", "stages")),
        "megalite.launch.environment",
        *(f"megalite.plan.{name}" for name in ("buffers_table", "gpu_memory", "ranks", "timeline")),
    ],
)
def test_arithmetic_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def closure(module: str) -> set[Path]:
    """The files that importing `module` may load at any time, packages' own ones included."""
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        place = PACKAGE.parent / waiting.pop().replace(".", "/")
        path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if path.is_file() and path not in found:
            found.add(path)
            waiting += imported_names(path)
    return found


def test_the_package_keeps_its_budget() -> None:
    assert sum(map(lines, PACKAGE.glob("**/*.py"))) <= BUDGET["the package"]
    assert sum(map(lines, closure("megalite.train.run"))) <= BUDGET["what train.run imports"]


def test_files_and_functions_are_short() -> None:
    for path in PACKAGE.glob("**/*.py"):
        assert lines(path) <= BUDGET["a file"], path
        for name, length in functions(ast.parse(path.read_text())):
            assert length <= LONGER.get(name, BUDGET["a function"]), f"{path.relative_to(PACKAGE)}: {name}"


def test_sentences_have_subjects() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    folders = (PACKAGE, *(PACKAGE.parent / name for name in ("benchmarks", "scripts")))
    trees = [ast.parse(path.read_text()) for folder in folders for path in folder.glob("**/*.py")]
    documented = [node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
    texts = [" ".join((ast.get_docstring(node) or "").split()) for node in documented]
    assert [text for text in texts if GENITIVES.search(text)] == []


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The functions and methods of a module, and their lines."""
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for each in inner:
            if isinstance(each, ast.FunctionDef) and each.end_lineno is not None:
                yield prefix + each.name, each.end_lineno - each.lineno + 1


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
