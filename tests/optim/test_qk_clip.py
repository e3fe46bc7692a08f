"""QK-clip in one process, against logits written out in full; its rows, its tiles, and what it refuses."""

from dataclasses import replace
from itertools import combinations
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megalite.config.schema import Config
from megalite.config.step_plan import PlannedStep
from megalite.data.batch import Batch
from megalite.data.batches import StepBatches
from megalite.kernels import attention as module
from megalite.kernels.attention import raise_largest
from megalite.launch.context import ParallelContext
from megalite.layout.buffer_layout import BufferSlot, OwnedRange
from megalite.layout.parameters import Shard, ShardBox
from megalite.model.attention import Attention
from megalite.model.gpt import GPT
from megalite.model.parameters import gpt_parameters
from megalite.optim.optimizer import make_optimizer
from megalite.optim.qk_clip import rows_of
from megalite.train.build import Training, build_training
from megalite.train.metrics import Meter, StepMetrics
from megalite.train.step import TrainStep
from tests.config.refusal import refusal, settings
from tests.model.small import GPT2_LIKE, random_batch, small
from tests.optim.small_model import small_config

S, HEADS, SIZE = 20, 4, 10
SIZES = {"hidden_size": 24, "num_attention_heads": HEADS, "head_size": SIZE, "ffn_hidden_size": 36, "vocab_size": 53}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {**SIZES, **GPT2_LIKE},
    "llama": {**SIZES, "num_key_value_heads": 2, "tie_embeddings": False},
}
DTYPES = {"fp64": torch.float64, "bf16": torch.bfloat16}


def build(model: str, precision: str = "fp64", **optimizer: Any) -> tuple[Config, Training, TrainStep]:
    """Parameters of size 0.3, biases and norms too, so that groups and layers differ."""
    train = {"seq_length": S, "micro_batch_size": 3, "compile": False}
    config = small_config(model=MODELS[model], optimizer={"lr": 0.02, **optimizer}, train=train)
    config.precision, context = precision, ParallelContext(dtype=DTYPES[precision])
    training, generator = build_training(config, context), torch.Generator().manual_seed(7)
    records = gpt_parameters(config.model)
    training.buffers.fill((one.name, 0.4 * torch.randn(one.shape, generator=generator)) for one in records)
    return config, training, TrainStep(training, config.optimizer, context)


def batches_of(model: str) -> list[Batch]:
    """Two microbatches; of llama with documents."""
    found = [random_batch(small(vocab_size=53), s=S, seed=seed) for seed in (1, 2)]
    documents = torch.arange(S).expand(3, S).div(7, rounding_mode="floor").int()
    return found if model == "gpt2" else [replace(each, documents=documents) for each in found]


def masters_of(training: Training) -> dict[str, Tensor]:
    """Copies by name."""
    masters = zip(training.buffers.layout.buckets, training.buffers.masters, strict=True)
    places = ((slot, master) for bucket, master in masters for slot in bucket.slots)
    return {slot.record.name: master[slot.start : slot.stop].view(slot.shard.shape).clone() for slot, master in places}


