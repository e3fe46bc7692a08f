"""Validation figures are those of the held-out samples: no batch size and no layout changes them, and bytes are those
of the labels that count."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.derive import derive, derive_vocabulary
from megalite.config.schema import Config
from megalite.data.batches import validation_batches
from megalite.data.open import open_data
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.prepare.prepare import prepare
from megalite.train.build import build_training, data_share, derive_device, fill_with_start_values, needs_of
from megalite.train.evaluate import Sums, ValidationMetrics, evaluate
from tests.layouts.training import small_config
from tests.ranks import run_ranks

CPU = torch.device("cpu")
BATCHES = {"mask_end_of_document": True, "cross_document_attention": False, "validation_fraction": 0.02}
LAYOUTS = [(1, 1, {}), (7, 7, {}), (64, 1, {}), (12, 3, {"dp": 2}), (44, 4, {"tp": 2}), (9, 1, {"pp": 2})]
LAYOUTS += [(44, 4, {"cp": 2})]


def figures_of(context: ParallelContext, config: Config) -> dict[str, ValidationMetrics]:
    """Of the start values on all that is held out and in sets."""
    data = open_data(config, prepare(config))
    config = derive_device(derive_vocabulary(config, data.train.vocab_size), context)
    training = build_training(config, context)
    fill_with_start_values(training.buffers, config, context)
    found = {}
    for name, source in data.evaluated.items():
        batches = validation_batches(source, config, context.device, data_share(context))
        found[name] = evaluate(training, context, batches, data.bytes_of_ids)
    return found


@pytest.mark.parametrize(("size", "micro", "axes"), LAYOUTS)
def test_neither_the_batch_size_nor_the_layout_changes_the_validation_figures(
    workplace: tuple[Path, Path], size: int, micro: int, axes: dict[str, int]
) -> None:
    def config_of(size: int, micro: int, **parallel: Any) -> Config:
        sizes = {"global_batch_size": size, "micro_batch_size": micro, "seq_length": 16, "eval_batches": 999}
        sets = {"validation": {"web": few[0], "both": few}}
        return small_config(*workplace, data={**BATCHES, **sets}, train=sizes, parallel=parallel)

    few = [str(workplace[0].with_name(f"few-{name}.jsonl")) for name in ("web", "code")]
    for path in map(Path, few):
        lines = path.with_name(path.name.removeprefix("few-")).read_text().splitlines()
        path.write_text("\n".join(lines[:60]))
    prepare(config_of(5, 5))
    alone = figures_of(ParallelContext(dtype=torch.float64), config_of(5, 5))
    data = open_data(config_of(5, 5), prepare(config_of(5, 5)))
    assert data.validation is not None
    samples = data.validation.without_repeats()
    assert size == 1 or samples % size, "the last batch is not full"
    assert 0.8 * 16 * samples < alone["held_out"].tokens < 16 * samples
    assert len({round(figures.loss, 3) for figures in alone.values()}) == len(alone) == 3
    layout = ParallelLayout(**axes)
    config = config_of(size, micro, **{axis: count for axis, count in axes.items() if axis != "dp"})
    for found in run_ranks(
        figures_of, layout.world_size, config, dtype=torch.float64, layout=layout, needs=needs_of(config)
    ):
        assert found.keys() == alone.keys()
        for name, figures in found.items():
            torch.testing.assert_close(vars(figures), vars(alone[name]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "texts", [["ab" * 160_000 + "漢" * 40_000], ["ab" * 9_000, "漢" * 3_000]], ids=["one", "blend"]
)
def test_bytes_are_those_of_the_labels_that_count(texts: list[str], tmp_path: Path) -> None:
    """One byte at the front and three at the end; and parts of a blend that differ."""
    config = Config(device="cpu", tokenizer="char")
    paths = [tmp_path / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    config.data = replace(
        config.data, source="text", path=list(map(str, paths)), cache_dir=str(tmp_path / "cache"), workers=1
    )
    config.data.validation_fraction = 0.9
    config.train = replace(config.train, seq_length=64, global_batch_size=8, eval_batches=10**6)
    config = derive(config)
    data = open_data(config, prepare(config))
    assert data.tokenizer is not None
    assert data.validation is not None
    sums, text = Sums(data.bytes_of_ids, CPU), ""
    for [*batches] in validation_batches(data.validation, config, CPU):
        sums.add(torch.zeros(()), batches)
        text += "".join(data.tokenizer.decode(batch.labels[batch.loss_mask].tolist()) for batch in batches)
    figures = sums.metrics()
    assert (figures.tokens, figures.bytes) == (len(text), len(text.encode()))
    assert 1.1 < figures.bytes / figures.tokens < 2.9
