"""Whether a disk has room for a run's checkpoints is known before the run begins."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.checkpoint.run_folder import judge_room
from megalite.config.derive import derive
from megalite.config.schema import Config, ModelConfig, OptimizerConfig
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from megalite.launch.device import DTYPES
from megalite.train import setup
from megalite.train.build import build_training
from megalite.train.device_settings import derive_device
from megalite.train.saving import Progress, state_bytes, training_pieces

SMALL = 1000


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the disk says of itself."""
    usage = SimpleNamespace(total=10**9, free=0)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    return usage


def checkpoints(folder: Path, count: int) -> Path:
    for step in range(1, count + 1):
        (folder / f"step-{step:08d}").mkdir()
    return folder


@pytest.mark.parametrize(
    ("saved", "saves", "needed"), [(0, 9, 3), (0, 2, 2), (1, 9, 2), (1, 1, 1), (2, 9, 1), (5, 9, 1)]
)
def test_all_that_will_be_there_at_once_needs_room(
    saved: int, saves: int, needed: int, tmp_path: Path, free: SimpleNamespace
) -> None:
    folder = checkpoints(tmp_path, saved)
    free.free = needed * SMALL
    assert judge_room(folder, SMALL, keep=2, saves=saves) == ""
    free.free -= 1
    if needed == 1:
        with pytest.raises(UserError, match=r"about 1000 bytes, 999 bytes are free[\s\S]*a folder on another disk"):
            judge_room(folder, SMALL, keep=2, saves=saves)
    else:
        assert f"{needed} more are to fit (checkpoint.keep=2" in judge_room(folder, SMALL, keep=2, saves=saves)


def test_what_saves_nothing_more_needs_no_room(tmp_path: Path, free: SimpleNamespace) -> None:
    assert judge_room(tmp_path, SMALL, keep=2, saves=0) == ""


def test_a_disk_that_does_not_tell_is_trusted(tmp_path: Path, free: SimpleNamespace) -> None:
    free.total = 0
    assert judge_room(tmp_path / "later", SMALL, keep=2, saves=9) == ""


@pytest.mark.parametrize(
    ("step", "steps", "interval", "saves"),
    [(0, 20, 0, 1), (0, 20, 100, 1), (0, 20, 5, 4), (0, 21, 5, 5), (7, 20, 5, 3), (20, 20, 5, 0), (30, 20, 5, 0)],
)
def test_the_saves_that_are_still_to_come(
    step: int, steps: int, interval: int, saves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(setup, "judge_room", lambda *_, saves, keep: seen.append(saves) or "")
    config = Config(model=ModelConfig(vocab_size=96))
    config.train.steps, config.checkpoint.interval = steps, interval
    its: Any = SimpleNamespace(
        config=config, context=ParallelContext(), progress=Progress(step), folder=SimpleNamespace(checkpoints=Path("x"))
    )
    monkeypatch.setattr(setup, "state_bytes", lambda _: SMALL)
    assert setup.room_for_checkpoints(its) == ""
    assert seen == [saves]


@pytest.mark.parametrize(
    ("precision", "moments"), [*product(("fp32", "bf16", "fp16"), ("fp32", "bf16")), ("fp64", "fp32")]
)
def test_the_size_of_a_checkpoint_is_known_beforehand(precision: str, moments: str) -> None:
    model = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=96)
    config = Config(precision=precision, model=model, optimizer=OptimizerConfig(moment_dtype=moments))
    context = ParallelContext(dtype=DTYPES[precision])
    config = derive_device(derive(config, 1), context)
    training = build_training(config, context)
    held = [piece for piece in training_pieces(training) if piece.name != "optimizer.step"]
    assert sum(piece.tensor.nbytes for piece in held) == state_bytes(config)
