"""Writes what users read about the settings from the schema: the defaults in conf/ and docs/configuration.md.

The schema is the single source; `stale_files` says which written file no longer agrees with it.
"""

import textwrap
from pathlib import Path

from megalite.config.settings import EXPERIMENT, GROUPS, SETTINGS, Setting, yaml_value

GENERATED = (
    "# Written by `scripts/configuration_docs.py --write` from megalite/config/schema.py; edit the schema instead."
)
RUN_SETTINGS_MARK = "# The rest of this file is written by `scripts/configuration_docs.py --write` from the schema.\n"
COMMENT_WIDTH = 118


def allowed(setting: Setting) -> str:
    """Type, choices and bounds in words."""
    if setting.choices:
        return " | ".join((*setting.choices, "null") if setting.nullable else setting.choices)
    return ", ".join(words for words in (setting.type_words.removeprefix("a "), setting.limit_words) if words)


def yaml_entries(group: str) -> str:
    """Every key of a group with its default, under a comment with its meaning and what it may be."""
    entries = []
    for setting in SETTINGS.values():
        if setting.group == group:
            comment = _comment(f"{setting.meaning} ({allowed(setting)})")
            entries.append(f"{comment}\n{setting.leaf}: {yaml_value(setting.default)}\n")
    return "\n".join(entries)


def group_file(group: str) -> str:
    """The text of conf/GROUP/default.yaml."""
    return f"{GENERATED}\n{_comment(summary(group))}\n\n{yaml_entries(group)}"


def _comment(text: str) -> str:
    return "\n".join(f"# {line}" for line in textwrap.wrap(text, COMMENT_WIDTH, break_on_hyphens=False))


def summary(group: str) -> str:
    """The docstring of a group's dataclass, in one line."""
    return " ".join((GROUPS[group].__doc__ or "").split())


def presets(conf: Path, group: str) -> dict[str, str]:
    """Name and first comment of the hand-written files of a group, by name."""
    files = [path for path in (conf / group).glob("*.yaml") if path.stem != "default"]
    return {path.stem: _first_words(path) for path in sorted(files)}


def _first_words(path: Path) -> str:
    """What a file says of itself, behind what it says to Hydra (`# @package ...`)."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(line.lstrip("# ") for line in lines if not line.startswith("# @"))


def _listed(group: str, found: dict[str, str]) -> str:
    return "\n".join(f"- `{group}={name}`: {about}" for name, about in found.items())


def _escaped(text: str) -> str:
    """Text for a cell of a table: neither a column nor a tag begins in it."""
    return text.replace("|", "\\|").replace("<", "\\<")


def _table(group: str) -> str:
    rows = ["| setting | default | may be | meaning |", "| --- | --- | --- | --- |"]
    for setting in SETTINGS.values():
        if setting.group == group:
            words = (_escaped(allowed(setting)), _escaped(setting.meaning))
            rows.append("| " + " | ".join((f"`{setting.name}`", f"`{yaml_value(setting.default)}`", *words)) + " |")
    return "\n".join(rows)


def markdown(conf: Path) -> str:
    """The text of docs/configuration.md."""
    recipes = _listed(EXPERIMENT, presets(conf, EXPERIMENT))
    parts = [INTRODUCTION, f"{EXPERIMENTS}\n\n{recipes}", f"## The run itself\n\n{_table('')}"]
    for group in GROUPS:
        listed = _listed(group, presets(conf, group))
        parts.append("\n\n".join(part for part in (f"## `{group}`", summary(group), listed, _table(group)) if part))
    return "\n\n".join([*parts, EXIT_STATUSES]) + "\n"


def generated_files(root: Path) -> dict[Path, str]:
    """Every generated file of the repository and the text it must have."""
    conf = root / "conf"
    head, mark, _ = (conf / "config.yaml").read_text(encoding="utf-8").partition(RUN_SETTINGS_MARK)
    assert mark, f"conf/config.yaml lost its line {RUN_SETTINGS_MARK!r}"
    files = {conf / group / "default.yaml": group_file(group) for group in GROUPS}
    files[conf / "config.yaml"] = f"{head}{mark}\n{yaml_entries('')}"
    files[root / "docs" / "configuration.md"] = markdown(conf)
    return files


def stale_files(root: Path) -> list[Path]:
    """The generated files that do not say what the schema says."""
    files = generated_files(root)
    return [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]


def write_files(root: Path) -> None:
    """Brings every generated file up to date."""
    for path, text in generated_files(root).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


INTRODUCTION = f"""\
<!-- {GENERATED.lstrip("# ")} -->
# Configuration

Every setting has a default, so `python pretrain_gpt.py` alone runs. Settings are overridden on the command line, as
[Hydra](https://hydra.cc) reads it:

```bash
python pretrain_gpt.py model=gpt2 model.dropout=0.1 train.steps=1000 'data.path=[a.txt,b.txt]' data=text
```

- `group=NAME` picks a file of `conf/group/`, `group.setting=value` sets one value; the last of several wins.
- `null` means "derived"; the meaning says from what. Lists are written `[1,2]`, and need quotes in most shells.
- Relative paths start at the folder where the command is given; the run keeps them as absolute ones.
- `--cfg job` prints the composed settings, `--info defaults` says where each comes from, `--help` is a summary.
- A config is refused before anything starts or is written, with every problem and what would work in one message.
- Secrets are never settings: pass them in the environment (`HF_TOKEN`, `WANDB_API_KEY`). `${{oc.env:NAME}}` is
  refused where NAME sounds like one.
- A training on CPUs that certainly needs more memory than the machine has is refused at once.
- `experiment=NAME` picks a whole recipe. For presets and recipes of your own, `--config-dir FOLDER` adds a folder like
  `conf/`: `model=mine` is `FOLDER/model/mine.yaml`. `hydra.searchpath=[FOLDER]` does the same.
- `eval "$(python pretrain_gpt.py --shell-completion install=bash)"` completes names and values by Tab.
- Other settings of Hydra (`hydra.job.name`, `hydra.verbose`) have no effect here, and are refused.

The default run folder is `runs/<run_name>`, and the default name `<model.name>-<data>-<settings>-<hash>`, for example
`tiny-stdlib-lr3e-4-5f0c21aa`. The hash covers what defines the training (model, data, tokenizer, seed, optimizer,
schedule as given, global batch and its ramp, sequence length, start weights) and nothing else. Of these, the settings
are the first four to which the command gives another value than the files that it chooses. So the same command
continues its run, on any number of processes and with more steps. `run_name=NAME` gives a name of your own."""

EXPERIMENTS = """\
## Experiments

A recipe sets whatever it needs in any group; what the command line says counts more. The head of its file says on how
many processes it runs, how its data is prepared and what to expect ([training.md](training.md#experiments))."""

EXIT_STATUSES = """\
## Exit statuses

| status | meaning |
| --- | --- |
| 0 | finished, or stopped on request after saving |
| 2 | configuration or input refused: one message; nothing is written, but what was trained before is saved |
| 130 | interrupted before training started |
| other | a failure, with the failing rank and cause named; torchrun ends with 1 whenever a process fails |"""
