"""Every remedy that a refusal prints is followed: what it says starts, or is refused for another reason.

Nothing here knows how remedies are found: mistakes are made on the command line, in the folder of a run or in a recipe,
and what is printed is read as a user reads it.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import HealthCheck, given
from hypothesis import settings as sampling
from hypothesis import strategies as st

from megalite.config.compose import load_config
from megalite.config.settings import DERIVED, GROUPS, SETTINGS, Setting, as_plain
from megalite.errors.problems import Problem, UserError

Way = list[str]  # words of a command line; `world size=N` among them
VALUE = r"(?:'[^']*'|\[[^]]*\]|[^\s,;'\[?]+)"
ASSIGNED = re.compile(rf"(--[a-z-]+|world size|(?<![\w.])[a-z_]+(?:\.[a-z_]+)*)=({VALUE}(?: or {VALUE})*)")
WORLD = "world size="


def ways_of(remedy: str) -> Iterator[Way]:
    """Alternatives stand between `, or `; what one of them names belongs together. NAME, VALUE and N are left to the
    reader."""
    for alternative in remedy.split(", or "):
        found = [(name, values.split(" or ")) for name, values in ASSIGNED.findall(alternative)]
        found = [(name, [one for one in values if not one.isupper()]) for name, values in found]
        for values in product(*(values for _, values in found)) if found else ():
            yield [f"{name}={unquoted(value)}" for (name, _), value in zip(found, values, strict=True)]


def unquoted(value: str) -> str:
    """As a shell hands it over: of '"a|b"' the inner quotes are Hydra's."""
    return value[1:-1] if re.fullmatch(r"'\".*\"'", value) else value


