"""`megalite coordinates`: what it measures, what it says of it, and what it refuses."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from megalite.commands.coordinates import _worst, coordinates
from megalite.config.compose import load_config
from megalite.model import scaling
from megalite.verify import coordinates as measuring
from megalite.verify.coordinates import Measured

WORDS = [
    *("device=cpu", "precision=fp32", "tokenizer=byte", "data=text", "model.num_layers=2"),
    *("model.hidden_size=32", "model.num_attention_heads=2", "model.vocab_multiple=1", "optimizer.lr=5e-3"),
]
WIDTHS = (32, 64, 128, 256)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("coordinates")
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"{number * 7919 % 1013} and {number} are numbers" for number in range(3000)))
    return [*WORDS, f"data.path={text}", f"data.cache_dir={folder / 'cache'}"]


def powers(printed: str) -> dict[str, dict[str, float]]:
    """The powers of each place, with muP and without."""
    found = dict[str, dict[str, float]]()
    for line in printed.splitlines():
        if line in ("with muP", "without"):
            place_of = found.setdefault(line, {})
        elif row := re.fullmatch(r"  (\S.*?)  +((?:\S+ +){4})([+-]\d+\.\d\d)", line):
            place_of[row[1]] = float(row[3])
    return found


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.long)])
def test_activations_keep_their_size_with_mup_and_grow_without(
    words: list[str], optimizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, widths = tmp_path / "picture.svg", ",".join(map(str, WIDTHS))
    status = coordinates([*words, f"optimizer={optimizer}", "--widths", widths, "--picture", str(picture)])
    printed = capsys.readouterr().out
    found = powers(printed)
    assert [*found["with muP"]] == [*found["without"]] == ["embedding", "block 1", "block 2", "logits"]
    assert max(map(abs, found["with muP"].values())) < 0.15, printed
    assert found["without"]["logits"] > 0.3, printed
    assert status == 0
    assert "with muP: activations keep their size" in printed
    assert "without: activations do not keep their size" in printed
    assert "●" in printed
    assert ">logits, without<" in picture.read_text()


@pytest.mark.parametrize(("role", "field"), [("hidden", "rate"), ("residual", "rate"), ("output", "start")])
def test_a_wrong_factor_is_seen(
    words: list[str], role: Any, field: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What does not follow the width ends in a status that scripts see."""
    right = scaling.TABLE[role]
    monkeypatch.setitem(scaling.TABLE, role, lambda width, depth: right(width, depth)._replace(**{field: 1.0}))
    assert coordinates([*words, "--widths", "32,64,128"]) == 1
    assert "with muP: activations do not keep their size" in capsys.readouterr().out


def test_an_activation_is_the_mean_over_its_tensor(words: list[str]) -> None:
    """Hooks of the test on the same model say the same; the logits follow the head's definition."""
    config = load_config([*words, "train.steps=1"], 1)
    seen = dict[str, Any]()

    class Watched(measuring.TrainStep):  # built just before the first measurement
        def __init__(self, training: Any, *others: Any) -> None:
            super().__init__(training, *others)
            [seen["model"]] = training.chunks
            head = {name: value.clone() for name, value in seen["model"].named_parameters()}
            seen["model"].embedding.register_forward_hook(lambda *each: seen.setdefault("embedded", each[2].clone()))
            seen["model"].final_norm.register_forward_hook(lambda *each: seen.setdefault("normed", each[2].clone()))
            seen["head"] = head["embedding.word.weight"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "TrainStep", Watched)
        found = measuring.measure({32: config}, lambda width: None)
    before = found.before[32]
    assert before["embedding"] == pytest.approx(float(seen["embedded"].abs().mean()))
    logits = seen["normed"] @ seen["head"][: seen["model"].vocab_size].t()
    assert before["logits"] == pytest.approx(float(logits.detach().abs().mean()), rel=1e-5)
    assert found.after[32]["logits"] > before["logits"]


def test_logits_may_shrink_and_what_is_not_finite_has_no_power() -> None:
    """Two steps leave logits as small as a random sum; a mistake that makes them grow is still one."""
    sizes = {width: {"embedding": 0.02, "logits": width**-0.5} for width in (64, 128)}
    assert _worst(Measured({}, sizes)) == (pytest.approx(0.0, abs=1e-9), "embedding")
    assert _worst(Measured({}, {64: {"logits": 1.0}, 128: {"logits": 2.0}})) == (pytest.approx(1.0), "logits")
    for size in (0.0, math.inf, math.nan):
        assert _worst(Measured({}, {64: {"block 1": 1.0}, 128: {"block 1": size}})) == (math.inf, "block 1")


def test_the_power_is_that_of_the_sizes() -> None:
    sizes = {width: {"logits": 3 * width**0.7} for width in (64, 128, 512)}
    assert Measured({}, sizes).power("logits") == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--widths", "64"], "--widths='64': must be 2 to 16 different widths"),
        (["--widths", "64,64"], "must be 2 to 16 different widths"),
        (["--widths", "64,x"], "must be 2 to 16 different widths"),
        (["--widths", "64,0"], "must be 2 to 16 different widths"),
        (["--widths", "32,40"], "--widths=40: model.num_attention_heads=2 of 32 is no whole number there"),
        (["parallel.tp=2"], "parallel.tp=2"),
        (["model.mup_base_width=24", "--widths", "32,64"], "model.mup_base_width=24: heads grow with the width"),
        (["--picture", "x.png"], "must end in .svg"),
        (['optimizer.groups=[{match: "*.nothing.*", lr: 2x}]'], "matches no parameter of the model"),
    ],
)
def test_what_cannot_be_is_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert coordinates([*WORDS[4:], *given]) == 2
    assert said in capsys.readouterr().err
