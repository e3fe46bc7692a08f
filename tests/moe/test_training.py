"""Training with experts beyond the mathematics: what is not finite, what must not count twice, dtypes, samples."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megalite.config.derive import derive
from megalite.config.schema import Config, MoEConfig
from megalite.data.batch import Batch, unscored
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.model.gpt import Routers
from megalite.moe.balance import counts_of, update_router
from megalite.moe.router import Router
from megalite.train.build import Training, build_training, fill_with_start_values, needs_of
from megalite.train.metrics import StepMetrics
from megalite.train.step import TrainStep
from tests.model.small import gpt, perturbed, random_batch, set_main_grads, small
from tests.ranks import run_ranks

EXPERTS, TOP, LENGTH, SEQUENCES = 4, 2, 8, 2
LR = 1e-2
MOE: dict[str, Any] = {
    "num_experts": EXPERTS,
    "top_k": TOP,
    "ffn_hidden_size": 16,
    "num_shared_experts": 1,
    "score": "sigmoid",
    "expert_bias_rate": 0.05,
    "z_loss_coeff": 0.01,
}


def config_of(layout: ParallelLayout, moe: dict[str, Any], **train: Any) -> Config:
    config = Config(device="cpu", seed=3)
    shape: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 50}
    config.model = replace(config.model, **shape, vocab_multiple=1, moe=MoEConfig(**{**MOE, **moe}))
    batch = {"micro_batch_size": SEQUENCES, "global_batch_size": 2 * SEQUENCES * layout.dp}
    config.train = replace(config.train, seq_length=LENGTH, compile=False, **batch, **train)
    axes = {axis: getattr(layout, axis) for axis in ("tp", "pp", "ep", "etp")}
    config.parallel = replace(config.parallel, **axes)
    return derive(config, layout.world_size)


@dataclass
class Run:
    """Steps of two microbatches on one rank."""

    context: ParallelContext
    config: Config

    def __post_init__(self) -> None:
        self.training: Training = build_training(self.config, self.context)
        fill_with_start_values(self.training.buffers, self.config, self.context)
        self.training.cast_and_gather_params()
        self.apply = TrainStep(self.training, self.config.optimizer, self.context)

    def batches(self) -> list[Batch]:
        seeds = (2 * self.context.index("dp") + microbatch for microbatch in range(2))
        batches = [random_batch(self.config.model, b=SEQUENCES, s=LENGTH, first_sample=0, seed=seed) for seed in seeds]
        return [batch.with_mask(torch.ones_like(batch.loss_mask)) for batch in batches]

    def step(self) -> StepMetrics:
        return self.apply(self.batches(), 2 * SEQUENCES * LENGTH, LR).read()

    def state(self) -> list[torch.Tensor]:
        """Masters, then what routers hold beside them; copies."""
        self.training.gather.finish()
        held = [*self.training.buffers.masters, *(value for _, value in Routers(self.training.chunks).state())]
        return [value.clone() for value in held]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


def _with_a_broken_router(context: ParallelContext, config: Config, broken: tuple[int, ...]) -> list[Any]:
    """Of three steps, whether each was skipped and what changed; in the second, routers of some ranks say NaN."""
    run, seen = Run(context, config), []
    for number in range(3):
        before = run.state()
        routers = [router for chunk in run.training.chunks for router in chunk.routers.values()]
        if number == 1 and context.rank in broken:
            for router in routers:
                router.logits = lambda x, its=router.logits: its(x) * torch.nan  # type: ignore[method-assign, misc]
        figures = run.step()
        for router in routers:
            vars(router).pop("logits", None)
        seen.append((figures.skipped, same(before, run.state())))
    return seen


NAN_LAYOUTS = [
    ParallelLayout(dp=2, ep=2, etp=1),
    ParallelLayout(tp=2, dp=2, ep=4, etp=1),
    pytest.param(ParallelLayout(pp=2, dp=2, ep=2, etp=1), marks=pytest.mark.long),
]


@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("dispatcher", ["alltoall", pytest.param("allgather", marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", NAN_LAYOUTS, ids=str)
def test_a_router_without_a_number_is_a_skipped_step(layout: ParallelLayout, dispatcher: str, some: bool) -> None:
    """On some ranks or all: nobody hangs, and nothing changes, biases and shares neither."""
    world = layout.world_size
    broken = (1, world - 1) if some else tuple(range(world))
    config = config_of(layout, {"dispatcher": dispatcher, "capacity_factor": 1.5, "aux_loss": "global"})
    for seen in run_ranks(_with_a_broken_router, world, config, broken, layout=layout, needs=needs_of(config)):
        assert [skipped for skipped, _ in seen] == [False, True, False]
        assert all(seen[1][1]), "the skipped step changes nothing"
        for _, (*masters, bias, share) in (seen[0], seen[2]):
            assert not any((all(masters), bias, share)), "the others do"


RECOMPUTE: list[dict[str, Any]] = [
    {"recompute": "full"},
    {"recompute": "selective", "recompute_modules": ["norm", "activation", "moe", "attention"]},
]


@pytest.mark.parametrize("recompute", RECOMPUTE, ids=lambda settings: settings["recompute"])
def test_what_is_recomputed_is_not_counted_again(recompute: dict[str, Any]) -> None:
    layout, context = ParallelLayout(etp=1), ParallelContext()
    plain, again = (Run(context, config_of(layout, {"aux_loss": "global"}, **settings)) for settings in ({}, recompute))
    for _ in range(3):
        one, other = plain.step(), again.step()
        assert one.routing is not None
        assert other.routing is not None
        assert torch.equal(one.routing, other.routing)
        counts, _ = counts_of(other.routing)
        assert counts.sum(1).tolist() == [2 * SEQUENCES * LENGTH * TOP] * 2
    assert all(same(plain.state(), again.state()))


def test_evaluation_and_samples_change_nothing_of_the_routers() -> None:
    context = ParallelContext()
    run, undisturbed = (Run(context, config_of(ParallelLayout(etp=1), {})) for _ in range(2))
    for _ in range(3):
        one = torch.ones(())
        before, figures = run.state(), run.training.chunks[0].router_metrics.clone()
        for chunk in run.training.chunks:
            chunk.eval()
        run.training.executor.evaluate(run.batches(), one)
        for chunk in run.training.chunks:
            chunk.train()
        run.training.executor.hidden(run.batches()[0])
        assert all(same(before, run.state()))
        assert torch.equal(figures, run.training.chunks[0].router_metrics)
        run.step()
        undisturbed.step()
        assert all(same(undisturbed.state(), run.state()))


def test_a_text_is_not_changed_by_what_is_written_beside_it() -> None:
    """A capacity holds in training alone: in evaluation and samples other texts, and padding, would matter."""
    run = Run(ParallelContext(), config_of(ParallelLayout(etp=1), {"capacity_factor": 0.75}))
    chunk, batch, one = run.training.chunks[0], run.batches()[0], torch.ones(())
    trained = chunk(batch, scale=one)
    chunk.eval()
    both, first = chunk(unscored(batch.tokens)), chunk(unscored(batch.tokens[:1]))
    torch.testing.assert_close(both[:, :1], first)
    assert torch.equal(chunk(batch, scale=one), both)
    assert not torch.allclose(trained, both), "in training it holds"


def test_a_rate_of_zero_keeps_the_biases_that_were_learned() -> None:
    router = Router(MoEConfig(num_experts=2, top_k=1, score="sigmoid"), 2, torch.float32, torch.device("cpu"))
    router.expert_bias.copy_(torch.tensor([0.0, 1.0]))
    assert router.choose(torch.tensor([[0.5, 0.0]])).experts.tolist() == [[1]]


def test_the_share_of_a_step_is_of_what_counts_in_the_loss_and_the_bias_moves_against_all_choices() -> None:
    """Biases, whatever they are, and tokens that are masked are in the choices alone."""
    run = Run(ParallelContext(), config_of(ParallelLayout(etp=1), {"aux_loss": "global"}))
    bias, share = (value for _, value in [*Routers(run.training.chunks).state()][:2])
    bias += torch.tensor([5.0, 0.0, 0.0, 0.0])  # nobody's weight
    before, told = bias.clone(), share.clone()
    batches = run.batches()
    for batch in batches:
        batch.loss_mask[:, LENGTH // 2 :] = False
    routing = run.apply(batches, SEQUENCES * LENGTH, LR).read().routing
    assert routing is not None
    counts, balanced = (its[0] for its in counts_of(routing))
    assert counts.sum() == 2 * balanced.sum() == 2 * SEQUENCES * LENGTH * TOP
    assert counts[0] == 2 * SEQUENCES * LENGTH > 2 * balanced[0], "all tokens choose the first expert"
    torch.testing.assert_close(bias - before, 0.05 * (counts.mean() - counts).sign().float())
    torch.testing.assert_close(share, (balanced / balanced.sum()).float())
    assert not torch.equal(share, told)
    nothing = torch.zeros(EXPERTS, dtype=torch.float64)
    for router in run.training.chunks[0].routers.values():
        known = router.share.clone()
        update_router(router, nothing, nothing, torch.zeros(()))
        assert torch.equal(router.share, known), "a share of nothing is none"


def _losses(context: ParallelContext, config: Config) -> list[float]:
    run = Run(context, config)
    losses = [figures.loss for figures in (run.step() for _ in range(5)) if not figures.skipped]
    dtypes = {name: value.dtype for name, value in run.training.chunks[0].named_parameters()}
    assert dtypes["blocks.0.moe.experts.down.weight"] == context.dtype
    assert dtypes["blocks.0.moe.router.weight"] == torch.promote_types(context.dtype, torch.float32)
    return losses


@pytest.mark.parametrize("dispatcher", ["alltoall", pytest.param("allgather", marks=pytest.mark.long)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_every_precision_trains_about_like_fp64(dtype: torch.dtype, bound: float, dispatcher: str) -> None:
    layout = ParallelLayout(tp=2, ep=2, etp=1)
    config = config_of(layout, {"dispatcher": dispatcher}, recompute="selective", recompute_modules=["moe"])
    config.optimizer.initial_loss_scale = 2.0**10
    needs = needs_of(config)
    found, other = run_ranks(_losses, 2, config, dtype=dtype, layout=layout, needs=needs)
    exact = _losses(ParallelContext(dtype=torch.float64), config_of(ParallelLayout(etp=1), {}))
    assert found == other
    assert found == pytest.approx(exact, rel=bound)
    assert found[-1] < found[0]


def test_text_that_is_in_no_loss_goes_through_its_experts() -> None:
    """As samples are; a sequence of a training batch of which nothing counts goes through none."""
    config = small(moe=MoEConfig(**{**MOE, "ffn_hidden_size": 20}), tie_embeddings=False)
    model = perturbed(config)
    tokens = torch.randint(53, (3, 20), generator=torch.Generator().manual_seed(1))
    nothing, scale = unscored(tokens), torch.ones((), dtype=torch.float64)
    everything = nothing.with_mask(torch.ones_like(nothing.loss_mask))
    with torch.no_grad():
        routed, padding = model(everything, None, scale), model(nothing, None, scale)
        assert torch.equal(model(nothing), routed)
        assert not torch.isclose(routed, padding).all(-1).any()


def test_a_model_with_experts_gives_main_grads_what_autograd_would() -> None:
    config = small(moe=MoEConfig(**{**MOE, "ffn_hidden_size": 20}), tie_embeddings=False)
    plain, model = perturbed(config), gpt(config)
    model.load_state_dict(plain.state_dict())
    batch = unscored(torch.arange(40).view(2, 20)).with_mask(torch.ones(2, 20, dtype=torch.bool))
    scale = torch.tensor(0.1, dtype=torch.float64)
    plain.loss(batch, scale).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    main_grads = {name: torch.full_like(grad, 2.0) for name, grad in expected.items() if "router" not in name}
    set_main_grads(model, main_grads)
    model.loss(batch, scale).backward()
    for name, parameter in model.named_parameters():
        found = main_grads[name] - 2 if name in main_grads else parameter.grad
        torch.testing.assert_close(found, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.long
def test_compiled_attention_beside_experts_trains_alike() -> None:
    configs = [config_of(ParallelLayout(etp=1), {}) for _ in range(2)]
    configs[1].train.compile = True
    plain, compiled = (Run(ParallelContext(dtype=torch.float64), config) for config in configs)
    for _ in range(2):
        one, other = plain.step(), compiled.step()
        assert (other.loss, other.grad_norm) == pytest.approx((one.loss, one.grad_norm), rel=1e-10)
