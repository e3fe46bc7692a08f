"""How long a run is can be said in five ways, of which one counts: the command's, else that of a folder or file."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from megalite.config.arguments import read_arguments
from megalite.config.compose import load_config, show_information
from megalite.config.schema import Config
from megalite.config.settings import DERIVED, as_plain, value_of
from megalite.config.step_plan import HORIZONS
from tests.config.refusal import refusal, settings

SMALL = ("train.global_batch_size=4", "train.seq_length=16")
GIVEN = {
    "train.steps": "7",
    "train.tokens": "640",
    "train.tokens_per_parameter": "20",
    "train.flops": "1e19",
    "train.epochs": "2",
}


def horizons(config: Config) -> dict[str, object]:
    """Those that are not null and were given."""
    values = {name: value_of(config, name) for name in HORIZONS if name not in config.derived}
    return {name: value for name, value in values.items() if value is not None}


def keep(config: Config, folder: Path) -> None:
    """The folder of a run, as far as a command reads it."""
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    derived = [name for name in config.derived if value_of(config, name) is not None]
    (folder / "config.yaml").write_text(yaml.safe_dump(as_plain(config) | {DERIVED: derived}))


def test_tokens_are_resolved_with_what_follows_from_steps() -> None:
    config = load_config([*SMALL, "train.tokens=64K", "lr.schedule=wsd"], 1)
    assert (config.train.steps, config.lr.warmup_steps, config.lr.decay_steps) == (1000, 100, 200)
    assert {"train.steps", "lr.warmup_steps", "lr.decay_steps"} <= {*config.derived}
    ramp = ["train.batch_ramp=[2,2,8]", "train.global_batch_size=4", "train.seq_length=16"]
    assert load_config([*ramp, "train.tokens=192"], 1).train.steps == 5, "2, 2, 2, 2 and 4 sequences"


@pytest.mark.parametrize("name", ["train.tokens_per_parameter", "train.flops", "train.epochs"])
def test_what_depends_on_model_and_data_stays_open(name: str) -> None:
    config = load_config([f"{name}={GIVEN[name]}"], 1)
    assert (config.train.steps, config.lr.warmup_steps, config.lr.decay_steps) == (None, None, None)
    assert horizons(config) == {name: float(GIVEN[name])}


def test_without_any_there_are_200_steps() -> None:
    assert load_config([], 1).train.steps == load_config(["train.steps=null"], 1).train.steps == 200


@pytest.mark.parametrize(
    "names",
    [("train.steps", "train.tokens"), ("train.tokens", "train.epochs"), HORIZONS],
    ids=lambda names: "-".join(name.removeprefix("train.") for name in names),
)
def test_several_contradict_each_other(names: Sequence[str]) -> None:
    error = refusal(*(f"{name}={GIVEN[name]}" for name in names))
    assert settings(error) == [*names[1:]]
    assert all(name in str(error) for name in names)
    assert all(f"fix: {name}=null" in str(error) for name in names[1:])


@pytest.mark.parametrize("name", HORIZONS)
@pytest.mark.parametrize("before", HORIZONS)
def test_the_command_counts_more_than_a_run_and_a_recipe(
    name: str, before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keep(load_config([*SMALL, f"{before}={GIVEN[before]}", "run_dir=run"], 1), tmp_path / "run")
    assert horizons(load_config(["run_dir=run"], 1)) == {before: float(GIVEN[before])}
    recipe = ["--config-dir", "run", "--config-name", "config", "run_dir=other"]
    assert horizons(load_config(recipe, 1)) == {before: float(GIVEN[before])}
    for words in (["run_dir=run"], recipe):
        config = load_config([*words, f"{name}={GIVEN[name]}"], 1)
        assert horizons(config) == {name: float(GIVEN[name])}
    assert config.train.global_batch_size == 4, "all else is the recipe's"


def test_the_command_counts_more_than_files_and_the_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "train").mkdir(parents=True)
    (tmp_path / "own" / "train" / "default.yaml").write_text("steps: 50\n")
    own = ["--config-dir", "own"]
    assert load_config(own, 1).train.steps == 50
    assert horizons(load_config([*own, "train.epochs=2"], 1)) == {"train.epochs": 2.0}
    recipe = ["experiment=shakespeare_char", "data.path=text.txt"]
    assert horizons(load_config([*recipe, "train.tokens=10M"], 1)) == {"train.tokens": 10**7}
    keep(load_config([*SMALL, "train.tokens=640", "run_dir=run"], 1), tmp_path / "run")
    assert horizons(load_config([*own, "run_dir=run"], 1)) == {"train.tokens": 640}
    assert horizons(load_config([*own, "run_dir=run", "train.steps=3"], 1)) == {"train.steps": 3}
    assert show_information(read_arguments([*recipe, "train.epochs=2", "--cfg", "job"])) == 0
    shown = yaml.safe_load(capsys.readouterr().out)["train"]
    assert (shown["steps"], shown["epochs"]) == (None, 2)


def test_a_run_has_one_folder_however_long_it_is() -> None:
    names = {load_config([f"{name}={value}"], 1).run_name for name, value in GIVEN.items()}
    assert names == {load_config([], 1).run_name}


REFUSED = [
    ("train.tokens=0", "must be at least 1", "train.tokens=20B"),
    ("train.tokens=2X", "must be a whole number or null", "train.tokens=20B"),
    ("train.epochs=0", "must be above 0", "train.epochs=2"),
    ("train.flops=1e31", "must be above 0, at most 1e+30", "train.flops=1e19"),
    ("train.tokens=1e18", "takes 488,281,250,000,000 steps, more than 99,999,999", "train.tokens=20B"),
    ("train.tokens=64 lr.warmup_steps=3", "above 1, the steps of train.tokens=64", "lr.warmup_steps=0 or 1 or null"),
    ("train.tokens=64 lr.schedule=wsd lr.decay_steps=3", "longer than the run, train.tokens=64", "lr.decay_steps="),
    ("train.tokens=640 lr.warmup_tokens=641", "above 10, the steps of train.tokens=640", "lr.warmup_tokens="),
    ("train.steps=10 lr.schedule=wsd lr.decay_tokens=641", "longer than the run, train.steps=10", "lr.decay_tokens="),
    ("lr.warmup_steps=3 lr.warmup_tokens=64", "contradicts lr.warmup_steps=3", "lr.warmup_tokens=null"),
    ("lr.schedule=wsd lr.decay_steps=3 lr.decay_tokens=64", "contradicts lr.decay_steps=3", "lr.decay_tokens=null"),
    (
        "train.eval_interval=5 train.eval_interval_tokens=2K",
        "contradicts train.eval_interval=5",
        "train.eval_interval=100",
    ),
    (
        "checkpoint.interval=0 checkpoint.interval_tokens=2K",
        "contradicts checkpoint.interval=0",
        "checkpoint.interval=100",
    ),
    ("train.tokens=640 train.skip_steps=[11]", "from 1 to 10, the steps of train.tokens=640", "train.skip_steps="),
]


@pytest.mark.parametrize(("words", "rule", "hint"), REFUSED, ids=[words for words, *_ in REFUSED])
def test_what_does_not_fit_is_refused(words: str, rule: str, hint: str) -> None:
    batch = () if "1e18" in words else SMALL
    (problem,) = refusal(*batch, *words.split()).problems
    assert problem.setting == words.split()[-1].partition("=")[0]
    assert rule in problem.rule
    assert hint in problem.hint or "1e18" in words


def test_warm_up_and_decay_in_tokens_are_steps_of_the_run() -> None:
    words = [*SMALL, "train.steps=100", "lr.schedule=wsd", "lr.warmup_tokens=0.65K", "lr.decay_tokens=1281"]
    config = load_config(words, 1)
    assert (config.lr.warmup_steps, config.lr.decay_steps) == (11, 21)
    assert {"lr.warmup_steps", "lr.decay_steps"} <= {*config.derived}


def test_intervals_in_tokens_replace_those_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = ["experiment=shakespeare_char", "data.path=text.txt"]
    config = load_config([*recipe, "train.eval_interval_tokens=1M", "lr.warmup_tokens=1M"], 1)
    assert load_config(recipe, 1).train.eval_interval != 100
    assert (config.train.eval_interval, config.train.eval_interval_tokens) == (100, 10**6)
    assert config.lr.warmup_steps == -(-(10**6) // (config.train.global_batch_size * config.train.seq_length))
    monkeypatch.chdir(tmp_path)
    keep(load_config(["checkpoint.interval_tokens=2K", "run_dir=run"], 1), tmp_path / "run")
    again = load_config(["run_dir=run", "checkpoint.interval=7"], 1).checkpoint
    assert (again.interval, again.interval_tokens) == (7, None)
