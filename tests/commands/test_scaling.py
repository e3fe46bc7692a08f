"""`megalite scaling`: the sizes that are planned can be trained as planned, and finished runs are compared fairly."""

import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from megalite.commands.scaling import fit, plan
from megalite.config.compose import load_config
from megalite.config.derive import derive_vocabulary
from megalite.config.schema import Config
from megalite.config.settings import DERIVED, as_plain
from megalite.model.flops import flops_per_token

WORDS = ["tokenizer=byte", "train.seq_length=64", "train.global_batch_size=4", "device=cpu"]
GAMMA, VOCABULARY = 0.2, 64


def planned(folder: Path, *words: str) -> dict[str, Config]:
    """The sizes that a plan writes, as training reads them."""
    assert plan([*words, "--out", str(folder)]) == 0
    return {path.stem: recipe(folder, path.stem) for path in sorted(folder.glob("*.yaml"))}


def recipe(folder: Path, name: str, *words: str) -> Config:
    return load_config(["--config-dir", str(folder), "--config-name", name, f"run_dir={folder / name}", *words], 1)


def test_sizes_follow_one_dial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(tmp_path / "sweep", *WORDS, "--tokens-per-parameter", "7.5", "optimizer.lr=2e-3")
    assert [*found] == ["d2", "d3", "d4", "d6", "d8"]
    shapes = [(one.model.num_layers, one.model.hidden_size, one.model.num_attention_heads) for one in found.values()]
    assert shapes == [(depth, 64 * depth, depth) for depth in (2, 3, 4, 6, 8)]
    for one in found.values():
        assert (one.train.tokens_per_parameter, one.train.steps, one.optimizer.lr) == (7.5, None, 2e-3)
        assert (one.tokenizer, one.train.seq_length, one.model.mup_base_width) == ("byte", 64, None)
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("d2 "))
    width, inner, padded = 128, 384, 257
    parameters = padded * width + 2 * (4 * width**2 + 3 * width * inner + 2 * width) + width
    steps = math.ceil(7.5 * parameters / 64 / 4)
    assert row[1:7] == ["2", "128", "2", f"{parameters:,}", f"{steps * 256:,}", f"{steps:,}"]
    assert float(row[7]) == pytest.approx(
        flops_per_token(derive_vocabulary(found["d2"], 257).model, 64, causal=False) * steps * 256, rel=0.01
    )


