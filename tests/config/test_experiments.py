"""Every recipe is complete: it passes all checks on the processes that it names. The command line has the last word."""

import re
from itertools import islice
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from megalite.config.compose import load_config
from megalite.config.overrides import CONF
from megalite.config.settings import GROUPS, value_of
from megalite.config.step_plan import planned_steps
from megalite.model.parameters import gpt_parameters
from tests.config.refusal import refusal, settings

RECIPES = sorted((CONF / "experiment").glob("*.yaml"))
GIVEN = {"shakespeare_char": ["data.path=input.txt"]}  # what the user has to bring


def words(recipe: Path) -> list[str]:
    return [f"experiment={recipe.stem}", *GIVEN.get(recipe.stem, [])]


def world_size(recipe: Path) -> int:
    (number,) = re.findall(r"^# world size: (\d+)$", recipe.read_text(), flags=re.MULTILINE)
    return int(number)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_passes_all_checks_on_its_own_processes_and_says_how_it_is_started(recipe: Path) -> None:
    config, text = load_config(words(recipe), world_size(recipe)), recipe.read_text()
    written = yaml.safe_load(text)
    for group, values in written.items():
        for name, value in (values if group in GROUPS else {}).items():
            if name != "path":
                assert value_of(config, f"{group}.{name}") == value
    assert set(written) - {"defaults", *GROUPS} <= {"tokenizer", "precision"}
    head = text.partition("defaults:")[0]
    assert f"experiment={recipe.stem}" in head
    assert head.startswith("# @package _global_\n# ")
    if "override /data: tokens" in text:
        prepared = re.search(r"--output (\S+)", head)
        assert prepared is not None
        assert written["data"]["path"] == prepared[1]


SAID = {  # by their heads: parameters, tokens of the largest step, and of the whole run
    "shakespeare_char": (10.7e6, 64 * 256, 5000 * 64 * 256),
    "gpt2_124m_openwebtext": (124.4e6, 491_520, 295e9),
    "llama3_8b_fineweb": (8.03e9, 4.2e6, 95e9),
    "qwen3_0_6b": (596e6, 1.05e6, 9.4e9),
}
VOCABULARIES = {"shakespeare_char": 65, "gpt2_124m_openwebtext": 50257, "llama3_8b_fineweb": 128256}


def test_there_is_a_recipe_for_each_promised_model() -> None:
    assert {recipe.stem for recipe in RECIPES} == SAID.keys()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_trains_what_its_head_says(recipe: Path) -> None:
    vocabulary = [f"model.vocab_size={size}" for size in [VOCABULARIES.get(recipe.stem)] if size]
    config = load_config([*words(recipe), *vocabulary], world_size(recipe))
    parameters, tokens, whole = SAID[recipe.stem]
    assert sum(record.numel for record in gpt_parameters(config.model)) == pytest.approx(parameters, rel=0.01)
    assert config.train.global_batch_size * config.train.seq_length == pytest.approx(tokens, rel=0.01)
    samples = next(islice(planned_steps(config.train, done=0, samples=0), config.train.steps, None)).first
    assert samples * config.train.seq_length == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize("order", [1, -1], ids=["before", "after"])
def test_the_command_line_has_the_last_word(order: int) -> None:
    own: list[str] = ["train.steps=7", "tokenizer=byte", "data=stdlib", "model=tiny", "lr.warmup_steps=2"]
    config = load_config(["experiment=gpt2_124m_openwebtext", "data.path=null", *own][::order], 8)
    assert (config.train.steps, config.tokenizer, config.lr.warmup_steps) == (7, "byte", 2)
    assert (config.data.source, config.model.name, config.model.position) == ("stdlib", "tiny", "rope")
    assert config.train.global_batch_size == 480, "the rest is the recipe's"


@pytest.mark.parametrize("word", ["experiment=llama3_8b_finewb", "experiments=llama3_8b_fineweb"])
def test_an_unknown_recipe_is_told_the_nearest_and_nothing_else_is_judged(word: str) -> None:
    """On 64 processes the default batch would not do: but it is not what was asked for."""
    error = refusal(word, "lr.warmup_steps=1000", world_size=64)
    assert settings(error) == [word.partition("=")[0]]
    assert "experiment=llama3_8b_fineweb" in str(error)


def test_a_folder_of_ones_own_may_hold_recipes_like_the_one_in_the_docs(tmp_path: Path) -> None:
    page = (CONF.parent / "docs" / "training.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(recipe)
    config = load_config(["--config-dir", str(tmp_path), "experiment=mine", "model.num_layers=2"], 1)
    assert (config.train.steps, config.train.batch_ramp) == (1500, [4, 4, 2000])
    assert all(f"`experiment={recipe.stem}`" in page for recipe in RECIPES)


def test_a_recipe_that_builds_on_another_keeps_the_files_that_it_chooses(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    mine = tmp_path / "experiment" / "mine.yaml"
    command = ["--config-dir", str(tmp_path), "experiment=mine", "data.path=README.md"]
    mine.write_text("# @package _global_\ndefaults: [shakespeare_char, _self_]\ntrain: {steps: 900}\n")
    config = load_config(command, 1)
    assert (config.data.source, config.tokenizer, config.train.steps) == ("text", "char", 900)
    mine.write_text("# @package _global_\ndefaults: [shakespeare_char, override /data: tokens]\ntokenizer: byte\n")
    assert load_config(command, 1).data.source == "tokens"
    mine.write_text('# @package _global_\ntrain: {steps: "${"}\n')
    assert re.search(r"experiment=mine.*: no viable alternative at input", str(refusal(*command)))
