"""However the layers are laid over a pipeline and whatever its schedule, training is what one process computes, in
fp64; a broken pipeline is caught."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.derive import derive
from megalite.config.schema import ParallelConfig
from megalite.layout.ranks import ParallelLayout
from megalite.train.build import needs_of
from tests.layouts import mutants
from tests.layouts.reference import reference
from tests.layouts.test_tensor_parallel import Mutant, Overrides, merged
from tests.layouts.training import Trace, assert_same_training, small_config, train
from tests.ranks import run_ranks

RAGGED = {"data": {"mask_end_of_document": True, "cross_document_attention": False}}
FOUR = {"model": {"num_layers": 4}}
EIGHT = {"model": {"num_layers": 8}}
FULL = {"train": {"recompute": "full"}}
SELECTIVE = {"train": {"recompute": "selective", "recompute_modules": ["attention", "norm", "activation"]}}
DROPPED = {"model": {"num_layers": 4, "dropout": 0.1, "attention_dropout": 0.3, "embedding_dropout": 0.2}}
LARGE = {"train": {"micro_batch_size": 4}}  # three microbatches without data parallelism
TWO = {"train": {"micro_batch_size": 6}}
ONE = {"train": {"micro_batch_size": 12}}
SMALL_BUCKETS = {"optimizer": {"bucket_size": 6000}}
GROWING = {"train": {"micro_batch_size": 1, "batch_ramp": [4, 4, 16], "skip_steps": [2]}}


def pipeline(**settings: Any) -> Overrides:
    return {"parallel": settings}


Row = tuple[str, Overrides, Overrides]  # family, what the single process knows, what the layout adds
ROWS: list[Row] = [
    ("gpt2", LARGE, pipeline(pp=2)),
    ("llama", merged(TWO, RAGGED), pipeline(pp=2, schedule="gpipe")),
    ("llama", ONE, pipeline(pp=2)),  # fewer microbatches than ranks
    ("qwen3", merged(FOUR, LARGE), pipeline(pp=4)),
    ("gpt2", merged(FOUR, LARGE), pipeline(pp=4, schedule="zb-h1")),
    ("llama", merged(FOUR, {"train": {"micro_batch_size": 3}}, RAGGED), pipeline(pp=4, schedule="gpipe")),
    ("gpt2", merged(FOUR, {"train": {"micro_batch_size": 3}}), pipeline(pp=2, vpp=2)),
    ("llama", merged(FOUR, TWO), pipeline(pp=2, vpp=2)),  # as many microbatches as ranks
    ("llama", merged(FOUR, {"train": {"micro_batch_size": 2}}), pipeline(pp=2, vpp=2, microbatch_group_size=4)),  # 4, 2
    ("llama", merged(EIGHT, {"train": {"micro_batch_size": 2}}), pipeline(pp=4, vpp=2)),
    ("gpt2", merged(FOUR, LARGE, SELECTIVE), pipeline(pp=2, schedule="zb-h1", tp=2)),
    ("gpt2", merged({"model": {"num_layers": 3}}, LARGE), pipeline(pp=2, first_stage_layers=1)),
    ("gpt2", merged(FOUR, LARGE), pipeline(pp=3, standalone_embedding=True)),
    ("gpt2", merged(DROPPED, LARGE), pipeline(pp=2, vpp=2, schedule="interleaved")),
    ("llama", LARGE, pipeline(pp=3, pipeline_layout="Et||tL")),  # a rank that holds nothing
    ("llama", merged(FOUR, LARGE), pipeline(pp=2, vpp=2, standalone_embedding=True)),  # a chunk that only passes on
    ("llama", merged(LARGE, FULL), pipeline(pp=2, tp=2)),
    ("gpt2", {"train": {"micro_batch_size": 2}}, merged(pipeline(pp=2, dp=2), SMALL_BUCKETS)),
    ("gpt2", merged(FOUR, {"train": {"micro_batch_size": 1}}), merged(pipeline(pp=2, vpp=2, dp=2), SMALL_BUCKETS)),
    (
        "gpt2",
        merged({"train": {"micro_batch_size": 2}}, FULL),
        merged(pipeline(pp=2, dp=2, schedule="zb-h1"), SMALL_BUCKETS),
    ),
    ("qwen3", {"train": {"micro_batch_size": 3}}, pipeline(pp=2, tp=2, dp=2)),
    ("llama", merged(FOUR, GROWING, RAGGED), pipeline(pp=2, vpp=2, dp=2)),  # 2, 4 and 6 microbatches of a replica
]


LONG_ROWS: list[Row] = [
    (family, merged(FOUR, {"train": {"micro_batch_size": micro}}, recompute, masks), pipeline(**schedule, **axes))
    for family in ("gpt2", "llama")
    for schedule in (
        {"pp": 2},
        {"pp": 4},
        {"pp": 2, "schedule": "gpipe"},
        {"pp": 4, "schedule": "gpipe"},
        {"pp": 2, "schedule": "zb-h1"},
        {"pp": 4, "schedule": "zb-h1"},
        {"pp": 2, "vpp": 2},
    )
    for micro, axes in ((1, {}), (3, {}), (6, {}), (3, {"tp": 2}), (2, {"dp": 2}), (3, {"tp": 2, "dp": 2}))
    for recompute, masks in (({}, RAGGED), (FULL, {}))
    if "vpp" not in schedule or 12 // micro // axes.get("dp", 1) >= 2
]


def train_row(workplace: tuple[Path, Path], row: Row, function: Any = train) -> tuple[list[Trace], Trace]:
    """Traces of all ranks, and of the single process, whose model is in one piece."""
    family, shared, layout = row
    sizes = dict(layout["parallel"])
    world = ParallelLayout(**{axis: sizes.get(axis, 1) for axis in ("tp", "dp", "pp", "vpp")})
    sizes.pop("dp", None)
    config = small_config(*workplace, family, **merged(shared, {"optimizer": layout.get("optimizer", {})}))
    config.parallel = ParallelConfig(**sizes)
    config = derive(config, world.world_size)
    plain = {name: value for name, value in shared.items() if name != "train"}
    kept = {key: value for key, value in shared.get("train", {}).items() if not key.startswith("recompute")}
    _, expected = reference(workplace, family, merged(plain, {"train": kept}))
    assert min(expected.grad_norms) > 10 * config.optimizer.clip_grad, "clipping is part of what is compared"
    found = run_ranks(
        function, world.world_size, config, dtype=torch.float64, layout=world, needs=needs_of(config), timeout=240
    )
    return found, expected


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_ranks_train_like_one_process(workplace: tuple[Path, Path], row: Row) -> None:
    assert_same_training(*train_row(workplace, row))


@pytest.mark.long
@pytest.mark.parametrize("row", LONG_ROWS, ids=str)
def test_ranks_train_like_one_process_everywhere(workplace: tuple[Path, Path], row: Row) -> None:
    assert_same_training(*train_row(workplace, row))


BROKEN: list[tuple[Mutant, Row]] = [
    (mutants.no_sum_over_tied_embeddings, ("gpt2", LARGE, pipeline(pp=2))),
    (mutants.tied_embeddings_counted_twice, ("gpt2", LARGE, pipeline(pp=2))),
    (mutants.weight_gradients_forgotten, ("llama", LARGE, pipeline(pp=2, schedule="zb-h1"))),
    (mutants.sync_before_the_weight_gradients, ("llama", TWO, pipeline(pp=2, dp=2, schedule="zb-h1"))),
    (mutants.activations_of_another_microbatch, ("llama", merged(LARGE, RAGGED), pipeline(pp=2))),
    (mutants.loss_told_by_every_stage, ("llama", LARGE, pipeline(pp=2))),
]


@pytest.mark.parametrize(("mutant", "row"), BROKEN, ids=lambda part: getattr(part, "__name__", str(part)))
def test_a_broken_pipeline_is_caught(workplace: tuple[Path, Path], mutant: Mutant, row: Row) -> None:
    traces, expected = train_row(workplace, row, mutant)
    with pytest.raises(AssertionError):
        assert_same_training(traces, expected)


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # untied and tied embeddings
def test_all_schedules_give_the_same_bits(workplace: tuple[Path, Path], family: str) -> None:
    """Each takes the microbatches of a chunk in one order."""
    shared = merged(FOUR, LARGE)
    found = [
        train_row(workplace, (family, shared, pipeline(pp=2, schedule=schedule)))[0]
        for schedule in ("1f1b", "gpipe", "zb-h1")
    ]
    for traces in found[1:]:
        for one, other in zip(traces, found[0], strict=True):
            assert (one.losses, one.grad_norms) == (other.losses, other.grad_norms)
            assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(one.masters, other.masters, strict=True))