def logits_of(model: GPT, batch: Batch, layer: int) -> Tensor:
    """[b, groups, queries of a group, s, s], -inf where a query does not see a key."""
    attention, inputs = model.blocks[str(layer)].attention, list[Tensor]()
    assert isinstance(attention, Attention)
    hook = attention.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        model(batch)
    hook.remove()
    (x,) = inputs
    qkv = torch.einsum("sbh,gndh->bgnsd", x, attention.qkv.weight.detach())
    if attention.qkv.bias is not None:
        qkv += attention.qkv.bias.detach()[None, :, :, None]
    if model.config.position == "rope":
        half = SIZE // 2
        angles = torch.arange(S)[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
        turned = torch.complex(qkv[..., :half], qkv[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        qkv = torch.cat((turned.real, turned.imag), -1)
    logits = torch.einsum("bgqsd,bgtd->bgqst", qkv[:, :, :-2], qkv[:, :, -2]) / SIZE**0.5
    seen = torch.ones(S, S).tril().bool().expand(3, S, S)
    if batch.documents is not None:
        seen = seen & (batch.documents[:, :, None] == batch.documents[:, None])
    hidden = ~seen[:, None, None]
    return logits.masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_multiplies_queries_and_keys_of_groups_above_the_threshold(model: str, name: str) -> None:
    batches, count = batches_of(model), 400
    _, plain, step = build(model, name=name)
    largest = torch.stack(
        [
            torch.stack([logits_of(plain.chunks[0], batch, layer).amax((0, 2, 3, 4)) for batch in batches]).amax(0)
            for layer in range(2)
        ]
    )
    threshold = float(largest.median())
    step(batches, count, 0.02)
    _, clipped, step = build(model, name=name, qk_clip=threshold)
    found = step(batches, count, 0.02).read().largest_logits
    torch.testing.assert_close(found, largest.amax(1).tolist(), rtol=1e-12, atol=0)
    wanted, assorted = masters_of(plain), largest > threshold
    assert bool(assorted.any()), "some are clipped"
    assert not bool(assorted.all()), "some are not"
    for layer, factors in enumerate((threshold / largest.clamp(min=threshold)).sqrt()):
        for kind in ("weight", "bias")[: 2 if model == "gpt2" else 1]:
            rows = wanted[f"blocks.{layer}.attention.qkv.{kind}"][:, :-1]
            rows *= factors.view(-1, *[1] * (rows.dim() - 1))
    for at, value in masters_of(clipped).items():
        torch.testing.assert_close(value, wanted[at], rtol=1e-12 if ".qkv." in at else 0, atol=0, msg=at)


def test_a_step_after_the_clip_has_logits_of_the_threshold() -> None:
    """With a rate near 0 the clip is all that a step does."""
    _, training, step = build("gpt2", qk_clip=1.5)
    batches = batches_of("gpt2")
    logits = [step(batches, 400, 1e-12).read().largest_logits for _ in range(4)]
    assert min(logits[0]) > 1.6
    assert max(logits[-1]) == pytest.approx(1.5, rel=1e-6)
    assert torch.equal(training.buffers.parameters[0], training.buffers.masters[0])


def test_a_skipped_step_clips_nothing_and_parameters_are_rounded_masters() -> None:
    _, training, step = build("gpt2", "bf16", qk_clip=0.5)
    before = masters_of(training)
    step(batches_of("gpt2"), 0, 0.02)
    assert all(torch.equal(value, before[name]) for name, value in masters_of(training).items())
    step(batches_of("gpt2"), 400, 0.02)
    for parameters, masters in zip(training.buffers.parameters, training.buffers.masters, strict=True):
        assert torch.equal(parameters, masters.bfloat16())


@pytest.mark.parametrize(
    ("name", "qk_clip", "rounds"), [("adamw", None, True), ("adamw", 0.5, False), ("muon", None, False)]
)
def test_masters_are_rounded_once_by_the_compiled_update_or_after_all_changes(
    name: str, qk_clip: float | None, rounds: bool
) -> None:
    config, training, _ = build("gpt2", "bf16", name=name, qk_clip=qk_clip)
    config.train.compile = True
    gpu = ParallelContext(dtype=torch.bfloat16, device=torch.device("cuda", 0))
    optimizer: Any = make_optimizer(training.buffers, config, gpu)
    assert optimizer.rounds == rounds
    rows = (optimizer if name == "adamw" else optimizer._rest)._rows
    assert [parameter is not None for _, _, _, _, parameter, *_ in rows] == [rounds] * len(rows)


@pytest.mark.parametrize("model", MODELS)
def test_without_a_logit_above_it_the_setting_changes_no_bit(model: str) -> None:
    trained = []
    for largest in (None, 1e6):
        _, training, step = build(model, qk_clip=largest)
        step(batches_of(model), 400, 0.02)
        trained.append(masters_of(training))
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


def test_every_cut_of_a_parameter_is_multiplied_by_rows() -> None:
    """Of every range of a box whose keys and values other ranks have, too."""
    record = next(one for one in gpt_parameters(small()) if one.name == "blocks.1.attention.qkv.weight")
    record = replace(record, shape=(3, 5, 2, 2))
    for box in (
        ShardBox((1, 0, 0, 0), (2, 5, 2, 2), (0,) * 4),
        ShardBox((2, 3, 0, 0), (1, 2, 2, 2), (0,) * 4),
        ShardBox((2, 1, 0, 0), (1, 2, 2, 2), (0,) * 4),
    ):
        looked = torch.full(record.shape, -1)  # where each element must look
        looked[:, :-1] = 3 + torch.arange(3).view(3, 1, 1, 1)
        wanted, slot = looked[box.logical].flatten(), BufferSlot(record, Shard(box.sizes, (box,)))
        for start, stop in combinations(range(prod(box.sizes) + 1), 2):
            owned = OwnedRange(slot, 0, box, range(start, stop), range(start, stop), range(stop - start))
            master = torch.zeros(stop - start, dtype=torch.int64)
            for rows, places in rows_of(owned, master):
                rows += places[:, None]
            assert torch.equal(master, wanted[start:stop]), (box, start, stop)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (300, 300), (150, 600)])
def test_tiles_see_what_queries_see(monkeypatch: pytest.MonkeyPatch, n: int, m: int, apart: bool) -> None:
    """Whole sequences, or a part in any order with the keys of all ranks; documents; tiles of one row at the least."""
    generator = torch.Generator().manual_seed(n)
    queries, keys = (torch.randn(size, 2, 3, q, 8, generator=generator).double() for size, q in ((n, 4), (m, 1)))
    places, key_places = (torch.arange(m), torch.arange(m)) if n == m else (torch.randperm(m)[:n], torch.randperm(m))
    documents = (torch.rand(2, m, generator=generator) < 0.05).int().cumsum(1) if apart else None
    logits = torch.einsum("nbgqd,mbgd->bgqnm", queries, keys.squeeze(3)) / 8**0.5
    seen = (key_places <= places[:, None]).expand(2, n, m)
    if documents is not None:
        seen = seen & (documents[:, places, None] == documents[:, None, key_places])
    wanted = logits.masked_fill(~seen[:, None, None], -torch.inf).amax((0, 2, 3, 4))
    for elements in (1, 1 << 24):
        monkeypatch.setattr(module, "TILE_ELEMENTS", elements)
        found = torch.full((3,), -torch.inf).double()
        raise_largest(found, queries, keys, places, key_places, documents)
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=0)
    raise_largest(high := torch.full((3,), 99.0).double(), queries, keys, places, key_places, documents)
    assert high.tolist() == [99.0] * 3, "it only rises"


