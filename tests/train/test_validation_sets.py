"""Sets of data.validation in real runs: evaluated, recorded and shown; training is the same without them."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pretrain_gpt
from megalite.commands import models
from megalite.config.files import RUN
from megalite.data.batch import unscored
from megalite.data.token_file import TokenFile
from megalite.hf.saved_model import open_model
from megalite.observe.run_data import flat_values, read_run
from tests.train.runs import metrics, overrides, state_bytes

SHORT = (
    "train.steps=6",
    "train.eval_interval=3",
    "checkpoint.interval=3",
    "train.sample_tokens=0",
    "log.wandb=disabled",
)


@pytest.fixture(scope="module")
def sets(folder: Path) -> str:
    """One set of a file that is shorter than what train.eval_batches asks for, one of two files."""
    (folder / "code.txt").write_text("def add(one, other): return one + other\n" * 10)
    (folder / "web.txt").write_text("a stone by the river, a cloud on the mountain\n" * 400)
    code, web = folder / "code.txt", folder / "web.txt"
    return f"data.validation={{code: {code}, mixed: [{web}, {code}]}}"


def run(folder: Path, name: str, *extra: str) -> Path:
    assert pretrain_gpt.main(overrides(folder, name, *SHORT, *extra)) == 0
    return folder / name


def evaluations(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "eval_time_s" in line]


def test_they_are_evaluated_and_training_is_the_same(
    folder: Path, sets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, told = run(folder, "plain"), run(folder, "told", sets)
    said = capsys.readouterr().out
    assert metrics(told) == metrics(plain)
    assert state_bytes(told, 6) == state_bytes(plain, 6)
    ids = [json.loads((it / RUN).read_text())["data_fingerprint"] for it in (plain, told)]
    assert ids[0] == ids[1]
    assert not any("validation" in line for line in evaluations(plain))
    first, last = (line["validation"] for line in evaluations(told))
    assert [*first] == ["code", "mixed"]
    assert re.search(rf"step 6  validation loss .*\n  on code {last['code']['loss']:.4f}, mixed ", said)
    assert f"on code          {first['code']['loss']:.4f} -> {last['code']['loss']:.4f}" in said
    assert "evaluated on code: 400 tokens" not in said, "byte: with the end of the document"
    assert "evaluated on code: 401 tokens" in said
    shown = read_run(told)
    assert shown.damage == []
    points = shown.series["val_loss/code"].points()
    assert [point[1] for point in points] == [first["code"]["loss"], last["code"]["loss"]]
    assert flat_values(evaluations(told)[0])["val_bits_per_byte/mixed"] == first["mixed"]["bits_per_byte"]


def test_the_loss_is_that_of_the_tokens_of_the_file(folder: Path, sets: str) -> None:
    """By torch's cross entropy on the model of the checkpoint: windows one after the other, all of a short file."""
    told = run(folder, "told", sets)
    [prefix] = (folder / "cache" / "tokens").glob("code.txt-*.bin")
    tokens = torch.tensor(TokenFile.open(prefix.with_suffix("")).tokens.astype("int64"))
    assert bytes(tokens[:-1].tolist()) == (folder / "code.txt").read_bytes()
    saved = open_model(told, 6)
    model = saved.load(saved.config)
    windows = range(0, len(tokens) - 64, 64)
    with torch.no_grad():
        losses = [
            F.cross_entropy(model.logits(unscored(tokens[at : at + 64][None]))[0], tokens[at + 1 : at + 65])
            for at in windows
        ]
    found = evaluations(told)[-1]["validation"]["code"]
    assert len(losses) == 6
    assert found["loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))  # a byte is a token


def test_they_may_change_between_starts_which_is_said(
    folder: Path, sets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = run(folder, "changing", sets)
    capsys.readouterr()
    run(folder, "changing", f"data.validation={{web: {folder / 'web.txt'}}}", "train.steps=9")
    said = capsys.readouterr().out
    assert re.search(r"data\.validation is now \{'web': .*; the run was at \{'code'", said)
    assert [[*line["validation"]] for line in evaluations(told)] == [["code", "mixed"], ["code", "mixed"], ["web"]]
    assert [line["step"] for line in evaluations(told)] == [3, 6, 9]


def test_they_are_evaluated_where_nothing_is_held_out_and_with_averages(
    folder: Path, sets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A start that has nothing to do repeats no evaluation."""
    words = sets, "data.validation_fraction=0", "optimizer.ema_half_life_steps=2"
    alone = run(folder, "alone", *words)
    said = capsys.readouterr().out
    assert "step 6  validation loss by set" in said
    lines = evaluations(alone)
    assert [sorted(line) for line in lines] == [["eval_time_s", "step", "tokens", "validation"]] * 2
    assert {*lines[-1]["validation"]["code"]} == {"loss", "perplexity", "bits_per_byte", "loss_ema"}
    assert read_run(alone).damage == []
    assert "already finished" in (run(folder, "alone", *words) and capsys.readouterr().out)
    assert evaluations(alone) == lines
    page = (alone / "report.html").read_text()
    assert "<dt>on code</dt>" in page
    assert "val_loss_ema/mixed" in page


def test_without_evaluations_there_are_none_which_is_said(
    folder: Path, sets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    idle = run(folder, "idle", "data.validation={gone: /none.txt}", "train.eval_interval=0")
    assert "data.validation has no effect" in capsys.readouterr().out
    assert evaluations(idle) == []


REFUSED = [
    ("data.validation={web: /none.txt, code: /gone.txt}", ["2 problems", "data.validation.web='/none.txt'", "gone"]),
    ("data.validation={held_out: a.txt}", ["held_out names the part that data.validation_fraction holds out"]),
    ("data.validation={a-b: a.txt, 7: b.txt}", ["'a-b' must be a name", "7 must be a name"]),
    ("data.validation={web: [], code: 5}", ["web must be a path or a list", "code must be a path or a list"]),
    ("data.validation=web.txt", ["must be names with paths or null", "{web: web.txt, code: [a.txt, b.txt]}"]),
    ("data.validation={web: SHORT, code: SHORT}", ["2 problems", "short.txt'", "6 tokens are less than one sample of"]),
    ("data.validation={web: OWN}", ["run_dir", "own data"]),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_is_wrong_is_refused(
    folder: Path, words: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "short.txt").write_text("short")
    words = words.replace("SHORT", str(folder / "short.txt")).replace("OWN", str(folder))
    assert pretrain_gpt.main(overrides(folder, "refused", *SHORT, words)) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in said), error
    assert not (folder / "refused").exists()


def test_token_files_of_another_tokenizer_or_ids_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, tokenizer in (("own", "byte"), ("strange", "char")):
        words = (
            "data=text",
            f"data.path={folder / 'text.txt'}",
            f"tokenizer={tokenizer}",
            f"data.cache_dir={folder / 'cache'}",
        )
        assert models.prepare([*words, "--output", str(folder / name)]) == 0
    tokens = "data=tokens", f"data.path={folder / 'own'}"
    run(folder, "tokens", *tokens, f"data.validation={{same: {folder / 'own'}}}")
    [line, *_] = evaluations(folder / "tokens")
    assert 0 < line["validation"]["same"]["loss"] < 6
    capsys.readouterr()
    words = f"data.validation={{one: {folder / 'strange'}, two: {folder / 'nothing'}}}"
    assert pretrain_gpt.main(overrides(folder, "refused", *SHORT, *tokens, words)) == 2
    error = capsys.readouterr().err
    assert "data.validation.one=" in error
    assert "was made by another tokenizer than the training data" in error
    assert "data.validation.two=" in error
    assert "is missing" in error
