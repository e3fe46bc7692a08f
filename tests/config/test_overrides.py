"""Every mistake in an override is found, all of them at once, each with what would work."""

import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from megalite.config.compose import load_config
from megalite.config.overrides import FOREIGN_WORDS, nearest_setting
from megalite.config.settings import SETTINGS, as_plain, value_of
from megalite.errors.problems import UserError
from tests.config.refusal import refusal, settings

# What is typed, and the words that its message must hold.
ONE_MISTAKE = [
    # unknown names: the right leaf elsewhere, a slip, the word of another project, a group
    ("lr=1e-3", ["lr", "unknown choice", "optimizer.lr=0.001"]),
    ("learning_rate=0.1", ["unknown setting", "optimizer.lr=0.1"]),
    ("data.validation_path=/dir", ["unknown setting", "data.validation: names with paths or null"]),
    ("data.validation_fractions=/dir", ["unknown setting", "data.validation_fraction: number, at least 0"]),
    ("rundir='a=b'", ["unknown setting", "did you mean 'run_dir=\"a=b\"'"]),
    ("model.zzz=1", ["model.zzz=1", "unknown setting", "docs/configuration.md"]),
    ("~train.steps", ["~train.steps", "is no setting"]),
    # choices of groups
    ("model=gtp2", ["unknown choice", "model=gpt2 is the nearest", "llama3_8b"]),
    # types
    ("train.steps=abc", ["train.steps='abc'", "a whole number", "train.steps=200"]),
    ("train.steps=1.5", ["train.steps=1.5", "a whole number", "train.steps=200"]),
    ("train.steps=2X", ["train.steps='2X'", "a whole number", "train.steps=200"]),
    ("train.steps=???", ["train.steps", "Missing mandatory value", "train.steps=200"]),
    ("optimizer.betas=0.9", ["a list of numbers", "optimizer.betas=[0.9,0.95]"]),
    ("train.steps=${nope}", ["${nope}", "not found"]),
    ("data.path=${oc.env:MEGALITE_NOT_SET}", ["MEGALITE_NOT_SET"]),
    # what cannot be read at all
    ("train.steps", ["is no setting", "train.steps=VALUE"]),
    ("data.path=a=b", ["cannot be read", "quotes"]),
    ("seed=1,2", ["several values", "[1,2]", "--multirun"]),
    ("train.steps=" + "9" * 5000, ["cannot be read", "4300 digits"]),
    # code and Hydra's own ways
    ("model._target_=os.system", ["unknown setting"]),
    ("data.path=[{_target_: os.system}]", ["data.path"]),
    ("hydra.run.dir=x", ["hydra.run.dir", "is no setting", "run_dir=FOLDER"]),
    # flags
    ("--train.steps=3", ["is no setting", "train.steps=VALUE"]),
    ("--cfg=nothing", ["nothing"]),
    ("--config-dir=nothing", ["--config-dir", "no such folder"]),
    # a setting on its own
    ("optimizer.lr=0", ["above 0"]),
    ("optimizer.lr=nan", ["finite"]),
    ("checkpoint.async=1.5", ["checkpoint.async=1.5", "true or false or null", "checkpoint.async=null"]),
    ("checkpoint.asynchronous=true", ["unknown setting", "checkpoint.async=true"]),
]


@pytest.mark.parametrize(("text", "words"), ONE_MISTAKE, ids=[text for text, _ in ONE_MISTAKE])
def test_one_mistake_is_one_problem_that_says_what_would_work(text: str, words: list[str]) -> None:
    error = refusal(text)
    assert len(error.problems) == 1, str(error)
    assert all(word in str(error) for word in words), str(error)


def test_all_mistakes_of_a_command_line_are_in_one_message() -> None:
    argv = ["optimzer.lr=1", "+a.b=2", "model=gtp2", "train.steps=many", "model.norm=batch", "data=text", "wandb.key=x"]
    error = refusal(*argv)
    expected = {"optimzer.lr", "a.b", "model", "train.steps", "model.norm", "data.path", "wandb.key"}
    assert set(settings(error)) == expected
    assert len(error.problems) == len(expected)
    assert str(error).startswith("megalite: refused, 7 problems:")


def test_rules_do_not_judge_settings_that_are_refused_already() -> None:
    # With the default of 4 heads, a width of 250 would be wrong too; but nobody asked for 4 heads.
    assert settings(refusal("model.num_attention_heads=three", "model.hidden_size=250")) == [
        "model.num_attention_heads"
    ]
    assert settings(refusal("model.num_attention_heads=-3", "model.hidden_size=250")) == ["model.num_attention_heads"]
    assert settings(refusal("model=gtp2", "model.hidden_size=250")) == ["model"]
    assert settings(refusal("data=text", "data.pth=book.txt")) == ["data.pth"]