def test_the_pass_costs_what_the_page_says_and_fp16_overflows_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    s, b, groups, q, d = 384, 2, 3, 2, 8
    queries, keys = torch.ones(s, b, groups, q, d), torch.ones(s, b, groups, 1, d)
    largest, places = torch.full((groups,), -torch.inf), torch.arange(s)
    monkeypatch.setattr(module, "_product", lambda left, right, factor: factor * left @ right)  # which torch counts
    with FlopCounterMode(display=False) as counter:
        raise_largest(largest, queries, keys, places, places, None)
    assert counter.get_total_flops() == b * s * (s + 128) * groups * q * d  # tokens (s + 128) heads head_size
    raise_largest(largest, queries.half() * 1e3, keys.half() * 1e3, places, places, None)
    assert largest.tolist() == [65504.0] * groups


def test_metrics_tell_the_largest_of_the_applied_steps_since_the_line_before() -> None:
    config = build("gpt2")[0]
    meter = Meter(config, ParallelContext(), {})

    def line_after(*steps: tuple[bool, list[float]]) -> dict[str, Any]:
        """Of steps that are skipped, or not, with these logits."""
        for step, (skipped, logits) in enumerate(steps, 1):
            metrics = StepMetrics(2.0, 1.0, 64, skipped, False, False, 1e-3, largest_logits=logits)
            meter.add(
                replace(metrics, time_split={**metrics.time_split, "forward": 1.0}),
                StepBatches(PlannedStep(step, 0, 8, skipped=False), [], 0),
            )
        line = meter.line(tokens=1, bad_steps=0)
        assert line is not None
        return line

    bad = [torch.nan, 99.0]
    for at in range(3):
        steps = [(False, [3.0, 9.0]), (False, [4.0, 1.0])]
        steps.insert(at, (True, bad))
        line = line_after(*steps)
        assert (line["max_attention_logit"], line["layer_attention_logit"]) == (9.0, {"0": 4.0, "1": 9.0}), at
    assert "max_attention_logit" not in line_after((True, bad))


def test_an_evaluation_computes_no_logits() -> None:
    _, training, step = build("gpt2", qk_clip=1.5)
    (chunk,), noted = training.chunks, training.chunks[0].largest_logits.values()
    step._qk_clip.start_step()
    with training.evaluating(), torch.no_grad():
        training.executor.hidden(batches_of("gpt2")[0])
    assert all(float(largest.max()) == -torch.inf for largest in noted)
    chunk(batches_of("gpt2")[0])
    assert all(bool(largest.isfinite().all()) for largest in noted), "a forward of training does"


def test_what_cannot_be_clipped_is_refused() -> None:
    error = refusal("optimizer.qk_clip=100", "model.qk_norm=true")
    assert settings(error) == ["optimizer.qk_clip"]
    assert "no effect" in str(error)
    for value in ("0", "-1", "much"):
        assert settings(refusal(f"optimizer.qk_clip={value}")) == ["optimizer.qk_clip"]
