"""An export for transformers does not show how its run was laid out, not one byte of it; any layout imports it."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.manifest import Piece
from megalite.config.derive import derive_vocabulary
from megalite.config.schema import Config
from megalite.data.open import open_data
from megalite.hf.export import export_checkpoint
from megalite.hf.saved_model import import_model, open_model
from megalite.launch.context import ParallelContext
from megalite.prepare.prepare import prepare
from megalite.train.build import build_training, derive_device, fill_with_start_values
from megalite.train.saving import owned_pieces
from tests.checkpoint.samples import index_of
from tests.layouts.matrix import FEW, FOUR, Row, Workplace, row, train_row
from tests.layouts.training import assembled, held_pieces, train

STEPS = 2
FAMILIES = ["gpt2", "llama"]  # tied embeddings, which both ends of a pipeline hold, and a head of its own
LAYOUTS = [
    row("", FOUR, pp=2),
    row("", FOUR, pp=2, vpp=2, standalone_embedding=True),
    row("", FOUR, pp=4, schedule="zb-h1"),
    row("", FOUR, tp=2, pp=2),
    row("", FOUR, FEW, pp=2, dp=2),
    row("", FOUR, {"optimizer": {"zero": 0}}, dp=2),
]
THREE_AXES = row("", FOUR, tp=2, pp=2, vpp=2)


def of_families(layouts: list[Row]) -> list[Any]:
    """Every layout of either family; of the untied one in a plain run two that split the head."""
    return [
        pytest.param(family, layout, marks=() if family == "gpt2" or at in (2, 3) else pytest.mark.long)
        for family in FAMILIES
        for at, layout in enumerate(layouts)
    ]


Singles = dict[str, tuple[Path, dict[str, bytes]]]  # by family: the folder of a run, and the files of its export


@pytest.fixture(scope="module")
def singles(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Singles:
    """What one process has trained."""
    found = {}
    for family in FAMILIES:
        run = tmp_path_factory.mktemp(family) / "run"
        save(run, workplace, row(family, FOUR), steps=STEPS)
        found[family] = run, exported(run)
    return found


def save(run: Path, workplace: Workplace, row: Row, *, steps: int, continued: Path | None = None) -> None:
    """A checkpoint in `run` after so many steps from the start or from another run's checkpoint."""
    checkpoints = None if continued is None else continued / "checkpoints"
    train_row(workplace, row, partial(train, steps=steps, continued=checkpoints, saved=run / "checkpoints"))


def exported(run: Path) -> dict[str, bytes]:
    export_checkpoint(open_model(run), run / "exported")
    return {path.name: path.read_bytes() for path in (run / "exported").iterdir()}


@pytest.mark.parametrize(("family", "layout"), of_families(LAYOUTS), ids=str)
def test_the_export_of_any_layout_is_that_of_one_process(
    workplace: Workplace, singles: Singles, tmp_path: Path, family: str, layout: Row
) -> None:
    """Of the same weights: what one process has trained, the layout takes up, saves and exports."""
    single, expected = singles[family]
    save(tmp_path, workplace, replace(layout, family=family), steps=0, continued=single)
    found = exported(tmp_path)
    assert found == expected
    assert "model.safetensors" in found


@pytest.mark.parametrize(("family", "layout"), of_families([*LAYOUTS, THREE_AXES]), ids=str)
def test_every_layout_imports_what_one_process_does(
    workplace: Workplace, singles: Singles, family: str, layout: Row
) -> None:
    single, _ = singles[family]
    assert_imports_alike(workplace, row(family, FOUR), replace(layout, family=family), single / "exported")


EXPERTS = {"model": {"moe": {"num_experts": 4}}}


@pytest.mark.parametrize(
    "layout",
    [row("llama", FOUR, EXPERTS, tp=2, dp=2, ep=2), row("llama", FOUR, EXPERTS, pp=2, dp=2, ep=2)],
    ids=str,
)
def test_experts_come_from_any_layout_and_go_to_it(
    workplace: Workplace, singles: Singles, tmp_path: Path, layout: Row
) -> None:
    single = row("llama", FOUR, EXPERTS)
    save(tmp_path / "single", workplace, single, steps=1)
    expected = exported(tmp_path / "single")
    assert b"mixtral" in expected["config.json"]
    save(tmp_path / "ranks", workplace, layout, steps=0, continued=tmp_path / "single")
    assert exported(tmp_path / "ranks") == expected
    assert_imports_alike(workplace, single, layout, tmp_path / "single" / "exported")
    assert_imports_alike(workplace, single, layout, singles["llama"][0] / "exported")  # a dense one


def assert_imports_alike(workplace: Workplace, single: Row, layout: Row, folder: Path) -> None:
    """That the ranks of a layout take from the folder what one process does."""
    work = partial(imported, str(folder))
    expected = assembled(train_row(workplace, single, work)[0])
    ranks = train_row(workplace, layout, work)
    found = assembled([piece for rank in ranks for piece in rank])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(value.any() for value in expected.values())
    for piece in (piece for rank in ranks for piece in rank):
        assert torch.equal(piece.tensor, expected[piece.name][index_of(piece)])


def imported(export: str, context: ParallelContext, config: Config) -> list[Piece]:
    """What a rank holds of the model that its run begins with."""
    config = derive_vocabulary(config, open_data(config, prepare(config)).train.vocab_size)
    config = replace(config, checkpoint=replace(config.checkpoint, init_from=export))
    training = build_training(derive_device(config, context), context)
    fill_with_start_values(training.buffers, config, context, import_model)
    return [*held_pieces(training.buffers), *owned_pieces("master.", training.buffers.owned, training.buffers.masters)]
