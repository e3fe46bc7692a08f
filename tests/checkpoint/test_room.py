"""Whether a disk has room for a run's checkpoints is known before the run begins."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite.checkpoint.room import judge_room
from megalite.config.derive import derive
from megalite.config.problems import UserError
from megalite.config.schema import Config, ModelConfig, OptimizerConfig
from megalite.parallel.context import ParallelContext
from megalite.parallel.device import DTYPES
from megalite.train.job import derive_device
from megalite.train.state import state_bytes, training_pieces
from megalite.train.training import build_training

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


@pytest.mark.parametrize(("saved", "needed"), [(0, 3), (1, 2), (2, 1), (5, 1)])
def test_all_that_will_be_there_at_once_needs_room(
    saved: int, needed: int, tmp_path: Path, free: SimpleNamespace
) -> None:
    folder = checkpoints(tmp_path, saved)
    free.free = needed * SMALL
    assert judge_room(folder, SMALL, keep=2) == ""
    free.free -= 1
    if needed == 1:
        with pytest.raises(UserError, match=r"needs about 1000 bytes, 999 bytes are free"):
            judge_room(folder, SMALL, keep=2)
    else:
        assert f"{needed} more are to fit (checkpoint.keep=2" in judge_room(folder, SMALL, keep=2)


def test_a_disk_that_does_not_tell_is_trusted(tmp_path: Path, free: SimpleNamespace) -> None:
    free.total = 0
    assert judge_room(tmp_path / "later", SMALL, keep=2) == ""


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
