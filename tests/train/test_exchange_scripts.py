"""`megalite export`, `generate` and `evaluate` on a real run: what they give, and how they refuse."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import pretrain_gpt
from megalite.commands import models
from tests.train.runs import write_text

SHAPE = ["model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=4", "model.num_key_value_heads=2"]
LENGTHS = ["train.seq_length=32", "train.global_batch_size=4", "train.eval_batches=3", "train.eval_interval=3"]
PLACE = ["device=cpu", "precision=fp32", "train.sample_tokens=0", "log.wandb=disabled"]
EXPORT, GENERATE, EVALUATE = models.export, models.generate, models.evaluate


def train(folder: Path, run: str, *extra: str) -> None:
    data = ["data=text", f"data.path={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}"]
    steps = ["train.steps=6", "checkpoint.interval=3"]
    words = [f"run_dir={folder / run}", *data, "data.bpe_vocab_size=300", *SHAPE, *LENGTHS, *PLACE, *steps, *extra]
    assert pretrain_gpt.main(words) == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 6 steps, checkpoints at 3 and 6, its export, its text, and another text."""
    folder = tmp_path_factory.mktemp("exchange")
    write_text(folder / "text.txt")
    (folder / "other.txt").write_text("A stone in the river. The wind — shadow, light… " * 9)
    train(folder, "run")
    assert EXPORT([str(folder / "run"), str(folder / "exported")]) == 0
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def evaluated_in_training(run: str, step: int) -> dict[str, Any]:
    """The line of metrics of the evaluation after `step`."""
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    [found] = [line for line in lines if line["step"] == step and "val_loss" in line]
    return dict(found)


