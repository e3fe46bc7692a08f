"""Whether a disk has room for a run's checkpoints is known before the run begins."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite.checkpoint.run_folder import require_room
from megalite.config.derive import derive
from megalite.config.schema import Config, ModelConfig, OptimizerConfig
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from megalite.launch.device import DTYPES
from megalite.train.build import build_training, derive_device
from megalite.train.saving import state_bytes, training_pieces


@pytest.mark.parametrize("total", [10**9, 0])
def test_a_checkpoint_needs_room_where_the_disk_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=total, free=999))
    require_room(tmp_path / "later", 999)
    if total:
        with pytest.raises(UserError, match=r"about 0.0 MiB, 0.0 MiB are free[\s\S]*a folder on another disk"):
            require_room(tmp_path, 1000)
    else:
        require_room(tmp_path, 1000)


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