def key(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def kind(problem: Problem) -> tuple[str, str]:
    """The setting and the rule, whatever the numbers in it are."""
    return problem.setting, re.sub(r"=\S+|'[^']*'|\[[^]]*\]|[\d,.]+", "#", problem.rule)


def problems_of(words: list[str], world: int) -> list[Problem]:
    try:
        load_config(words, world)
    except UserError as error:
        return error.problems
    return []


def changed(words: list[str], world: int, problem: Problem, way: Way) -> tuple[list[str], int]:
    """The command as it is typed next: what is no setting, or stands otherwise in the remedy, is replaced."""
    own = {key(word) for word in way} | ({problem.setting} - SETTINGS.keys())
    kept = [word for word in words if key(word) not in own and word.lstrip("-") not in way]
    sizes = [int(word.removeprefix(WORLD)) for word in way if word.startswith(WORLD)]
    return [*kept, *(word for word in way if not word.startswith(WORLD))], sizes[0] if sizes else world


def follow(words: list[str], world: int) -> int:
    """Follows each way out of each problem by itself; how many there were."""
    followed = 0
    for problem in problems_of(words, world):
        for way in ways_of(problem.hint):
            after = problems_of(*changed(words, world, problem, way))
            assert kind(problem) not in map(kind, after), f"{problem}\nfollowed: {way}\n{words}\n{after}"
            unfit = [one for one in after if one.rule.startswith("must be ") and one.setting in map(key, way)]
            assert not unfit, f"{problem}\nfollowed: {way}\n{words}\n{unfit}"
            followed += 1
    return followed


# --- one setting -----------------------------------------------------------------------------------------------------


def mistakes(setting: Setting) -> list[str]:
    """Values of each kind that the setting cannot have, or hardly, the same kind at the same place."""
    beyond = [f"{limit + step}" for limit in setting.limits.values() for step in (-1, 0, 1)] + ["0", "-1", "-7.0"]
    huge = ["9" * 30, "1e60", "1e-60", "0.9999999999", "nan", "inf"]
    kinds = ["abc", "1.5", "null", "[]", "[1,2,3]", "[x]", "[null]", "true", "2", "???", "${nope}", "''", "x y"]
    slips = [choice[1:] + "x" for choice in setting.choices] or ["3.0"]
    return [*kinds, *huge, *slips, *beyond]


ROUNDS = max(len(mistakes(setting)) for setting in SETTINGS.values())


@pytest.mark.parametrize("number", range(ROUNDS))
def test_the_remedy_of_a_setting_s_own_mistake(number: int) -> None:
    """All settings have a mistake of one kind, and all follow what is told of them."""
    words = [f"{name}={(values := mistakes(one))[number % len(values)]}" for name, one in SETTINGS.items()]
    found, own = problems_of(words, 1), dict[str, list[str]]()
    for problem in found:
        for way in ways_of(problem.hint):
            if len(way) == 1 and key(way[0]) == problem.setting in SETTINGS:
                own.setdefault(problem.setting, []).append(way[0])
    for at in range(max(map(len, own.values()))):
        mended = {name: ways[at] for name, ways in own.items() if at < len(ways)}
        after = problems_of([mended.get(key(word), word) for word in words], 1)
        left = {kind(problem) for problem in found if problem.setting in mended} & {*map(kind, after)}
        assert not left, [(mended[name], rule) for name, rule in left]


# --- names -----------------------------------------------------------------------------------------------------------


NAMES = st.sampled_from(sorted({*SETTINGS, *GROUPS}))
VALUES = st.sampled_from(["3", "0.5", "-1", "true", "null", "a", "/dir/a b", "[1,2]", "fp32", "gpt2", "x=y", "byte"])


@st.composite
def slip(draw: st.DrawFn) -> str:
    """A word that is nearly right."""
    name, value = draw(NAMES), draw(VALUES)
    at = draw(st.integers(0, len(name) - 1))
    group = draw(st.sampled_from([*GROUPS, "", "foo"]))
    leaf = name.rpartition(".")[2]
    wrong = [f"{name[:at]}{name[at + 1 :]}", f"{name[:at]}x{name[at:]}", f"{group}.{leaf}", leaf, f"--{name}", name]
    return f"{draw(st.sampled_from(wrong))}={value}"


@given(slip())
@sampling(max_examples=15, deadline=None)
def test_the_remedy_of_a_name_s_slip(word: str) -> None:
    follow([word], 1)


# --- several settings ------------------------------------------------------------------------------------------------


SMALL = st.sampled_from(["1", "2", "3", "4", "6", "7", "8", "16", "250"])
LISTS = {"data.path": ["a.txt", "[a,b]"], "data.weights": ["[1,2]", "[1]", "[1e308,1e-308]"]}
LISTS |= {"train.batch_ramp": ["[2,2,9]", "[4,4,100]", "[3]"], "optimizer.betas": ["[0.9]", "[0.995,0.99]", "[0,0.5]"]}
LISTS |= {"train.recompute_modules": ["[moe]", "[norm,norm]"], "model.vocab_size": ["300", "5000"]}
LISTS |= {
    "train.skip_steps": ["[3]", "[900]"],
    "train.profile_steps": ["[3]", "[900,2]"],
    "tokenizer": ["byte", "char"],
}
LISTS |= {"parallel.order": ["tp-dp", "cp-tp-ep-dp-pp"], "parallel.pipeline_layout": ["'Ett|ttL'", "'E|t*4|L'"]}
FREE = ("run_dir", "run_name", "checkpoint.init_from", "parallel.nccl_options", "data.cache_dir", "launch.status_file")
PRESETS = ["model=gpt2", "model=llama3_8b", "model=tiny_moe", "data=text", "data=hf", "data=tokens"]


@st.composite
def words(draw: st.DrawFn) -> list[str]:
    """Values that each setting may have by itself."""
    found = draw(st.lists(st.sampled_from(PRESETS), max_size=2, unique_by=key))
    likely = [name for name in SETTINGS if name.startswith(("parallel", "model", "train", "optimizer", "lr", "data"))]
    for name in draw(st.lists(st.sampled_from([name for name in likely if name not in FREE]), min_size=2, max_size=6)):
        setting = SETTINGS[name]
        if name in LISTS:
            value = draw(st.sampled_from(LISTS[name]))
        elif setting.choices:
            value = draw(st.sampled_from(setting.choices))
        elif setting.kind is bool:
            value = draw(st.sampled_from(["true", "false"]))
        elif setting.kind is float:
            value = draw(st.sampled_from(["0.5", "2.0", "1e-5", "1e-46", "0"]))
        elif setting.kind is int:
            value = draw(SMALL)
        else:
            continue
        found.append(f"{name}={value}")
    return found


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("launch")
    monkeypatch.chdir(path)
    return path


SEVERAL = sampling(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SEVERAL
@given(words(), st.sampled_from([1, 2, 4, 6, 8]))
def test_the_remedy_of_what_several_settings_break_together(folder: Path, words: list[str], world: int) -> None:
    follow(words, world)


@SEVERAL
@given(words(), words(), st.sampled_from([1, 2, 4]), st.booleans())
def test_the_remedy_where_a_run_or_a_recipe_gives_the_rest(
    folder: Path, before: list[str], words: list[str], world: int, recipe: bool
) -> None:
    shutil.rmtree(folder / "run", ignore_errors=True)
    with suppress(UserError):
        config = load_config([*before, "run_dir=run"], world)
        (folder / "run").mkdir()
        (folder / "run" / "run.json").write_text("{}")
        (folder / "run" / "config.yaml").write_text(yaml.safe_dump(as_plain(config) | {DERIVED: list(config.derived)}))
        follow([*(["-cd", "run"] if recipe else ["run_dir=run"]), *words], world)
