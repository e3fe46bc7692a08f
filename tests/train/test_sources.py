"""What lines of metrics tell of the parts of a blend: sums over the steps since the line before."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from megalite.config.schema import DataConfig
from megalite.data.open import source_names
from megalite.observe.run_data import read_run
from tests.train.runs import overrides

SHORT = ("train.steps=6", "train.eval_interval=0", "train.sample_tokens=0", "log.wandb=disabled", "checkpoint.keep=9")


@pytest.fixture
def blend(folder: Path) -> str:
    """The text, and one of other words."""
    (folder / "code.txt").write_text("def add(one, other): return one + other\n" * 2000)
    return f"data.path=[{folder / 'text.txt'},{folder / 'code.txt'}]"


def run(folder: Path, name: str, *extra: str) -> tuple[Path, list[dict[str, Any]]]:
    assert pretrain_gpt.main(overrides(folder, name, *SHORT, *extra)) == 0
    return folder / name, [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def test_lines_tell_losses_and_tokens_by_part(folder: Path, blend: str) -> None:
    words = blend, "data.weights=[0.75,0.25]"
    path, each = run(folder, "each", *words)
    _, third = run(folder, "third", *words, "train.log_interval=3")
    for line in each:
        losses, tokens = line["source_loss"], line["source_tokens"]
        assert tokens == {"text.txt": 6 * 64, "code.txt": 2 * 64}
        mean = sum(losses[name] * tokens[name] for name in tokens) / sum(tokens.values())
        assert mean == pytest.approx(line["loss"], rel=1e-6)
    for at, line in enumerate(third):
        its = each[3 * at :][:3]
        assert line["source_tokens"] == dict(sum((Counter(one["source_tokens"]) for one in its), Counter[str]()))
        means = {name: sum(one["source_loss"][name] for one in its) / 3 for name in line["source_loss"]}
        assert line["source_loss"] == pytest.approx(means, rel=1e-6)
    shown = read_run(path)
    assert shown.damage == []
    assert [point[:2] for point in shown.series["source_loss/code/txt"].points()] == [
        [line["step"], line["source_loss"]["code.txt"]] for line in each
    ]


def test_a_part_without_a_sample_has_no_loss_and_steps_that_are_passed_over_do_not_count(
    folder: Path, blend: str
) -> None:
    """The rarer part has each sixteenth sample: one in two steps."""
    _, lines = run(folder, "rare", blend, "data.weights=[15,1]", "train.skip_steps=[3,4]", "train.log_interval=2")
    assert [sum(line["source_tokens"].values()) for line in lines] == [1024, 1024]
    _, each = run(folder, "rare-each", blend, "data.weights=[15,1]")
    assert {line["source_tokens"]["code.txt"] for line in each} == {0, 64}
    assert all(("code.txt" in line["source_loss"]) == (line["source_tokens"]["code.txt"] > 0) for line in each)


def test_there_are_none_where_there_is_one_part(folder: Path, blend: str) -> None:
    for words in ((), (blend.replace(",", "]#").partition("#")[0],)):
        _, lines = run(folder, f"one{len(words)}", *words, "train.steps=2")
        assert [name for name in lines[-1] if name.startswith("source")] == []


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ("/a/web", []),
        (["/a/web"], []),
        (["/a/web", "/a/code/"], ["web", "code"]),
        (["/a/web/train", "/a/code/train", "/a/books"], ["web/train", "code/train", "books"]),
        (["/a/x/train", "/b/x/train", "train"], ["a/x/train", "b/x/train", "train"]),
        (["org/web", "web", "web"], ["org/web", "web", "web (3)"]),
    ],
)
def test_parts_are_told_apart_by_as_much_of_their_paths_as_that_takes(paths: Any, names: list[str]) -> None:
    assert source_names(DataConfig(path=paths)) == names
