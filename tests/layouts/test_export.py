"""An export for transformers does not show how its run was laid out, not one byte of it; any layout imports it."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.pieces import Piece
from megalite.config.derive import derive_vocabulary
from megalite.config.schema import Config
from megalite.data.open import open_data
from megalite.hf.export import export_checkpoint
from megalite.hf.import_model import import_model
from megalite.hf.saved_model import open_model
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.prepare.prepare import prepare
from megalite.train.build import build_training, derive_device, fill_with_imported_values, needs_of
from megalite.train.state import held_pieces, owned_pieces
from tests.layouts.reference import reference
from tests.layouts.test_resharding import BATCH, OFF, ZERO, Cut, config_of
from tests.layouts.training import assembled, train
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


def imported(context: ParallelContext, config: Config) -> list[Piece]:
    """What a rank holds of the model that its run begins with."""
    training = build_training(derive_device(config, context), context)
    fill_with_imported_values(training.buffers, import_model, config, context)
    return [*held_pieces(training.buffers), *owned_pieces("master.", training.buffers.owned, training.buffers.masters)]


@pytest.mark.parametrize("cut", [*LAYOUTS, ({"pp": 2, "vpp": 2, "tp": 2}, {})], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_layout_imports_what_one_process_does(
    workplace: tuple[Path, Path], tmp_path: Path, family: str, cut: Cut
) -> None:
    """Tied embeddings (gpt2), which both ends of a pipeline hold, and a head of its own (llama)."""
    reference(workplace, family, BATCH)
    save(tmp_path / "run", workplace, family, ({}, {}), steps=0, continued=None)
    exported(tmp_path / "run")

    def config_in(cut: Cut) -> Config:
        config = config_of(workplace, family, cut)
        vocabulary = open_data(config, prepare(config)).vocab_size
        checkpoint = replace(config.checkpoint, init_from=str(tmp_path / "run" / "exported"))
        return derive_vocabulary(replace(config, checkpoint=checkpoint), vocabulary)

    expected = assembled(imported(ParallelContext(dtype=torch.float64), config_in(({}, {}))))
    config, layout = config_in(cut), ParallelLayout(**cut[0])
    ranks = run_ranks(imported, layout.world_size, config, dtype=torch.float64, layout=layout, needs=needs_of(config))
    found = assembled([piece for rank in ranks for piece in rank])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for piece in (piece for rank in ranks for piece in rank):
        assert torch.equal(piece.tensor, expected[piece.name][piece.box])


def exported(run: Path) -> dict[str, bytes]:
    export_checkpoint(open_model(run, pytest.fail), run / "exported")
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
