"""The fault campaign finds what it looks for. (That megalite holds: docs/reliability.md, whose command CI runs.)"""

from pathlib import Path

import pytest

from megalite.checkpoint import store
from megalite.commands.train import main_to_the_end
from megalite.verify import faults
from megalite.verify.bit_flips import flip_bits
from megalite.verify.faults import Outcome, campaign, table
from tests.checkpoint.samples import SINGLE, values, whole


def continues_otherwise(words: list[str]) -> int:
    """A training that computes something else after a restart."""
    run = Path(next(word for word in words if word.startswith("run_dir=")).removeprefix("run_dir="))
    return main_to_the_end([*words, *(["optimizer.clip_grad=0.1"] if (run / "run.json").exists() else [])])


@pytest.mark.long
def test_a_run_that_goes_on_in_another_way_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "LAYOUTS", ((),))
    [outcome] = campaign(continues_otherwise, tmp_path / "trials", runs=1, seed=0)
    assert outcome.flaws == ["its records differ from the undisturbed run's"]
    [outcome] = campaign(main_to_the_end, tmp_path / "sound", runs=1, seed=0)
    assert not outcome.flaws


def test_flips_are_noticed_unless_nobody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = store.save(tmp_path, 1, whole(values(1)), {}, SINGLE, keep=1)
    assert flip_bits(saved.path, 60, seed=0) == []
    monkeypatch.setattr(store, "file_fault", lambda *file: None)
    unnoticed = flip_bits(saved.path, 60, seed=0)
    assert len(unnoticed) >= 20
    assert all("rank-00000.safetensors" in place or "state.json" in place for place in unnoticed)
    assert [path.name for path in tmp_path.iterdir()] == [saved.path.name], "the copy is gone"


def test_a_row_for_each_fault() -> None:
    outcomes = [Outcome("a", [], 3, 1.0), Outcome("b", ["lost"], 0, 0.0), Outcome("a", [], 5, 4.0)]
    assert table(outcomes)[2:] == [
        "| a | 2 | 2 | 4 (5) | 2.5 s (4.0 s) |",
        "| b | 1 | 0 | 0 (0) | 0.0 s (0.0 s) |",
        "| all | 3 | 2 | | |",
    ]
