"""Nothing that nobody uses: settings are read; functions, classes and constants have a use; modules are imported."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from megalite.commands.dispatch import COMMANDS
from megalite.config.layout import STAGE_NAMES
from megalite.config.schema import MoEConfig, MuonConfig
from megalite.config.settings import GROUPS, SETTINGS
from megalite.config.step_plan import HORIZONS
from megalite.hf.families import FAMILIES

ROOT = Path(__file__).parents[1]
MODULES = [
    path for path in sorted((ROOT / "megalite").glob("**/*.py")) if path.name not in ("__init__.py", "__main__.py")
]
SOURCES = [
    ROOT / "pretrain_gpt.py",
    ROOT / "megalite" / "__main__.py",
    *sorted((ROOT / "scripts").glob("*.py")),
    *sorted((ROOT / "benchmarks").glob("*.py")),
    *MODULES,
]
TEMPLATES = sorted((ROOT / "megalite").glob("**/templates/*.html"))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# --- settings --------------------------------------------------------------------------------------------------------

# Rules only judge settings, so a read in config/ counts for nothing, but for these: they turn settings into what others
# work with.
# File: the function, None: all of it.
WORKED_OUT = {"step_plan.py": None, "layout.py": None, "exchange.py": None, "schema.py": "has_experts"}
PASSED_ON = {*STAGE_NAMES.values(), *HORIZONS}  # read by their names, into requests and numbers of samples
SCHEMAS = GROUPS | {"moe": MoEConfig, "muon": MuonConfig}
FIELDS = {  # by setting: what it is a field of ("" is the config), and of which name
    setting.name: (f".{setting.field}".split(".")[-2], setting.field.split(".")[-1]) for setting in SETTINGS.values()
}


def test_every_setting_is_read_where_something_is_done() -> None:
    read = set(PASSED_ON).union(*(settings_read(node) for node in working_code()))
    assert sorted(set(SETTINGS) - read) == [], "settings that nothing reads"


def working_code() -> Iterator[ast.AST]:
    for path in MODULES:
        if path.parent.name != "config":
            yield tree(path)
        elif path.name in WORKED_OUT:
            whole, name = tree(path), WORKED_OUT[path.name]
            yield whole if name is None else dict(definitions(whole))[name]


def settings_read(code: ast.AST) -> set[str]:
    """`train.steps`, whatever the group is called there; `log["wandb_project"]` of settings as plain dictionaries."""
    groups, found = names_of_groups(code), set[str]()
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            field = node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            field = str(node.slice.value)
        else:
            continue
        its = groups[last_name(node.value) or ""]
        found |= {name for name, known in FIELDS.items() if known[1] == field and known[0] in its}
    return found


def names_of_groups(code: ast.AST) -> defaultdict[str, set[str]]:
    """The groups behind each name: `train`, what is assigned from `config.train`, arguments like `its: DataConfig`."""
    schemas = {schema.__name__: group for group, schema in SCHEMAS.items()}
    found = defaultdict(set, {"config": {""}} | {group: {group} for group in SCHEMAS})
    for node in ast.walk(code):
        if isinstance(node, ast.arg) and node.annotation is not None and ast.unparse(node.annotation) in schemas:
            found[node.arg].add(schemas[ast.unparse(node.annotation)])
        elif isinstance(node, ast.Assign):
            for target, value in assignments(node):
                name, group = last_name(target), last_name(value)
                if name and group in SCHEMAS:
                    found[name].add(group)
    return found


def assignments(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def last_name(node: ast.expr) -> str | None:
    """`train` of `train`, `config.train` and `config["train"]`."""
    if isinstance(node, ast.Subscript):
        return str(node.slice.value) if isinstance(node.slice, ast.Constant) else None
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


# --- functions, classes, modules -------------------------------------------------------------------------------------

# What Python, torch or a base class of theirs calls by its name.
CALLED_FROM_OUTSIDE = {
    *("forward", "backward"),  # torch.autograd.Function, nn.Module
    *("readinto", "seekable", "writable"),  # io.RawIOBase
    *("emit", "handleError"),  # logging.Handler
    "find_class",  # pickle.Unpickler
    *("do_GET", "log_message"),  # http.server
    "construct_mapping",  # yaml.SafeLoader
    "manipulate_search_path",  # Hydra's SearchPathPlugin
}
USED_ELSEWHERE = {
    "get_num_layers",  # rank arithmetic for programs of others
}


def test_everything_that_is_defined_is_used() -> None:
    """Used beside its own definition, imports and tests; a page that shows it does not make it used."""
    used = sum((names_in(tree(path)) for path in SOURCES), Counter[str]())
    for path in TEMPLATES:
        used.update(re.findall(r"\w+", " ".join(re.findall(r"{[{%].*?[%}]}", path.read_text(), re.DOTALL))))
    known = CALLED_FROM_OUTSIDE | USED_ELSEWHERE | {function for _, function, _ in COMMANDS.values()}
    unused = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name, node in definitions(tree(path))
        if used[name] == names_in(node)[name] and name not in known
    ]
    assert unused == []


def test_every_module_is_imported() -> None:
    imported = set().union(*(modules_imported(tree(path)) for path in SOURCES))
    imported |= {f"megalite.commands.{module}" for module, *_ in COMMANDS.values()}
    imported |= {family.__module__ for family in FAMILIES.values()}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in MODULES}
    alone = modules - imported
    assert {module for module in alone if not is_started(module)} == set(), "neither imported nor started"


def is_started(module: str) -> bool:
    """Whether a string elsewhere ends with its name, for `python -m`."""
    name = module.rpartition(".")[2]
    return any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(f".{name}")
        for path in SOURCES
        if path.stem != name
        for node in ast.walk(tree(path))
    )


def definitions(module: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Top-level functions, classes and constants, and the methods of classes that Python does not call by itself."""
    assert isinstance(module, ast.Module)
    for node in module.body:
        if isinstance(node, Definition):
            yield node.name, node
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from ((target.id, node) for target in targets if isinstance(target, ast.Name) and target.id != "__all__")
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, Definition) and not inner.name.startswith("__"):
                yield inner.name, inner


def names_in(code: ast.AST) -> Counter[str]:
    """How often each name is said, imports aside."""
    return Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(code)
        if isinstance(node, ast.Name | ast.Attribute)
    )


def modules_imported(module: ast.AST) -> Iterable[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
