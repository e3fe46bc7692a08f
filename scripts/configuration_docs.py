"""Writes (--write) or checks (--check) what users read about the settings: the defaults in conf/ and the tables of
docs/configuration.md, from megalite/config/schema.py."""

import argparse
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megalite.config.settings import EXPERIMENT, GROUPS, SETTINGS, yaml_value  # noqa: E402

GENERATED = "written by `scripts/configuration_docs.py --write` from megalite/config/schema.py"
WHOLE = f"# This file is {GENERATED}."
REST_OF_FILE = f"# The rest of this file is {GENERATED}.\n"
REST_OF_PAGE = f"<!-- The rest of this page is {GENERATED}. -->\n"


def generated_files(root: Path = ROOT) -> dict[Path, str]:
    """Every generated file of the repository and the text it must have."""
    conf, page = root / "conf", root / "docs" / "configuration.md"
    files = {conf / "config.yaml": _head(conf / "config.yaml", REST_OF_FILE) + _yaml("")}
    for group in GROUPS:
        files[conf / group / "default.yaml"] = f"{WHOLE}\n{_comment(_summary(group))}\n\n{_yaml(group)}"
    parts = [_presets(conf, EXPERIMENT), f"## The run itself\n\n{_table('')}"]
    for group in GROUPS:
        parts += [f"## `{group}`", _summary(group), _presets(conf, group), _table(group)]
    files[page] = _head(page, REST_OF_PAGE) + "\n\n".join(filter(None, parts)) + "\n"
    return files


def _head(path: Path, mark: str) -> str:
    """The text that is written by hand, up to the mark."""
    head, found, _ = path.read_text(encoding="utf-8").partition(mark)
    assert found, f"{path} lost its line {mark!r}"
    return f"{head}{mark}\n"


def _yaml(group: str) -> str:
    """Every key of a group with its default, under a comment with its meaning and what it may be."""
    found, outer = [], ""
    for setting in (setting for setting in SETTINGS.values() if setting.group == group):
        within, _, key = setting.leaf.rpartition(".")
        text = f"{_comment(f'{setting.meaning} ({setting.words})')}\n{key}: {yaml_value(setting.default)}\n"
        found += [f"{within}:"] if within != outer else []
        found.append(textwrap.indent(text, "  ") if within else text)
        outer = within
    return "\n".join(found)


def _comment(text: str) -> str:
    return "\n".join(f"# {line}" for line in textwrap.wrap(text, 118, break_on_hyphens=False))


def _summary(group: str) -> str:
    """The docstring of a group's dataclass, in one line."""
    return " ".join((GROUPS[group].__doc__ or "").split())


def _presets(conf: Path, group: str) -> str:
    """A list of the hand-written files of a group, with what each says of itself behind what it says to Hydra."""
    listed = []
    for path in sorted(path for path in (conf / group).glob("*.yaml") if path.stem != "default"):
        lines = path.read_text(encoding="utf-8").splitlines()
        about = next(line.lstrip("# ") for line in lines if not line.startswith("# @"))
        listed.append(f"- `{group}={path.stem}`: {about}")
    return "\n".join(listed)


def _table(group: str) -> str:
    rows = ["| setting | default | may be | meaning |", "| --- | --- | --- | --- |"]
    for setting in SETTINGS.values():
        if setting.group == group:
            # In a cell, neither a column nor a tag may begin.
            words = f"{setting.words}\n{setting.meaning}".replace("|", "\\|").replace("<", "\\<").split("\n")
            cells = [f"`{setting.name}`", f"`{yaml_value(setting.default)}`", *words]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="bring the files up to date")
    action.add_argument("--check", action="store_true", help="exit 1 if a file is not up to date")
    write = parser.parse_args().write
    files = generated_files()
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
        print(f"{'written' if write else 'not up to date'}: {path.relative_to(ROOT)}")
    return 0 if write or not stale else 1


if __name__ == "__main__":
    sys.exit(main())