def test_the_shape_that_is_asked_for_is_kept(tmp_path: Path) -> None:
    words = ["model=qwen3_0_6b", "model.mup_base_width=256", "--sizes", "3,5,30", "--tokens-per-parameter", "1"]
    found = planned(tmp_path / "sweep", *WORDS, *words, "--width-per-layer", "100")
    for name, width in {"d3": 384, "d5": 512, "d30": 3072}.items():
        model = found[name].model
        assert model.hidden_size == width, "rounded up to a multiple of 128, which one key-value head takes"
        assert (model.num_attention_heads, model.num_key_value_heads) == (width // 64, width // 128)
        assert (model.head_size, model.ffn_hidden_size, model.mup_base_width) == (128, 3 * width, 256)


def test_words_of_the_script_reach_every_size(tmp_path: Path) -> None:
    """What bash starts, told by a program in the place of python."""
    planned(tmp_path / "two sizes", *WORDS, "--sizes", "2,4")
    told = tmp_path / "told"
    told.write_text('#!/bin/sh\nprintf "%s|" "$@"; echo\n')
    told.chmod(0o755)
    script = ["bash", str(tmp_path / "two sizes" / "train.sh"), "seed=7"]
    done = subprocess.run(
        script, env={"LAUNCH": str(told), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    lines = [line.split("|") for line in done.stdout.splitlines()]
    folder = str(tmp_path / "two sizes")
    assert lines == [
        [
            "-m",
            "megalite",
            "train",
            "--config-dir",
            folder,
            "--config-name",
            size,
            f"run_dir={folder}/{size}",
            "seed=7",
            "",
        ]
        for size in ("d2", "d4")
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sizes", "1"], "--sizes='1': must be how many sizes there are, 2 to 12"),
        (["--sizes", "13"], "must be how many sizes there are"),
        (["--sizes", "2,2"], "or their different numbers of layers"),
        (["--sizes", "0,2"], "or their different numbers of layers"),
        (["--sizes", "2,x"], "or their different numbers of layers"),
        (["--sizes", "2,1e9"], "model.num_layers=1000000000"),
        (["model.num_layers=3"], "model.num_layers: --sizes and --width-per-layer decides that here"),
        (["train.tokens=3"], "train.tokens: --tokens-per-parameter decides that here"),
        (["run_dir=x"], "run_dir: --out decides that here"),
        (["checkpoint.init_from=x"], "its weights have one size"),
        (["model.mup_base_width=50"], "model.mup_base_width=50"),
        (["--tokens-per-parameter", "1e9"], "more than 99,999,999"),
        (["train.step=3"], "train.step=3: unknown setting"),
    ],
)
def test_what_cannot_be_planned_is_refused_and_nothing_is_written(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan([*WORDS, *words, "--out", str(tmp_path / "sweep")]) == 2
    assert said in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    for place in (tmp_path, tmp_path / "mine"):
        assert plan([*WORDS, "--out", str(place)]) == 2
        assert "it holds something, and is not replaced" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# --- fit -------------------------------------------------------------------------------------------------------------


def write_run(folder: Path, depth: int, **changed: Any) -> Path:
    """A finished run of so many layers, whose loss follows a law exactly."""
    given: dict[str, Any] = {
        "end": "finished",
        "fingerprint": "f",
        "validated": True,
        "tokens": None,
        "loss": None,
        "words": [],
    }
    given |= changed
    words = [f"model.num_layers={depth}", f"model.hidden_size={16 * depth}", f"model.num_attention_heads={depth}"]
    config = load_config([*WORDS, *words, f"run_dir={folder}", "train.steps=40", *given["words"]], 1)
    config = derive_vocabulary(config, VOCABULARY)
    tokens = given["tokens"] or 1000 * depth**3
    compute = flops_per_token(config.model, config.train.seq_length, causal=False) * tokens
    loss = given["loss"] or 1.5 + 300 / compute**GAMMA
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(as_plain(config) | {DERIVED: [*config.derived]}))
    (folder / "run.json").write_text(
        json.dumps({"run_id": given.get("run_id", str(folder)), "data_fingerprint": given["fingerprint"]})
    )
    # The last two of 40 steps are the last twentieth; what is before them is far from the law.
    steps = [
        {"step": step, "tokens": tokens * step // 40, "loss": 9.0 if step < 39 else loss + 0.1 * (step - 39.5)}
        for step in range(1, 41)
    ]
    evaluation = [{"step": step, "tokens": tokens, "val_loss": 8.0 if step < 40 else loss} for step in (20, 40)]
    lines = [*steps[:20], *evaluation[:1], *steps[20:], *evaluation[1:]] if given["validated"] else steps
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [{"time": 1.0, "step": 0, "kind": "start"}]
    events += [{"time": 2.0, "step": 40, "kind": given["end"], "status": 0}] if given["end"] else []
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def fitted(capsys: pytest.CaptureFixture[str], *words: Path | str) -> dict[str, Any]:
    assert fit([*map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_law_of_finished_runs_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / f"d{depth}", depth) for depth in (2, 3, 4, 6, 8)]
    found = fitted(capsys, *runs)
    assert found["loss"] == "validation loss after the last step"
    assert found["exponents"]["C"] == pytest.approx(GAMMA, rel=1e-3)
    assert found["E"] == pytest.approx(1.5, rel=1e-3)
    width, inner = 32, 128
    parameters = VOCABULARY * width + 2 * (4 * width**2 + 3 * width * inner + 2 * width) + width
    first = found["runs"][0]
    assert (first["parameters"], first["tokens"]) == (parameters, 8000)
    assert found["further"][1]["loss"] == pytest.approx(1.5 + 300 / found["further"][1]["compute"] ** GAMMA, rel=1e-3)
    picture = tmp_path / "law.svg"
    assert fit([*map(str, runs), "--out", str(picture)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"L = 1\.5 \+ .* / C\^0\.200; deviation of a run 0\.00%", said), said
    assert "no law of N and D: it needs 6 runs with 3 values of each, and there are 5" in said
    assert "●" in said
    assert ">runs<" in picture.read_text()
    assert picture.read_text().count("h-3v-3h6v6h-6v-3") == len(runs)


def test_training_losses_are_averaged_where_a_run_has_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / f"d{depth}", depth, validated=depth != 4) for depth in (2, 3, 4, 6)]
    found = fitted(capsys, *runs)
    assert found["loss"] == "training loss, mean of the last 1/20"
    assert found["exponents"]["C"] == pytest.approx(GAMMA, rel=1e-3)
    assert found["E"] == pytest.approx(1.5, rel=1e-3), "what was before the last twentieth is left out"


def test_parameters_and_tokens_that_vary_apart_tell_the_optimum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = list[Path]()
    for depth in (2, 4, 8):
        for tokens in (10**6, 10**7, 10**8):
            place = tmp_path / f"d{depth}-{tokens}"
            write_run(place, depth, tokens=tokens)
            size = fitted_size(place)
            loss = 1.5 + 20 / size**0.4 + 50 / tokens**0.3
            runs.append(write_run(tmp_path / f"{place.name}-law", depth, tokens=tokens, loss=loss))
    found = fitted(capsys, *runs)
    assert found["exponents"] == {"N": pytest.approx(0.4, rel=1e-2), "D": pytest.approx(0.3, rel=1e-2)}
    best = found["further"][0]
    assert 6 * math.prod(best["N and D"]) == pytest.approx(best["compute"])
    assert fit([*map(str, runs)]) == 0
    assert re.search(r"N of least loss goes as C\^0\.4[23]\d, interval", capsys.readouterr().out)


def fitted_size(folder: Path) -> int:
    model = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    width, layers, inner = model["hidden_size"], model["num_layers"], model["ffn_hidden_size"]
    return int(VOCABULARY * width + layers * (4 * width**2 + 3 * width * inner + 2 * width) + width)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"end": "stopped"}, "is not finished: it has done 40 of 40 steps"),
        ({"end": None}, "is not finished"),
        ({"fingerprint": "g"}, "data or tokenizer (g) are not those of"),
        ({"words": ["train.seq_length=32"]}, "sequence length (32) are not those of"),
        ({"run_id": "same"}, "is the same run as"),
        ({"loss": math.nan}, "its loss is nan: no law goes through that"),
    ],
)
def test_runs_that_do_not_compare_are_refused(
    tmp_path: Path, changed: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        write_run(tmp_path / f"d{depth}", depth, run_id="same" if depth == 3 else str(depth)) for depth in (2, 3, 4)
    ]
    other = write_run(tmp_path / "other", 6, **changed)
    assert fit([*map(str, runs), str(other), "--picture", str(tmp_path / "law.svg")]) == 2
    answer = capsys.readouterr()
    assert said in answer.err
    assert answer.out == ""
    assert not (tmp_path / "law.svg").exists()


def test_a_run_that_is_named_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "d2", 2)
    (tmp_path / "link").symlink_to(run)
    assert fit([str(run), str(tmp_path / "link"), str(tmp_path / "nothing")]) == 2
    assert "it holds no run" in capsys.readouterr().err
    assert fit([str(run), str(tmp_path / "link")]) == 2
    assert "is the same run as" in capsys.readouterr().err


def test_a_config_that_holds_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / f"d{depth}", depth) for depth in (2, 3, 4, 6)]
    for value, told in {"null": str(runs[1]), "many": str(runs[1]), "-3": "model.num_key_value_heads=-3"}.items():
        text = (runs[0] / "config.yaml").read_text()
        (runs[1] / "config.yaml").write_text(re.sub(r"num_key_value_heads: \d+", f"num_key_value_heads: {value}", text))
        assert fit([*map(str, runs)]) == 2
        assert told in capsys.readouterr().err


def test_too_few_runs_are_told_what_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / f"d{depth}", depth) for depth in (2, 3)]
    assert fit([*map(str, runs)]) == 2
    assert "at least 3 amounts of compute, and these runs have 2" in capsys.readouterr().err