def evaluation(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert EVALUATE([*arguments, "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert GENERATE(list(arguments)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_the_export_holds_all_that_transformers_and_a_reader_need(trained: Path) -> None:
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(os.listdir(str(trained / "exported"))) == names | {"README.md"}
    card = ((trained / "exported") / "README.md").read_text()
    assert f"| validation | {evaluated_in_training(str(trained / 'run'), 6)['val_loss']:.4f} |" in card
    assert "| tokens | 768 |" in card
    assert "text.txt; text: " in card
    assert str(trained) not in card


def test_step_and_precision_are_those_asked_for(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "parts"
    options = ["--step", "3", "precision=bf16"]
    assert EXPORT([str(trained / "run"), str(out), *options]) == 0
    assert "after step 3" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert EXPORT([str(trained / "run"), str(tmp_path / "whole"), "--step", "3"]) == 0
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    parts = load_file(out / "model.safetensors")
    newest = load_file((trained / "exported") / "model.safetensors")
    assert whole.keys() == parts.keys() == newest.keys()
    assert all(torch.equal(parts[name], value.bfloat16()) for name, value in whole.items())
    assert not all(torch.equal(newest[name], value) for name, value in whole.items())
    card = (tmp_path / "whole" / "README.md").read_text()
    assert f"| validation | {evaluated_in_training(str(trained / 'run'), 3)['val_loss']:.4f} |" in card
    assert "| tokens | 384 |" in card


def first_loss(trained: Path, run: str, *words: str) -> float:
    """Of one step from the weights of the export, on one sequence that is the whole text."""
    one = ["train.global_batch_size=1", "data.validation_fraction=0", "train.eval_interval=0", "train.steps=1"]
    place = f"data.path={trained / 'short.txt'}"
    train(trained, run, f"checkpoint.init_from={trained}/exported", place, *one, *words)
    return float(json.loads((trained / run / "metrics.jsonl").read_text().splitlines()[0])["loss"])


def test_an_import_trains_with_the_tokenizer_of_its_folder(trained: Path) -> None:
    """The first loss is that of transformers on the ids of AutoTokenizer; a resume keeps the tokenizer of its run."""
    import transformers

    text = "A stone by the river, a shadow of light. "
    (trained / "short.txt").write_text(text)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(trained / "exported"))
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    expected = float(losses_by_transformers(str(trained / "exported"), ids, len(ids) - 1).mean())
    found = first_loss(trained, "imported", f"train.seq_length={len(ids) - 1}")
    assert found == pytest.approx(expected, rel=1e-5)
    other = first_loss(trained, "other", "train.seq_length=40", "tokenizer=byte")
    assert abs(other - expected) > 0.05
    for run, length in (("imported", len(ids) - 1), ("other", 40)):
        assert pretrain_gpt.main([f"run_dir={trained / run}", "train.steps=2"]) == 0, length
        lines = (trained / run / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert f"tokenizer: {trained}/exported\n" in (trained / "imported" / "config.yaml").read_text()


def test_a_damaged_newest_checkpoint_is_passed_over_and_left_as_it_is(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(str(trained / "run"), tmp_path / "run")
    damaged = next((tmp_path / "run" / "checkpoints" / "step-00000006").glob("*.safetensors"))
    damaged.write_bytes(b"?" + damaged.read_bytes()[1:])
    before = tree(tmp_path / "run")
    assert EXPORT([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "step-00000006 is damaged and was passed over" in said.err
    assert "after step 3" in said.out
    assert EXPORT([str(tmp_path / "run"), str(tmp_path / "named"), "--step", "6"]) == 2
    said = capsys.readouterr()
    assert "step-00000006='damaged': it cannot be read; rank-00000.safetensors is damaged" in said.err
    assert "those there are: 3, 6" in said.err
    assert tree(tmp_path / "run") == before


def test_a_run_and_its_export_write_the_same_text(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["--prompt", "The river", "--max-new-tokens", "9", "--num-samples", "2", "seed=5"]
    written = text(capsys, str(trained / "run"), *ask)
    assert written == text(capsys, str(trained / "exported"), *ask)
    assert written.count("The river") == 2
    assert written != text(capsys, str(trained / "run"), *ask[:-1], "seed=6")


def test_a_table_of_positions_is_used_as_far_as_it_was_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_of_positions(tmp_path)
    (tmp_path / "text.txt").write_text("abcacb" * 20)
    assert GENERATE([str(tmp_path / "table"), "--prompt", "abca"]) == 0
    said = capsys.readouterr()
    assert (len(said.out), said.err) == (17, "")  # with the end of the line
    words = ["data=text", f"data.path={tmp_path / 'text.txt'}", f"data.cache_dir={tmp_path / 'cache'}"]
    assert evaluation(capsys, str(tmp_path / "table"), *words)["seq_length"] == 16


@pytest.mark.parametrize("step", [3, 6])
def test_a_run_on_its_own_data_has_the_val_loss_of_its_metrics(
    step: int, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = evaluated_in_training(str(trained / "run"), step)
    found = evaluation(capsys, str(trained / "run"), "--step", str(step))
    assert found["step"] == step
    assert found["loss"] == pytest.approx(said["val_loss"], rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(said["val_bits_per_byte"], rel=1e-6)
    assert found["perplexity"] == pytest.approx(said["val_perplexity"], rel=1e-5)
    assert found["tokens"] == 3 * 4 * 32


def test_experts_are_chosen_with_the_biases_that_the_run_has_learned(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experts = {"num_experts": 4, "ffn_hidden_size": 16, "score": "sigmoid", "expert_bias_rate": 0.5}
    words = [f"model.moe.{name}={value}" for name, value in experts.items()]
    train(trained, "experts", *words, "data.mask_end_of_document=true")
    run = str(trained / "experts")
    said, found = evaluated_in_training(run, 6), evaluation(capsys, run)
    assert found["loss"] == pytest.approx(said["val_loss"], rel=1e-6)
    assert text(capsys, run, "--prompt", "light", "--max-new-tokens", "3").startswith("light"), "no family has them"
    other = [run, "data=text", f"data.path={trained / 'other.txt'}", f"data.cache_dir={trained / 'cache'}"]
    masked, whole = (evaluation(capsys, *other, *more) for more in ((), ("data.mask_end_of_document=false",)))
    assert masked["tokens"] == whole["tokens"] - 1, "other data is masked as the run's own"


def losses_by_transformers(folder: str, tokens: list[int], length: int) -> torch.Tensor:
    """The loss of each token but the first, in windows of `length`, by transformers' model in fp64."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    losses = []
    for first in range(0, len(tokens) - 1, length):
        window = torch.tensor([tokens[first : first + length + 1]])
        losses.append(F.cross_entropy(model(window[:, :-1]).logits[0], window[0, 1:], reduction="none"))
    return torch.cat(losses).detach()


def test_other_data_is_evaluated_whole_to_the_last_token(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    other = trained / "other.txt"
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(trained / "exported"))
    tokens = [*tokenizer(other.read_text())["input_ids"], tokenizer.eos_token_id]
    assert (len(tokens) - 1) % 32 != 0  # the last window is not full
    losses = losses_by_transformers(str(trained / "exported"), tokens, 32)
    words = ["data=text", f"data.path={other}", f"data.cache_dir={trained / 'cache'}", "precision=fp64"]
    for folder in (str(trained / "run"), str(trained / "exported")):
        found = evaluation(capsys, folder, *words, "--batch-size", "3")
        assert found["tokens"] == len(tokens) - 1
        assert found["loss"] == pytest.approx(float(losses.mean()), rel=1e-6)  # transformers has RMSNorm in fp32
        predicted = len(other.read_bytes()) - len(tokenizer.decode(tokens[0]).encode())
        assert found["bytes_per_token"] * found["tokens"] == pytest.approx(predicted, rel=1e-12)
        assert found["bits_per_byte"] == pytest.approx(float(losses.sum()) / math.log(2) / predicted, rel=1e-6)
    front = evaluation(capsys, str(trained / "exported"), *words, "--max-tokens", "50")
    assert front["tokens"] == 50
    assert front["loss"] == pytest.approx(float(losses[:50].mean()), rel=1e-6)
    bits = float(losses[:50].sum()) / math.log(2)
    assert front["bits_per_byte"] == pytest.approx(bits / len(tokenizer.decode(tokens[1:51]).encode()), rel=1e-6)


def test_token_files_are_evaluated_as_the_text_they_were_made_of(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, tokenizer in (("tokens", f"{trained}/run/tokenizer"), ("strange", "byte")):
        words = ["data=text", f"data.path={trained / 'other.txt'}", f"tokenizer={tokenizer}"]
        assert models.prepare([*words, "--output", str(trained / name)]) == 0
    found = evaluation(capsys, str(trained / "run"), "data=tokens", f"data.path={trained / 'tokens'}")
    words = [f"data.path={trained / 'other.txt'}", f"data.cache_dir={trained / 'cache'}"]
    expected = evaluation(capsys, str(trained / "run"), "data=text", *words)
    assert {**found, "data": ""} == {**expected, "data": ""}
    assert EVALUATE([str(trained / "run"), "data=tokens", f"data.path={trained / 'strange'}"]) == 2
    assert "strange was made by another tokenizer than the one given" in capsys.readouterr().err


def empty_run(place: Path) -> None:
    (place / "empty" / "checkpoints").mkdir(parents=True)


def model_of_positions(place: Path) -> None:
    """A GPT-2 of 32 positions, trained on sequences of 16."""
    from megalite.hf.export import export_model
    from megalite.model.init import start_values
    from megalite.model.parameters import gpt_parameters
    from megalite.prepare.prepare import char_tokenizer
    from tests.hf.peers import small

    config, others = small("gpt2", vocab_size=3), char_tokenizer(["abc"]).files(16)
    values = start_values(gpt_parameters(config), seed=1)
    export_model(values, config, place / "table", torch.float32, context_length=16, others=others)


ASK = ["--prompt", "a tree"]
DATA = ["data=text", "data.path=other.txt", "data.cache_dir=cache"]


@pytest.mark.parametrize(
    ("arrange", "name", "arguments", "words"),
    [
        (None, "export", ["gone", "out"], ["model='gone'", "must be the folder of a run"]),
        (empty_run, "export", ["empty", "out"], ["it holds no checkpoint"]),
        (None, "export", ["run", "out", "--step", "5"], ["step=5", "those there are: 3, 6"]),
        (None, "generate", ["run", "--prompt", ""], ["--prompt=''", "nothing to continue"]),
        (None, "generate", ["gpt2", *ASK], ["model='gpt2'", "models are not downloaded"]),
        (None, "generate", ["exported", *ASK, "--step", "3"], ["step=3", "has no steps"]),
        (
            model_of_positions,
            "generate",
            ["table", "--prompt", "abc", "--max-new-tokens", "30"],
            ["takes 3 of the model's 32 positions", "at most 29"],
        ),
        (model_of_positions, "evaluate", ["table", *DATA, "train.seq_length=33"], ["has 32 positions"]),
        (None, "evaluate", ["exported"], ["has no data of its own", "data=stdlib"]),
        (None, "evaluate", ["run", "--max-tokens", "9"], ["evaluated as in training"]),
        (None, "generate", ["exported", "--prompt", "a", "train.steps=7"], ["generating text does not read it"]),
    ],
)
def test_mistakes_are_refused_with_status_two_and_nothing_written(
    arrange: Callable[[Path], None] | None,
    name: str,
    arguments: list[str],
    words: list[str],
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for part in ("run", "exported", "cache"):
        (tmp_path / part).symlink_to(trained / part)
    (tmp_path / "other.txt").symlink_to(trained / "other.txt")
    monkeypatch.chdir(tmp_path)
    if arrange:
        arrange(tmp_path)
    before, entries = tree(tmp_path), sorted(os.listdir(tmp_path))
    assert getattr(models, name)(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("megalite: refused") == 1
    for word in words:
        assert word in said.err
    assert (tree(tmp_path), sorted(os.listdir(tmp_path))) == (before, entries)


def test_a_run_whose_text_has_changed_has_no_val_loss_any_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path / "text.txt")
    train(tmp_path, "run", "tokenizer=byte", "train.steps=1", "train.eval_interval=0")
    with (tmp_path / "text.txt").open("a") as file:
        file.write(" And so on.")
    assert EVALUATE([str(tmp_path / "run")]) == 2
    assert "not the data of the run any more" in capfd.readouterr().err
