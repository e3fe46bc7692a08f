"""Muon against its definition in fp64, block by block, and its promises about steps and experts that are left out."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megalite.config.schema import MoEConfig, MuonConfig
from megalite.launch.context import CPU, ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.optim import matrix_stacks
from megalite.optim import muon as muon_module
from megalite.optim.buffers import TrainingBuffers
from megalite.optim.optimizer import Optimizer, make_optimizer
from megalite.optim.rank_buffers import rank_buffers, records_of_model
from megalite.tensor_parallel.collectives import TensorGroup, start_all_to_all
from tests.config.refusal import refusal, settings
from tests.model.small import GPT2_LIKE, LLAMA_LIKE
from tests.optim.small_model import small_config
from tests.optim.test_newton_schulz import TABLES, reference
from tests.ranks import run_ranks

SIZES = {"hidden_size": 24, "num_attention_heads": 4, "head_size": 10, "ffn_hidden_size": 36, "vocab_size": 53}
MOE = MoEConfig(num_experts=4, ffn_hidden_size=20, num_shared_experts=1, first_dense_layers=1)
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2_LIKE,
    "llama": {**LLAMA_LIKE, "num_key_value_heads": 2},
    "moe": {"num_key_value_heads": 2, "moe": MOE},
}
Named = dict[str, Tensor]
LR, DECAY, EPS, BETAS = 0.02, 0.1, 1e-8, (0.9, 0.95)
SCALES = {
    "match_adamw": lambda r, c, rms: rms * sqrt(max(r, c)),
    "max_ratio": lambda r, c, _: sqrt(max(1.0, r / c)),
    "ratio": lambda r, c, _: sqrt(r / c),
}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
IDLE = {"blocks.1.moe.experts.gate_up.weight": 2, "blocks.1.moe.experts.down.weight": 2}  # number of the expert


def build(
    model: str, precision: str = "fp64", context: ParallelContext | None = None, **muon: Any
) -> tuple[TrainingBuffers, Optimizer]:
    chosen = {"name": "muon", "lr": LR, "weight_decay": DECAY, "betas": list(BETAS), "eps": EPS}
    config = small_config(model={**SIZES, **MODELS[model]}, optimizer={**chosen, "muon": MuonConfig(**muon)})
    config.precision = precision
    dtype, context = DTYPES[precision], context or ParallelContext(dtype=DTYPES[precision])
    own = rank_buffers(config, context.layout, context.rank)
    buffers = TrainingBuffers(own.layout, dtype=dtype, device=CPU, **own.index)
    buffers.fill((name, 0.1 * values) for name, values in drawn(buffers, 0).items())
    return buffers, make_optimizer(buffers, config, context)


def drawn(buffers: TrainingBuffers, seed: int) -> Named:
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: slot.record.shape for name, (slot, _) in sorted(buffers.places.items())}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def take(
    buffers: TrainingBuffers, muon: Optimizer, gradients: Named, lr: float, skip: float = 0.0, decay_factor: float = 1.0
) -> None:
    """A step with gradients that are to be divided by 1.7."""
    for name, gradient in gradients.items():
        buffers.gradient(name).copy_(gradient * 1.7)
    rate, divisor = torch.tensor([lr, 1.7], dtype=torch.float64)
    muon.step(rate, divisor=divisor, skip=torch.tensor(skip), decay_factor=decay_factor)


def kept_of(buffers: TrainingBuffers, muon: Optimizer) -> list[Tensor]:
    """Copies of masters and state."""
    lists = ([each] if isinstance(each, Tensor) else each for each in (buffers.masters, *muon.state().values()))
    return [tensor.clone() for each in lists for tensor in each]


def is_matrix(name: str, router: bool = True) -> bool:
    inside = name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name
    return inside and (router or "router" not in name)


def matrices_of(name: str, shape: tuple[int, ...], qkv: str) -> list[Tensor]:
    """Each matrix as [r, c] indices into the flat parameter."""
    at = torch.arange(prod(shape)).view(shape)
    if "attention.qkv" in name and qkv == "projection":  # [groups, queries + 2, head size, hidden]
        return [each.reshape(-1, shape[-1]) for each in (at[:, :-2], at[:, -2], at[:, -1])]
    return list(at.view(-1, *shape[-2:]))


def update(weights: Tensor, momentum: Tensor, gradient: Tensor, at: Tensor, lr: float, muon: MuonConfig) -> None:
    """The definition, for the matrix at the indices `at` [r, c] of flat tensors."""
    mu, decay = muon.momentum, DECAY if muon.weight_decay is None else muon.weight_decay
    rate, table = lr * (muon.lr or LR) / LR, TABLES[muon.coefficients]
    table = table if muon.steps is None else (table + [table[-1]] * muon.steps)[: muon.steps]
    momentum[at] = mu * momentum[at] + (1 - mu) * gradient[at]
    towards = mu * momentum[at] + (1 - mu) * gradient[at] if muon.nesterov else momentum[at]
    weights[at] = (1 - rate * decay) * weights[at] - rate * SCALES[muon.scale](*at.shape, muon.rms) * reference(
        towards, table
    )


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def expected(buffers: TrainingBuffers, count: int, **muon: Any) -> Iterator[tuple[Named, Named]]:
    """Parameters and momentum after each step by definition; expert 2 is idle in every second step."""
    chosen, weights = MuonConfig(**muon), {name: 0.1 * values for name, values in drawn(buffers, 0).items()}
    momentum = {name: torch.zeros_like(values) for name, values in weights.items() if is_matrix(name, chosen.router)}
    others = {name: values.requires_grad_() for name, values in weights.items() if name not in momentum}
    decayed = {name for name in others if name.startswith(("embedding", "head")) or "router" in name}
    groups = [
        {"params": [others[name] for name in others if (name in decayed) == decays], "weight_decay": DECAY * decays}
        for decays in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, betas=BETAS, eps=EPS)
    for step in range(count):
        gradients, lr = gradients_of(buffers, step), rate_of(step)
        for name, values in others.items():
            values.grad = gradients[name]
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        for name, moved in momentum.items():
            for at in matrices_of(name, weights[name].shape, chosen.qkv):
                if ".experts." not in name or gradients[name].view(-1)[at].any():
                    update(weights[name].view(-1), moved.view(-1), gradients[name].view(-1), at, lr, chosen)
        yield weights, momentum


def gradients_of(buffers: TrainingBuffers, step: int) -> Named:
    gradients = drawn(buffers, 100 + step)
    for name, expert in IDLE.items():
        if name in gradients and step % 2:
            gradients[name][expert] = 0.0
    return gradients


def rate_of(step: int) -> float:
    return LR / (step + 1)


OWN = {"lr": 0.05, "weight_decay": 0.3, "momentum": 0.8}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "scale": "max_ratio"},
    {"coefficients": "quintic", "scale": "ratio", "steps": 7, "router": False},
    {"coefficients": "polar_express", "rms": 0.9, "steps": 3, "weight_decay": 0.0},
    {"coefficients": "deepseek_v4", "qkv": "head", **OWN},
]


@pytest.mark.parametrize("muon", SETTINGS, ids=lambda muon: "-".join(map(str, muon.values())) or "default")
@pytest.mark.parametrize("model", MODELS)
def test_five_steps_are_those_of_the_definition(model: str, muon: dict[str, Any]) -> None:
    buffers, optimizer = build(model, **muon)
    for step, (weights, momentum) in enumerate(expected(buffers, 5, **muon)):
        take(buffers, optimizer, gradients_of(buffers, step), rate_of(step))
        assert all(relative(buffers.parameter(name), weights[name].detach()) < 1e-12 for name in weights), step
        for name, wanted in momentum.items():
            slot, bucket = buffers.places[name]
            found = optimizer.state()["momentum"][bucket][slot.start : slot.stop]
            assert relative(found, wanted.view(-1)) < 1e-14, name


@pytest.mark.parametrize(("scale", "adjust"), [("max_ratio", "original"), ("match_adamw", "match_rms_adamw")])
def test_plain_matrices_move_like_those_of_torch_whose_products_are_bf16(scale: str, adjust: str) -> None:
    buffers, optimizer = build("gpt2", "fp32", scale=scale, **OWN)
    names = [f"blocks.{layer}.{of}.weight" for layer in (0, 1) for of in ("attention.out", "mlp.up", "mlp.down")]
    start = {name: buffers.parameter(name).clone() for name in names}
    theirs = {name: values.clone().requires_grad_() for name, values in start.items()}
    reference = torch.optim.Muon(
        theirs.values(), weight_decay=OWN["weight_decay"], momentum=OWN["momentum"], adjust_lr_fn=adjust
    )
    for step in range(3):
        gradients = gradients_of(buffers, step)
        take(buffers, optimizer, gradients, rate_of(step))
        for name, values in theirs.items():
            values.grad = gradients[name].float()
        reference.param_groups[0]["lr"] = rate_of(step) * OWN["lr"] / LR
        reference.step()
    for name in names:
        assert relative(buffers.parameter(name) - start[name], theirs[name].detach() - start[name]) < 2e-2, name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_in_bf16_are_near_those_in_fp32(precision: str) -> None:
    moved = []
    for dtype in ("fp32", "bf16"):
        buffers, optimizer = build("llama", precision, dtype=dtype, weight_decay=0.0)
        start = [master.clone() for master in buffers.masters]
        take(buffers, optimizer, gradients_of(buffers, 0), LR)
        assert all(momentum.dtype == torch.float32 for momentum in optimizer.state()["momentum"])
        pairs = zip(buffers.masters, start, optimizer.state()["momentum"], strict=True)
        moved.append(torch.cat([new - old for new, old, momentum in pairs if len(momentum)]))
    assert 1e-4 < relative(moved[1], moved[0]) < 5e-2


@pytest.mark.parametrize(
    ("precision", "given", "instructions", "products"),
    [
        ("fp64", None, False, torch.float64),
        ("fp32", None, True, torch.float32),
        ("fp32", "bf16", False, torch.bfloat16),
        ("bf16", None, True, torch.bfloat16),
        ("bf16", None, False, torch.float32),
        ("bf16", "bf16", False, torch.bfloat16),
        ("bf16", "fp32", True, torch.float32),
    ],
)
def test_products_have_the_dtype_that_is_asked_for_or_that_the_cpu_is_fast_in(
    precision: str, given: str | None, instructions: bool, products: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: instructions)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    seen: set[torch.dtype] = set()
    right = muon_module.orthogonalised
    monkeypatch.setattr(muon_module, "orthogonalised", lambda x, table: (seen.add(x.dtype), right(x, table))[1])
    buffers, optimizer = build("gpt2", precision, dtype=given)
    take(buffers, optimizer, gradients_of(buffers, 0), LR)
    assert seen == {products}


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
def test_a_skipped_step_did_not_happen(precision: str, poison: float) -> None:
    ends = []
    for skips in (False, True):
        buffers, optimizer = build("moe", precision)
        take(buffers, optimizer, gradients_of(buffers, 0), LR)
        if skips:
            before = kept_of(buffers, optimizer)
            poisoned = {name: values.masked_fill(values > 0.5, poison) for name, values in drawn(buffers, 7).items()}
            for gradients in (poisoned, drawn(buffers, 8)):
                take(buffers, optimizer, gradients, LR, skip=1.0)
                assert all(map(torch.equal, kept_of(buffers, optimizer), before))
        take(buffers, optimizer, gradients_of(buffers, 1), LR)
        ends.append(kept_of(buffers, optimizer))
    assert optimizer.state()["step"] == 2
    assert all(map(torch.equal, *ends))
    assert all(tensor.isfinite().all() for tensor in ends[0])


def test_an_idle_expert_keeps_weights_and_momentum_and_the_others_move() -> None:
    buffers, optimizer = build("moe")
    take(buffers, optimizer, gradients_of(buffers, 0), LR)
    names = [name for name in buffers.places if ".experts." in name]
    assert sorted(names) == sorted(IDLE)

    def kept() -> Named:
        found = {}
        for name in names:
            slot, bucket = buffers.places[name]
            for kind, values in (("weights", buffers.masters), ("momentum", optimizer.state()["momentum"])):
                found[f"{kind} of {name}"] = values[bucket][slot.start : slot.stop].view(slot.record.shape).clone()
        return found

    before = kept()
    take(buffers, optimizer, gradients_of(buffers, 1), LR)
    for what, values in kept().items():
        same = [torch.equal(*pair) for pair in zip(values, before[what], strict=True)]
        assert same == [False, False, True, False], what


@pytest.mark.parametrize("router", [True, False])
def test_a_bucket_has_momentum_or_moments_and_a_step_tells_before_it_changes_them(router: bool) -> None:
    buffers, optimizer = build("moe", router=router)
    assert optimizer.state().keys() == {"momentum", "exp_avg", "exp_avg_sq", "step"}
    assert [len(optimizer.state()[name]) for name in ("momentum", "step")] == [len(buffers.masters), 1]
    for number, bucket in enumerate(buffers.layout.buckets):
        own = {is_matrix(slot.record.name, router) for slot in bucket.slots}
        sizes = [len(optimizer.state()[name][number]) for name in ("momentum", "exp_avg", "exp_avg_sq")]
        assert sizes == ([bucket.size, 0, 0] if own == {True} else [0, bucket.size, bucket.size])
        assert len(own) == 1
    told: list[list[Tensor]] = []
    optimizer.before_change = lambda: told.append(kept_of(buffers, optimizer))
    before = kept_of(buffers, optimizer)
    take(buffers, optimizer, gradients_of(buffers, 0), LR)
    assert len(told) == 1
    assert all(map(torch.equal, told[0], before))
    pairs = zip(kept_of(buffers, optimizer), before, strict=True)
    assert not any(torch.equal(new, old) for new, old in pairs if len(new))


def work_of_a_step(context: ParallelContext, model: str) -> tuple[int, int, int]:
    """Floating-point operations, bytes sent to other ranks, and exchanges of a step of Muon on one rank."""
    _, optimizer = build(model, context=context, router=False)
    sent: list[int] = []

    def counted(x: Tensor, sends: list[int], receives: list[int], group: TensorGroup) -> Tensor:
        sent.append(x.element_size() * (sum(sends) - sends[group.index]))
        return start_all_to_all(x, sends, receives, group)

    matrix_stacks.start_all_to_all = counted
    with FlopCounterMode(display=False) as counter:
        optimizer.step(torch.tensor(LR), divisor=torch.tensor(1.0), skip=torch.tensor(0.0))
    return counter.get_total_flops(), sum(sent), len(sent)


@pytest.mark.parametrize(
    ("model", "layout", "exchanges"),
    [
        ("llama", ParallelLayout(dp=2), 0),
        ("llama", ParallelLayout(tp=2, dp=2), 2),
        ("moe", ParallelLayout(tp=2, dp=2, ep=2, etp=1), 2),
        ("moe", ParallelLayout(tp=2, dp=2, ep=2, etp=2), 4),
    ],
)
def test_a_step_of_all_ranks_costs_what_the_page_says(model: str, layout: ParallelLayout, exchanges: int) -> None:
    buffers, _ = build(model)
    operations, bytes_, work = 0, 0, 0
    for name, (slot, _) in buffers.places.items():
        matrices = matrices_of(name, slot.record.shape, "projection") if is_matrix(name, router=False) else []
        operations += sum(4 * m * m * n + 2 * m**3 for m, n in (sorted(each.shape) for each in matrices))
        ranks = layout.etp or 1 if slot.record.of_experts else layout.tp
        bytes_ += 2 * 8 * sum(each.numel() for each in matrices) * (ranks - 1) // ranks
        work += slot.record.work * prod(slot.record.shape[: slot.record.stacked]) if matrices else 0
    found = run_ranks(work_of_a_step, layout.world_size, model, layout=layout, dtype=torch.float64)
    assert sum(flops for flops, _, _ in found) == 5 * operations == 5 * work
    assert sum(sent for _, sent, _ in found) == bytes_
    assert {count for _, _, count in found} == {exchanges}


@pytest.mark.parametrize(
    ("model", "vectors"),
    [
        ({**GPT2_LIKE, "ffn_hidden_size": 1}, {"mlp.up", "mlp.down"}),
        ({"moe": replace(MOE, num_experts=1, top_k=1)}, {"moe.router"}),
        ({"moe": replace(MOE, ffn_hidden_size=1, num_shared_experts=0)}, {"moe.experts.gate_up", "moe.experts.down"}),
    ],
)
def test_what_has_a_side_of_one_is_adamws(model: dict[str, Any], vectors: set[str]) -> None:
    config = small_config(model={**SIZES, **model}, optimizer={"name": "muon"})
    records = [record for record in records_of_model(config) if is_matrix(record.name)]
    assert {
        record.name.split(".", 2)[2].removesuffix(".weight") for record in records if record.stacked is None
    } == vectors
    assert all(record.stacked is None for record in records_of_model(config) if not is_matrix(record.name))


MUON = "optimizer.name=muon"


@pytest.mark.parametrize(
    ("line", "name", "rule", "hint"),
    [
        (f"{MUON} optimizer.ownership=even", "optimizer.ownership", "whole matrices", "optimizer.ownership=whole"),
        ("optimizer.muon.momentum=0.9", "optimizer.muon.momentum", "no effect", MUON),
        ("optimizer.muon.router=false model.moe.num_experts=4", "optimizer.muon.router", "no effect", MUON),
        (
            f"{MUON} model.hidden_size=1 model.num_attention_heads=1 model.position=learned",
            "optimizer.name",
            "no matrix",
            "adamw",
        ),
        (f"{MUON} optimizer.muon.momentum=1", "optimizer.muon.momentum", "below 1", "momentum=0.95"),
        (f"{MUON} optimizer.muon.steps=0", "optimizer.muon.steps", "at least 1", "steps="),
        (f"{MUON} optimizer.muon.scale=spectral", "optimizer.muon.scale", "unknown choice", "match_adamw"),
    ],
)
def test_settings_that_cannot_be_are_refused(line: str, name: str, rule: str, hint: str) -> None:
    error = refusal(*line.split())
    assert settings(error) == [name]
    assert rule in error.problems[0].rule
    assert hint in error.problems[0].hint
