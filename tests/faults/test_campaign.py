"""The fault campaign finds what it looks for. (That megalite holds: docs/reliability.md, whose command CI runs.)"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.checkpoint import reading, store
from megalite.commands.train import main_to_the_end
from megalite.launch.process import StopSignals
from megalite.launch.watchdog import Watchdog
from megalite.train.history import METRICS
from tests.checkpoint.samples import SINGLE, values, whole
from tests.faults import campaign as faults
from tests.faults import trial
from tests.faults.campaign import campaign, flip_bits
from tests.faults.trial import STEPS, Trial
from tests.ranks import start_forkserver


def run_of(words: list[str]) -> Path:
    return Path(next(word for word in words if word.startswith("run_dir=")).removeprefix("run_dir="))


def continues_otherwise(words: list[str]) -> int:
    """A training that computes something else after a restart."""
    return main_to_the_end([*words, *(["optimizer.clip_grad=0.1"] if (run_of(words) / "run.json").exists() else [])])


def has_no_watchdog(words: list[str]) -> int:
    Watchdog._watch = Watchdog._answer_calls = lambda self: None  # type: ignore[method-assign]
    return main_to_the_end(words)


def ends_on_a_signal(words: list[str]) -> int:
    StopSignals._handle = lambda self, number, frame: os._exit(1)  # type: ignore[method-assign]
    return main_to_the_end(words)


def stops_without_a_save(words: list[str]) -> int:
    """The rank that gets the signal tells the other one by a file."""
    (run := run_of(words)).mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: (run / "stop").touch())
    (run / f"listens-{os.environ['RANK']}").touch()
    while not (run / "stop").exists():
        if len([*run.glob("listens-*")]) == 2:
            (run / METRICS).write_text(json.dumps({"step": STEPS - 1, "loss": 1.0}) + "\n")
        time.sleep(0.01)
    return 0


def plays(words: list[str]) -> int:
    """What a training shows to the outside, with nothing behind it; each other step is in a save."""
    (run := run_of(words)).mkdir(exist_ok=True)
    unfinished = run / "checkpoints" / ".tmp-step-1"
    for step in range(1, STEPS + 1):
        if os.environ["RANK"] == "0":
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")
            unfinished.mkdir(parents=True) if step % 2 else unfinished.rmdir()
        time.sleep(0.1)
    return 0


def blames_another(words: list[str]) -> int:
    (logs := run_of(words) / "logs").mkdir(parents=True, exist_ok=True)
    (logs / f"hang-{os.environ['RANK']}.json").write_text(json.dumps({"finding": "no answer from rank 7 on a"}))
    return plays(words)


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Trial]:
    start_forkserver()
    found = Trial(plays, tmp_path, [], random.Random(0), world_size=2)
    yield found
    found.kill()


def test_a_step_that_is_not_saved_after_sigterm_is_a_flaw(played: Trial) -> None:
    played.main = stops_without_a_save
    played.start()
    with pytest.raises(ValueError, match=f"step {STEPS - 1} was recorded, but not saved"):
        faults.FAULTS["SIGTERM to a rank"](played)


def test_a_stopped_rank_in_whose_place_another_is_reported_is_a_flaw(played: Trial) -> None:
    played.main = blames_another
    played.start()
    with pytest.raises(ValueError, match="stood still, but it was reported: no answer from rank 7"):
        faults.FAULTS["SIGSTOP of a rank"](played)


@pytest.mark.long
@pytest.mark.parametrize(
    ("broken", "fault", "flaw"),
    [
        (continues_otherwise, "SIGKILL of a rank", "its records differ from the undisturbed run's"),
        (has_no_watchdog, "SIGSTOP of a rank", "ValueError: nobody reported that rank "),
        (ends_on_a_signal, "SIGTERM to a rank", "ValueError: SIGTERM to a rank ended them with ["),
    ],
)
def test_a_training_with_a_mistake_is_noticed_and_a_sound_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: trial.Main, fault: str, flaw: str
) -> None:
    monkeypatch.setattr(faults, "LAYOUTS", ((),))
    monkeypatch.setattr(faults, "FAULTS", {fault: faults.FAULTS[fault]})
    [outcome] = campaign(broken, tmp_path / "trials", runs=1, seed=0)
    assert outcome.flaws[0].startswith(flaw)
    [outcome] = campaign(main_to_the_end, tmp_path / "sound", runs=1, seed=0)
    assert not outcome.flaws


def test_the_documented_command_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert subprocess.run([sys.executable, "-m", "tests.faults", "train.steps=1"], check=False).returncode == 2
    assert "no setting of its runs can be chosen" in capfd.readouterr().err


def test_flips_are_noticed_unless_nobody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = store.save(tmp_path, 1, whole(values(1)), {}, SINGLE, keep=1)
    assert flip_bits(saved.path, 60, seed=0) == []
    monkeypatch.setattr(reading, "file_fault", lambda *file: None)
    unnoticed = flip_bits(saved.path, 60, seed=0)
    assert len(unnoticed) >= 20
    assert all("rank-00000.safetensors" in place or "state.json" in place for place in unnoticed)
    assert [path.name for path in tmp_path.iterdir()] == [saved.path.name], "the copy is gone"
