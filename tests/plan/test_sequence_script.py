"""`megalite plan sequence`: how a sequence is shared, in words and as a picture of the plans that ranks follow."""

from pathlib import Path

import pytest

from megalite.commands import sequence
from megalite.plan.sequence_picture import steps_of
from tests.plan import running
from tests.plan.running import Done


def run(*arguments: str, cwd: Path | None = None) -> Done:
    return running.run(sequence.main, *arguments, cwd=cwd)


def test_a_ring_is_told_and_drawn(tmp_path: Path) -> None:
    words = ("parallel.cp=2", "parallel.cp_comm=ring", "train.seq_length=64", "model.num_attention_heads=4")
    done = run(*words, "--picture", "ring.svg", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    told = done.stdout.splitlines()
    assert told[0] == "cp 2: ring (as set)"
    assert told[1].endswith("3,072 bytes per token that it holds")  # 6 x 4 heads x 64 x 2 bytes
    assert told[3].split() == ["rank", "0", "holds", "tokens", "0-15", "and", "48-63", "computes", "1,040", "scores"]
    assert [path.name for path in tmp_path.iterdir()] == ["ring.svg"]


@pytest.mark.parametrize("ring", [2, 3, 5])
def test_every_rank_computes_as_many_squares_in_every_step(ring: int) -> None:
    found = steps_of(ring)
    assert set(found) == {(row, column) for row in range(2 * ring) for column in range(row + 1)}
    assert [sum(each == (block, 0) for each in found.values()) for block in range(ring)] == [3] * ring
    for step in range(1, ring):
        assert [sum(each == (block, step) for each in found.values()) for block in range(ring)] == [2] * ring


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train.seq_length=64",), ["parallel.cp=1", "one rank has the whole sequence"]),
        (("parallel.cp=2", "train.seq_length=63"), ["train.seq_length=63", "not a multiple of 2 x parallel.cp=2"]),
        (("parallel.cp=2", "--picture", "x.svg"), ["--picture", "no steps to draw", "parallel.cp_comm=ring"]),
    ],
)
def test_what_cannot_be_shared_is_refused(words: tuple[str, ...], said: list[str], tmp_path: Path) -> None:
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert all(part in done.stderr for part in said), done.stderr
