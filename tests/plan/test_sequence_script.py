"""`megalite plan sequence`: how a sequence is shared, in words."""

import pytest

from megalite.commands import sequence
from tests.plan import running
from tests.plan.running import Done


def run(*arguments: str) -> Done:
    return running.run(sequence.main, *arguments)


def test_a_ring_is_told() -> None:
    words = ("parallel.cp=2", "parallel.cp_comm=ring", "train.seq_length=64", "model.num_attention_heads=4")
    done = run(*words)
    assert (done.returncode, done.stderr) == (0, "")
    told = done.stdout.splitlines()
    assert told[0] == "cp 2: ring (as set)"
    assert told[1].endswith("3,072 bytes per token that it holds")  # 6 x 4 heads x 64 x 2 bytes
    assert told[3].split() == ["rank", "0", "holds", "tokens", "0-15", "and", "48-63", "computes", "1,040", "scores"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train.seq_length=64", "parallel.cp=1: one rank has the whole sequence"),
        ("parallel.cp=2 train.seq_length=63", "train.seq_length=63: not a multiple of 4"),
    ],
)
def test_what_cannot_be_shared_is_refused(words: str, said: str) -> None:
    done = run(*words.split())
    assert done.returncode == 2
    assert said in done.stderr
