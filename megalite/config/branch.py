"""A run that branches off another (checkpoint.branch_from): up to a step its settings are the other's, as the phases
before its own. What the command changes then, is its own phase.

So a branch is a run that could have been planned so from the start, and its own folder alone says all when it goes on.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megalite.config.files import absolute, read_yaml
from megalite.config.phases import UNTIL, ends_of, may_change
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, leaves, value_of, with_values
from megalite.errors.problems import Problem, UserError, several

BRANCH = "checkpoint.branch_from"
EXAMPLE = f"{BRANCH}=runs/base@step-12000"
_PLACE = re.compile(r"(?P<run>.+?)(?:@(?:step-)?(?P<step>\d{1,8}))?")


def place_of(text: str) -> tuple[Path, int]:
    """Folder of the run and step that a branch begins with: the newest where none is named; 0 where there is none."""
    found = _PLACE.fullmatch(text)
    run = Path(absolute(found["run"] if found else text))
    return run, int(found["step"]) if found and found["step"] else max(_steps(run), default=0)


def _steps(run: Path) -> list[int]:
    """The steps of which a run has checkpoints."""
    return sorted(int(path.name[5:]) for path in run.glob("checkpoints/step-????????") if path.name[5:].isdigit())


def checkpoint_of(text: str) -> tuple[Path, int]:
    """`place_of`, with a UserError where there is no such checkpoint."""
    (run, step), there = place_of(text), _steps(place_of(text)[0])
    if step not in there:
        words = f"no checkpoint of step {step}" if there else "no checkpoint of a run"
        steps = f"checkpoints are there of {several(len(there), 'step')}: {', '.join(map(str, there[-9:]))}"
        raise UserError(Problem(BRANCH, text, f"there is {words} in {run}", steps if there else EXAMPLE))
    return run, step


def settings_of(run: Path) -> dict[str, Any]:
    """All settings in a run's config.yaml, derived ones too."""
    saved = read_yaml(run / "config.yaml", "give the folder of a run")
    return {name: value for name, value in leaves(saved).items() if name in SETTINGS}


def branched(config: Config, named: Collection[str], own: Path | None) -> Config:
    """The config of a branch, from that of its command, which names these settings: what a phase may change becomes the
    branch's own phase. `own`: its folder, where it goes on. UserError where it names phases, or another run."""
    text = config.checkpoint.branch_from
    if text is None:
        return config
    if own is None:
        run, step = checkpoint_of(text)
        place: Any = f"{run}@step-{step}"
        saved = settings_of(run)
        before, last = _phases_until(saved, step), dict[str, Any]()
    else:
        saved = settings_of(own)
        place, phases = saved.get(BRANCH), saved.get("phases") or [{}]
        before, last = phases[:-1], phases[-1]
        if place is None or (text != place and place_of(text) != place_of(place)):
            rule = f"the run in {own} " + (f"branches off {place}" if place else "is no branch")
            raise UserError(Problem(BRANCH, text, rule, "another run_dir for a new branch"))
    if "phases" in named and config.phases != [*before, last]:
        rule, hint = "a branch has those of its run, and one of its own", "give what changes as settings: lr.min_lr=0"
        raise UserError(Problem("phases", config.phases, rule, hint))
    kept = {name: saved.get(name, SETTINGS[name].default) for name in SETTINGS if may_change(name)}
    changes = {name: value_of(config, name) for name in named if name in kept and value_of(config, name) != kept[name]}
    # Derived numbers of the rates' schedule are those of the run, whose length may be another.
    base = {name: value for name, value in kept.items() if name in named or name.startswith("lr.")}
    return with_values(config, base | {BRANCH: place, "phases": [*before, last | changes]})


def _phases_until(saved: Mapping[str, Any], step: int) -> list[dict[str, Any]]:
    """The phases of a run with these settings that have begun before `step`, which ends the last of them."""
    found, begin = list[dict[str, Any]](), 0
    run = with_values(Config(), saved)
    for phase, end in zip(run.phases or [{}], ends_of(run) or [step], strict=True):
        if begin < step:
            found.append({UNTIL: float(min(end, step)), **{name: phase[name] for name in phase if name != UNTIL}})
        begin = end
    return found
