"""`megalite plan schedule`: the launcher's words in, a checked schedule and its picture out, mistakes told at once."""

import subprocess
import sys
from pathlib import Path

import pytest

from megalite.commands.plan import schedule
from tests.plan import running
from tests.plan.running import Done

SMALL = ("train.global_batch_size=8", "train.micro_batch_size=1")


def run(*arguments: str, cwd: Path | None = None) -> Done:
    return running.run(schedule, *arguments, cwd=cwd)


def test_a_schedule_is_told_and_drawn(tmp_path: Path) -> None:
    words = ("parallel.pp=4", "parallel.vpp=2", "parallel.schedule=interleaved", *SMALL, "--picture", "drawn.svg")
    done = run(*words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    told = done.stdout.splitlines()
    assert told[0] == "interleaved: pp 4, vpp 2, 8 microbatches"
    assert told[1].startswith("step 28.5 forward passes of a rank; idle 15.8% of it (bubble: 0.1875 ")
    assert told[3].startswith("rank 0   holds at most 5.5 microbatches 0F0 0F1 0F2 0F3 1F0")
    assert [path.name for path in tmp_path.iterdir()] == ["drawn.svg"]


@pytest.mark.parametrize(
    ("words", "title"),
    [
        (("parallel.pp=4", "parallel.vpp=2", *SMALL), "interleaved: pp 4, vpp 2, 8 microbatches"),
        (("parallel.pp=2", "parallel.schedule=zb-h1", "--dp", "2", *SMALL), "zb-h1: pp 2, 4 microbatches"),
        (("parallel.pp=2", "train.global_batch_size=32", "model=gpt2", "parallel.tp=2"), "1f1b: pp 2, 8 microbatches"),
    ],
)
def test_what_is_not_set_is_derived_as_for_training(words: tuple[str, ...], title: str) -> None:
    assert run(*words).stdout.splitlines()[0] == title


EVERYTHING = "parallel.pipe=4 model=gpt5 parallel.pp=x --picture=a.pdf"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("parallel.pp=4 parallel.schedule=interleaved", ["interleaved takes several chunks of layers for each rank"]),
        (
            "parallel.pp=4 parallel.vpp=2 train.global_batch_size=6 train.micro_batch_size=2",
            ["interleaved needs a microbatch for each of parallel.pp=4 ranks", "fix: train.global_batch_size=8 or 10"],
        ),
        ("parallel.pp=2 parallel.schedule=1f2b", ["unknown choice\n      fix: choices: 1f1b, "]),
        (EVERYTHING, ["4 problems", "must end in .svg", "unknown setting", "'gpt5'", "must be a whole number"]),
    ],
)
def test_mistakes_are_refused_with_status_two_and_nothing_written(words: str, told: list[str], tmp_path: Path) -> None:
    done = run(*words.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert all(one in done.stderr for one in told), done.stderr
    assert "Traceback" not in done.stderr
    assert not [*tmp_path.iterdir()]


def test_a_reader_that_has_seen_enough_ends_it_quietly() -> None:
    sizes = ["parallel.pp=16", "train.global_batch_size=512", "train.micro_batch_size=1"]
    command = [sys.executable, "-m", "megalite", "plan", "schedule", *sizes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 0
