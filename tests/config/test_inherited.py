"""A run goes on from its folder alone, start weights bring their model's shape, and the command counts more."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from megalite.config.arguments import read_arguments
from megalite.config.compose import load_config, show_information
from megalite.config.overrides import CONF, as_override
from megalite.config.schema import Config
from megalite.config.settings import DERIVED, as_plain
from tests.config.refusal import refusal, settings

GIVEN = (
    "model=gpt2",
    "model.dropout=0.25",
    "optimizer.lr=2e-4",
    "train.steps=50",
    "data=text",
    "data.path=[a b.txt,'1']",
)
MODEL = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "head_dim": 10}
WEIGHTS = MODEL | {"intermediate_size": 40, "vocab_size": 53}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that was started with GIVEN, as far as a command reads it."""
    monkeypatch.chdir(tmp_path)
    config = load_config([*GIVEN, "run_dir=run"], 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    written = as_plain(config) | {DERIVED: list(config.derived)}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(written))
    return tmp_path / "run"


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps(WEIGHTS))
    (tmp_path / "weights" / "tokenizer.json").write_text("{}")
    return tmp_path / "weights"


def same(one: Config, other: Config) -> bool:
    return as_plain(one) == as_plain(other)


def test_a_scheduler_s_file_and_time_are_of_one_start(run: Path) -> None:
    saved = yaml.safe_load((run / "config.yaml").read_text())
    saved["launch"]["status_file"], saved["train"]["max_minutes"] = "/nowhere/7.status", 30.0
    (run / "config.yaml").write_text(yaml.safe_dump(saved))
    found = load_config(["run_dir=run"], 1)
    assert (found.train.steps, found.launch.status_file, found.train.max_minutes) == (50, None, None)


