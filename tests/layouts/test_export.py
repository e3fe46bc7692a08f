"""What a run exports for transformers does not show how it was laid out: not one byte of it."""

from functools import partial
from pathlib import Path

import pytest
import torch

from megalite.parallel.context import ParallelContext
from megalite.parallel.layout import ParallelLayout
from megalite.parallel.startup import needs_of
from megalite.train.export import export_checkpoint
from tests.layouts.reference import reference
from tests.layouts.test_resharding import BATCH, OFF, ZERO, Cut, config_of
from tests.layouts.training import train
from tests.ranks import run_ranks

STEPS = 2
LAYOUTS: list[Cut] = [
    ({"pp": 2}, {}),
    ({"pp": 2, "vpp": 2}, {"parallel": {"standalone_embedding": True}}),
    ({"pp": 4}, {"parallel": {"schedule": "zb-h1"}}),
    ({"pp": 2, "tp": 2}, {}),
    ({"pp": 2, "dp": 2}, ZERO),
    ({"dp": 2}, OFF),
]


def save(run: Path, workplace: tuple[Path, Path], family: str, cut: Cut, *, steps: int, continued: Path | None) -> None:
    """A checkpoint in `run` after so many steps from the start or from another run's checkpoint."""
    config, layout = config_of(workplace, family, cut), ParallelLayout(**cut[0])
    checkpoints = None if continued is None else continued / "checkpoints"
    work = partial(train, steps=steps, continued=checkpoints, saved=run / "checkpoints")
    if layout.world_size == 1:
        work(ParallelContext(dtype=torch.float64), config)
    else:
        run_ranks(work, layout.world_size, config, dtype=torch.float64, layout=layout, needs=needs_of(config))


def exported(run: Path) -> dict[str, bytes]:
    export_checkpoint(run, run / "exported", pytest.fail)
    return {path.name: path.read_bytes() for path in (run / "exported").iterdir()}


@pytest.mark.parametrize("cut", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_export_of_any_layout_is_that_of_one_process(
    workplace: tuple[Path, Path], tmp_path: Path, family: str, cut: Cut
) -> None:
    """Of the same weights: what one process has trained, the layout takes up, saves and exports."""
    reference(workplace, family, BATCH)  # prepares the text
    single = tmp_path / "single"
    save(single, workplace, family, ({}, {}), steps=STEPS, continued=None)
    save(tmp_path / "ranks", workplace, family, cut, steps=0, continued=single)
    found, expected = exported(tmp_path / "ranks"), exported(single)
    assert found == expected
    assert "model.safetensors" in found


@pytest.mark.parametrize("cut", LAYOUTS[:2], ids=str)
def test_a_run_of_no_steps_exports_the_start_values_of_one_process(
    workplace: tuple[Path, Path], tmp_path: Path, cut: Cut
) -> None:
    reference(workplace, "gpt2", BATCH)
    for name, layout in (("single", ({}, {})), ("ranks", cut)):
        save(tmp_path / name, workplace, "gpt2", layout, steps=0, continued=None)
    assert exported(tmp_path / "ranks") == exported(tmp_path / "single")