ACCEPTED = [
    ("data.path=[a.txt,b.txt]", "data=text"),
    ("model=gpt2", "model.num_layers=2"),
    ("model={num_layers: 2, norm: layernorm}",),
    ("++train.steps=5", "+train.steps=6", "+model=gpt2"),
    ("train.steps=9", "train.eval_interval=${train.steps}"),
    ("model.bias=yes",),
    ("+experiment=shakespeare_char", "data.path=a"),
    ("checkpoint={async: true, keep: 3}",),
]


def test_the_words_of_other_projects_are_ours() -> None:
    meant = {
        "model.moe.num_experts": "num_experts model.num_experts moe.num_experts num_moe_experts",
        "model.moe.top_k": "num_experts_per_tok model.moe_router_topk model.top_k",
        "model.moe.ffn_hidden_size": "moe_ffn_hidden_size model.moe.moe_intermediate_size",
        "model.moe.aux_loss_coeff": "train.moe_aux_loss_coeff",
        "parallel.ep": "expert_model_parallel_size",
        "parallel.etp": "parallel.expert_tensor_parallel_size",
    }
    for name, words in meant.items():
        assert {nearest_setting(word) for word in words.split()} == {name}
    assert {*FOREIGN_WORDS} <= SETTINGS.keys()


@pytest.mark.parametrize("argv", ACCEPTED, ids=" ".join)
def test_what_hydra_understands_is_accepted(argv: tuple[str, ...]) -> None:
    load_config(list(argv), 1)


def test_overrides_mean_what_hydra_makes_of_them() -> None:
    words = ["model.num_layers=7", "model=gpt2", "train.steps=5", "train.steps=6", "lr.min_lr=${optimizer.eps}"]
    config = load_config(words, 1)
    assert (config.model.num_layers, config.model.hidden_size, config.train.steps) == (7, 768, 6)
    assert config.lr.min_lr == 1e-8
    assert load_config(["model={num_layers: 7}", "model=gpt2"], 1).model == config.model


def test_a_config_of_the_users_own_that_leaves_the_schema_out_may_hold_settings_only(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(as_plain(load_config(["checkpoint.async=true"], 1))))
    arguments = ["--config-path", str(tmp_path), "--config-name"]
    assert load_config([*arguments, "mine"], 1).checkpoint.asynchronous
    (tmp_path / "slip.yaml").write_text((tmp_path / "mine.yaml").read_text().replace("async:", "asynchronous:"))
    assert settings(refusal(*arguments, "slip")) == ["checkpoint.asynchronous"]


def test_presets_of_the_users_own_are_found_by_config_dir(tmp_path: Path) -> None:
    group, recipe = "defaults:\n  - default\n  - _self_\n", "# @package _global_\n"
    files = {
        "model/mine": f"{group}name: mine\nnum_layers: 3\n",
        "model/slip": "num_layer: 3\n",
        "checkpoint/behind": f"{group}async: true\n",
        "checkpoint/field": f"{group}asynchronous: true\n",
        "experiment/long": f"{recipe}train:\n  steps: 7\n",
        "experiment/flat": f"{recipe}model: 5\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    own = ["--config-dir", str(tmp_path)]
    assert load_config([*own, "model=mine"], 1).model.num_layers == 3
    assert load_config([*own, "checkpoint=behind"], 1).checkpoint.asynchronous
    assert load_config([*own, "experiment=long"], 1).train.steps == 7
    assert settings(refusal(*own, "checkpoint=field")) == ["checkpoint.asynchronous"]
    assert settings(refusal(*own, "experiment=logn")) == ["experiment"]
    assert settings(refusal(*own, "experiment=flat")) == ["model"]
    assert set(settings(refusal(*own, "model=slip", "zzz=1"))) == {"model.num_layer", "zzz"}


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"name: \xff", "decode"), (b"name: " + b"[" * 5000, "recursion|nesting")],
)
def test_a_preset_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes, word: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_bytes(content)
    said = str(refusal("--config-dir", str(tmp_path), "model=mine"))
    assert re.search(word, said)
    assert "mend the file" in said


@pytest.mark.parametrize("words", ["--config-name=confg", "--config-path=.", "--config-dir=. model=mine"])
def test_a_file_that_is_missing_or_wrong_is_blamed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/mine.yaml").write_text("num_layers: [")
    (problem,) = refusal(*words.split()).problems
    assert problem.setting.startswith("--config-name=")
    assert re.search("Cannot find primary config|while parsing.*model/mine.yaml", problem.rule)


@pytest.mark.parametrize("name", ["train.compile", "train.cuda_graph", "parallel.async_tp"])
def test_auto_leaves_a_choice_open_and_is_no_number(name: str) -> None:
    assert value_of(load_config([f"{name}=auto"], 1), name) is None
    with pytest.raises(UserError, match="must be a whole number"):
        load_config(["train.recompute_layers=auto"], 1)