def test_the_folder_alone_gives_the_run_wherever_the_command_is_given(
    run: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_config([*GIVEN, f"run_dir={run}"], 1)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert same(load_config([f"run_dir={run}"], 1), before)


def test_what_the_command_says_counts_more_and_what_was_derived_is_derived_again(run: Path) -> None:
    longer = load_config([f"run_dir={run}", "train.steps=2000", "optimizer.lr=1e-3", "++model.dropout=0.0"], 1)
    expected = load_config([*GIVEN, f"run_dir={run}", "train.steps=2000", "optimizer.lr=1e-3", "model.dropout=0.0"], 1)
    assert same(longer, expected)
    assert (longer.lr.warmup_steps, longer.lr.min_lr) == (100, 1e-4)


def test_the_folder_counts_more_than_what_conf_says_since(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(CONF, "conf")
    preset = Path("conf/optimizer/default.yaml")
    preset.write_text(re.sub(r"(?m)^clip_grad: .*", "clip_grad: 0.5", preset.read_text()))
    monkeypatch.setattr("megalite.config.overrides.CONF", Path("conf").absolute())
    assert load_config(["run_dir=new"], 1).optimizer.clip_grad == 0.5
    assert load_config(["run_dir=run"], 1).optimizer.clip_grad == 1.0


@pytest.mark.parametrize(
    "words", [[*GIVEN], ["experiment=shakespeare_char", "data.path=a"], ["model=tiny", "data=stdlib"]]
)
def test_a_group_that_the_command_chooses_is_all_its_own(run: Path, words: list[str]) -> None:
    anew, continued = load_config([*words, "run_dir=new"], 1), load_config([*words, "run_dir=run"], 1)
    chosen = ("model", "data") if "experiment" not in words[0] else ("model", "data", "train", "optimizer", "lr")
    assert {name: as_plain(anew)[name] for name in chosen} == {name: as_plain(continued)[name] for name in chosen}


RECIPES = ["-cp run", "-cd run", "-cd . -cn run/config", "-cp copies -cn mine.yaml"]


@pytest.mark.parametrize("flags", RECIPES)
@pytest.mark.parametrize("words", [[], ["model.dropout=0.5", "train.steps=2000"], ["model=tiny", "data=stdlib"]])
def test_the_config_of_a_run_is_a_recipe_under_any_name(run: Path, flags: str, words: list[str]) -> None:
    shutil.copytree(run, "copies")
    Path("copies/config.yaml").rename("copies/mine.yaml")
    found = load_config([*flags.split(), *words, "run_dir=new"], 1)
    given = [word for word in GIVEN if not (words and words[0] == "model=tiny" and word.startswith(("model", "data")))]
    expected = load_config([*given, *words, "run_dir=new"], 1)
    assert same(found, expected)
    assert found.told[0].startswith(f"from {Path.cwd()}/")
    assert load_config([*flags.split(), *words], 1).run_dir != str(run), "a recipe does not say where"


def test_a_slip_in_a_recipe_is_refused(run: Path) -> None:
    (run / "config.yaml").write_text("derived: []\ntrain: {step: 3}\nmodle: {bias: true}\n")
    assert settings(refusal("-cd", "run")) == ["train.step", "modle.bias"]


def test_what_hydra_shows_of_a_recipe_is_what_is_trained(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    show_information(read_arguments(["-cd", "run", "train.steps=7", "--cfg", "job"]))
    shown = yaml.safe_load(capfd.readouterr().out)
    assert (shown["model"]["num_layers"], shown["model"]["dropout"], shown["train"]["steps"]) == (12, 0.25, 7)


def test_the_user_s_own_files_come_before_those_of_the_same_name(tmp_path: Path) -> None:
    shutil.copytree(CONF, tmp_path / "own")
    own = tmp_path / "own" / "config.yaml"
    own.write_text(own.read_text().replace("seed: 1234", "seed: 5"))
    (tmp_path / "own" / "model" / "tiny.yaml").write_text("defaults: [default, _self_]\nnum_layers: 3\n")
    config = load_config(["--config-dir", str(tmp_path / "own")], 1)
    assert (config.seed, config.model.num_layers) == (5, 3)


def test_a_config_of_the_user_s_own_takes_nothing_and_a_folder_without_a_run_gives_nothing(run: Path) -> None:
    config = load_config(["--config-path", str(CONF), "run_dir=run"], 1)
    assert (config.train.steps, config.model.dropout, config.told) == (200, 0.0, ())
    for file in run.iterdir():
        file.unlink()
    assert load_config(["run_dir=run"], 1).model.name == "tiny"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: [", ["cannot be read"]),
        ("derived: 3", ["holds no settings"]),
        ("train: {steps: -1}", ["train.steps=-1"]),
        ("data: {path: [[a]]}", ["data.path="]),
    ],
)
def test_a_config_that_was_spoilt_is_refused(run: Path, content: str, words: list[str]) -> None:
    (run / "config.yaml").write_text(content)
    message = str(refusal("run_dir=run"))
    assert all(word in message for word in words), message


def test_start_weights_bring_their_tokenizer_unless_another_one_is_named(weights: Path, run: Path) -> None:
    words, recipes = [f"checkpoint.init_from={weights}"], weights.parent / "mine" / "experiment"
    recipes.mkdir(parents=True)
    (recipes / "longer.yaml").write_text("# @package _global_\ntrain: {steps: 7}\n")
    recipe = ["--config-dir", str(recipes.parent), "experiment=longer", "model={}"]
    for others in ([], ["data=text", "data.path=x"], ["data=tokens", "data.path=x"], recipe):
        assert load_config([*words, *others], 1).tokenizer == str(weights), others
    (weights / "config.json").write_text(json.dumps(WEIGHTS | {"vocab_size": 5000}))
    for named in ("byte", "bpe", "char", "gpt2"):
        config = load_config([*words, f"tokenizer={named}"], 1)
        assert (config.tokenizer, config.model.vocab_size) == (named, 5000)
    assert load_config([*words, "run_dir=run"], 1).tokenizer == "bpe", "of a run that goes on"


def test_another_vocabulary_than_that_of_start_weights_is_refused_at_once(weights: Path) -> None:
    for words, count in ((["tokenizer=byte"], 257), (["tokenizer=bpe", "data.bpe_vocab_size=300"], 300)):
        error = str(refusal(f"checkpoint.init_from={weights}", *words))
        assert f"has {count} tokens, and the weights know 53" in error
        assert f"tokenizer={weights}" in error


def test_start_weights_without_a_tokenizer_ask_for_its_name(weights: Path) -> None:
    (weights / "tokenizer.json").unlink()
    assert settings(refusal(f"checkpoint.init_from={weights}")) == ["tokenizer"]
    load_config([f"checkpoint.init_from={weights}", "tokenizer=char"], 1)
    tokens = load_config([f"checkpoint.init_from={weights}", "data=tokens", "data.path=x"], 1)
    assert tokens.model.vocab_size == 53


def test_start_weights_bring_their_experts_and_the_command_says_how_they_train(weights: Path) -> None:
    """Of one choice, too, whose weight is always 1 there: no other settings would be those of the weights."""
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 2}
    (weights / "config.json").write_text(json.dumps(WEIGHTS | experts))
    moe = load_config([f"checkpoint.init_from={weights}", "model.moe.capacity_factor=1.5"], 1).model.moe
    assert (moe.num_experts, moe.top_k, moe.ffn_hidden_size, moe.capacity_factor) == (4, 1, 40, 1.5)


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda path: path.write_bytes(b"\xff"), "cannot be read"),
        (lambda path: path.write_text(json.dumps(WEIGHTS | {"model_type": "bert"})), "model_type"),
        (lambda path: path.write_text(json.dumps(WEIGHTS | {"rope_scaling": 3})), "config.json"),
        (lambda path: path.write_text(json.dumps(WEIGHTS | {"num_hidden_layers": "many"})), "num_hidden_layers='many'"),
    ],
)
def test_start_weights_with_a_spoilt_config_are_refused(weights: Path, spoil: Callable[[Path], int], word: str) -> None:
    spoil(weights / "config.json")
    assert word in str(refusal(f"checkpoint.init_from={weights}"))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@given(value=VALUES)
@example(value=".5")
def test_an_override_holds_exactly_the_value(value: object) -> None:
    parsed = OverridesParser.create().parse_override(f"data.path={as_override(value)}").value()
    assert OmegaConf.to_container(OmegaConf.create({"it": parsed}), resolve=True) == {"it": value}
