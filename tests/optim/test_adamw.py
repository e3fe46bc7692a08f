"""AdamW over slices against torch's, and its promise that a skipped step did not happen."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.config.schema import OptimizerConfig
from megalite.layout.buffer_layout import SliceRange
from megalite.optim import adamw
from megalite.optim.adamw import FlatAdamW
from megalite.optim.groups import UpdateRule

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1
NO_DECAY = UpdateRule(1.0, 0.0)
SLICES = (640, 64, 1, 395)
KINDS = [  # masters and second moment, gradients, first moment
    (torch.float64, torch.float64, torch.float64),
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16, torch.bfloat16),
]
NARROW = KINDS[2:]
UNITS = {"cpu": 2.0, "cuda": 6.5}  # of masters
Kind = tuple[torch.dtype, torch.dtype, torch.dtype]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that do not divide the runs: what is widened crosses them."""
    monkeypatch.setattr(adamw, "PIECE", 17)


def runs_of(lengths: tuple[int, ...] = (37, 5, 1, 20)) -> tuple[list[SliceRange], list[SliceRange], list[SliceRange]]:
    """(decayed, plain, frozen): the slices cut into runs of these lengths in turn, dealt to the three in turn."""
    dealt: tuple[list[SliceRange], list[SliceRange], list[SliceRange]] = ([], [], [])
    count = 0
    for bucket, size in enumerate(SLICES):
        start = 0
        while start < size:
            stop = min(start + lengths[count % len(lengths)], size)
            dealt[count % 3].append(SliceRange(bucket, start, stop))
            start, count = stop, count + 1
    return dealt


def normal(seed: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    whole = torch.randn(sum(SLICES), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return list(whole.to(dtype).to(device).split(SLICES))


def build(kind: Kind, groups: Any = None, *, sizes: tuple[int, ...] = SLICES, **options: Any) -> FlatAdamW:
    """With groups of the decayed and the plain runs, unless others are given."""
    device, (masters, gradients, first_moment) = options.pop("device", "cpu"), kind
    decayed, plain, _ = runs_of()
    buffers: Any = SimpleNamespace(
        masters=options.pop("masters", None) or normal(1, masters, device),
        gradients=[torch.zeros(size, dtype=gradients, device=device) for size in sizes],
        parameters=options.pop("parameters", None),
        master_dtype=masters,
        device=torch.device(device),
    )
    decay = options.pop("weight_decay", DECAY)
    moment_dtype, cautious = "bf16" if first_moment == torch.bfloat16 else "fp32", options.pop("cautious", False)
    settings = OptimizerConfig(betas=BETAS, eps=EPS, moment_dtype=moment_dtype, cautious=cautious)
    given = [(decayed, UpdateRule(1.0, decay)), (plain, NO_DECAY)] if groups is None else groups
    compiled = buffers.parameters is not None
    return FlatAdamW(buffers, given, settings, compiled=compiled, rounds=compiled)


def take(
    optimizer: FlatAdamW, seed: int, *, lr: float, scale: float = 1.0, skip: bool = False, decay_factor: float = 1.0
) -> None:
    """A step with gradients drawn from `seed`; those of a skipped one are no numbers."""
    device = optimizer.masters[0].device
    for kept, new in zip(optimizer.gradients, normal(seed, torch.float64), strict=True):
        kept.copy_(new * (torch.nan if skip else 3))
    step_with(optimizer, lr, scale, skip, str(device), decay_factor)


def step_with(
    optimizer: FlatAdamW, lr: float, scale: float, skip: bool, device: str, decay_factor: float = 1.0
) -> None:
    optimizer.step(
        torch.tensor(lr, dtype=torch.float64, device=device),
        divisor=torch.tensor(scale, dtype=torch.float64, device=device),
        skip=torch.tensor(float(skip), device=device),
        decay_factor=decay_factor,
    )


def state_of(optimizer: FlatAdamW) -> list[Tensor]:
    return [*optimizer.masters, *optimizer.exp_avg, *optimizer.exp_avg_sq, optimizer.step_count]


def compare_with_torch(kind: Kind, device: str) -> float:
    """Largest difference from torch.optim.AdamW in fp64, relative to the largest parameter: 20 clipped steps of two
    groups at a changing rate and weight decay, with a skipped one among them."""
    decayed, plain, _ = runs_of()
    factor, start = 4.0, normal(1, torch.float64)  # of the first group; exact in fp32
    of_eps = 2.0**25  # an eps of 0.3
    ours = build(kind, [(decayed, UpdateRule(factor, DECAY, of_eps)), (plain, NO_DECAY)], device=device)
    theirs = [[start[run.bucket][run.start : run.stop].clone().requires_grad_() for run in runs] for runs in runs_of()]
    moving = theirs[0] + theirs[1]
    groups = [
        {"params": theirs[0], "weight_decay": DECAY, "eps": EPS * of_eps},
        {"params": theirs[1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=BETAS, eps=EPS)
    for step in range(20):
        # CUDA's kernel takes the rate as fp32
        lr = torch.tensor(1e-2 / (step + 1), dtype=torch.float32 if device == "cuda" else torch.float64).item()
        if step == 7:
            take(ours, 500, lr=lr, skip=True)
        gradients = normal(100 + step, torch.float64)
        for runs, parameters in zip(runs_of(), theirs, strict=True):
            for run, parameter in zip(runs, parameters, strict=True):
                parameter.grad = gradients[run.bucket][run.start : run.stop] * 3
        norm = torch.nn.utils.clip_grad_norm_(moving, 1.0)
        decay_factor = 1 - step / 20
        for group, share, decay in zip(reference.param_groups, (factor, 1.0), (DECAY, 0.0), strict=True):
            group["lr"], group["weight_decay"] = lr * share, decay * decay_factor
        reference.step()
        take(ours, 100 + step, lr=lr, scale=float(norm) + 1e-6, decay_factor=decay_factor)
    assert ours.step_count.item() == 20
    differences = [
        (ours.masters[run.bucket][run.start : run.stop].cpu().double() - parameter.detach()).abs().max().item()
        for runs, parameters in zip(runs_of(), theirs, strict=True)
        for run, parameter in zip(runs, parameters, strict=True)
    ]
    assert len(differences) > 40
    first = runs_of()[0][0]
    assert (theirs[0][0] - start[0][first.start : first.stop]).abs().max() > 1e-2
    return max(differences) / max(parameter.abs().max().item() for parameter in moving)


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
@pytest.mark.parametrize(("kind", "bound"), [(KINDS[0], 1e-14), (KINDS[1], 1e-6)])
def test_twenty_clipped_steps_equal_torch(kind: Kind, bound: float, device: str) -> None:
    assert compare_with_torch(kind, device) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_wait_for_the_device(kind: Kind) -> None:
    optimizer, one = build(kind, device="cuda"), torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step(one.double() * 1e-3, divisor=one.double(), skip=one * 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def moving(optimizer: FlatAdamW) -> tuple[list[Tensor], ...]:
    return optimizer.masters, optimizer.exp_avg, optimizer.exp_avg_sq


def expected_step(
    optimizer: FlatAdamW,
    lr: float,
    scale: float,
    groups: Any = None,
    decay_factor: float = 1.0,
    *,
    cautious: bool = False,
) -> list[list[Tensor]]:
    """The definition in fp64 from the state as it is: masters and moments after one step, not yet rounded."""
    held_back = []
    steps = optimizer.step_count.item() + 1
    masters, first, second = ([tensor.clone().double() for tensor in tensors] for tensors in moving(optimizer))
    for runs, (factor, decay, of_eps) in groups or zip(runs_of(), (UpdateRule(1.0, DECAY), NO_DECAY), strict=False):
        rate = lr * factor
        for run in runs:
            part = slice(run.start, run.stop)
            gradient = optimizer.gradients[run.bucket][part].double() / scale
            master, mean, square = (tensors[run.bucket][part] for tensors in (masters, first, second))
            mean.copy_(BETAS[0] * mean + (1 - BETAS[0]) * gradient)
            square.copy_(BETAS[1] * square + (1 - BETAS[1]) * gradient * gradient)
            root = (square / (1 - BETAS[1] ** steps)).sqrt() + EPS * of_eps
            update = mean / (1 - BETAS[0] ** steps) / root
            if cautious:
                update[mean * gradient <= 0] = 0.0
                held_back.append((mean * gradient < 0).double().mean())
            master.copy_(master - rate * decay * decay_factor * master - rate * update)
    assert not cautious or steps == 1 or 0.1 < sum(held_back) / len(held_back) < 0.5
    return [masters, first, second]


def check_steps_against_the_definition(kind: Kind, device: str, *, cautious: bool = False) -> None:
    """Each step from where the last one ended: a rounding that falls the other way does not add up.

    Units in the last place, of the number before the step and of the one after it, by which a number may be wrong: 3
    for moments, as CUDA's 1 - beta1 in fp32 is itself 2 units from 0.1; 2 for masters and, on CUDA, the 4.5 that their
    step has from the moments: 3 from the first, half of 3 from the second. A narrow number is then rounded.
    """
    optimizer = build(kind, device=device, cautious=cautious)
    assert (optimizer.exp_avg_sq[0].dtype, optimizer.exp_avg[0].dtype) == (kind[0], kind[2])
    take(optimizer, 99, lr=1e-2)
    for step in range(5):
        for kept, new in zip(optimizer.gradients, normal(step, torch.float64), strict=True):
            kept.copy_(new * 3)
        expected = expected_step(optimizer, 1e-2, 1.7, cautious=cautious)
        before = [[tensor.double() for tensor in tensors] for tensors in moving(optimizer)]
        step_with(optimizer, 1e-2, 1.7, False, device)
        for units, *lists in zip((UNITS[device], 3, 3), moving(optimizer), expected, before, strict=True):
            assert_near(kind, units, *lists)


def assert_near(kind: Kind, units: float, found: list[Tensor], wanted: list[Tensor], before: list[Tensor]) -> None:
    """Within so many units in the last place of the masters' dtype, and a rounding to the dtype of `found`."""
    rounding = 0.501 * torch.finfo(torch.bfloat16).eps if found[0].dtype == torch.bfloat16 else 0.0
    for tensor, want, start in zip(found, wanted, before, strict=True):
        allowed = units * torch.finfo(kind[0]).eps * (want.abs() + start.abs()) + rounding * want.abs()
        assert ((tensor.double() - want).abs() <= allowed).all()


@DEVICES
@pytest.mark.parametrize("kind", NARROW)
def test_narrow_gradients_and_first_moments_are_updated_in_fp32_and_rounded_once(kind: Kind, device: str) -> None:
    check_steps_against_the_definition(kind, device)


@DEVICES
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_cautious_step_updates_where_first_moment_and_gradient_agree_and_decays_all(kind: Kind, device: str) -> None:
    check_steps_against_the_definition(kind, device, cautious=True)


@DEVICES
def test_cautious_steps_in_fp64_are_the_definition(device: str) -> None:
    optimizer, lr = build(KINDS[0], device=device, cautious=True), 2.0**-7  # fp32 holds it, too
    take(optimizer, 99, lr=lr)
    for step in range(20):
        for kept, new in zip(optimizer.gradients, normal(step, torch.float64), strict=True):
            kept.copy_(new * 3)
            kept[::7] = 0.0  # as rows of an embedding whose tokens a step lacks: first moments are not zero
        expected = expected_step(optimizer, lr, 1.7, decay_factor=0.5, cautious=True)
        step_with(optimizer, lr, 1.7, False, device, 0.5)
        for tensors, wanted in zip(moving(optimizer), expected, strict=True):
            assert max(float((one - two).abs().max()) for one, two in zip(tensors, wanted, strict=True)) < 1e-14


@pytest.mark.parametrize("kind", KINDS[1:])
def test_numbers_whose_product_is_rounded_to_zero_agree_too(kind: Kind) -> None:
    gradients = [tensor.sign() * 1e-30 for tensor in normal(4, torch.float64)]
    optimizer = build(kind, masters=[torch.zeros(size) for size in SLICES], cautious=True)
    for kept, new in zip(optimizer.gradients, gradients, strict=True):
        kept.copy_(new)
    step_with(optimizer, 1e-2, 2.0**16, False, "cpu")
    for run in (run for runs in runs_of()[:2] for run in runs):
        part = slice(run.start, run.stop)
        assert torch.equal(optimizer.masters[run.bucket][part].sign(), -gradients[run.bucket][part].sign().float())


class Calls(TorchDispatchMode):
    """Counts the calls into torch, and notes the largest tensor that one of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += 1
        if isinstance(result, Tensor) and not any(result is argument for argument in args):
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_makes_no_copy_larger_than_a_piece(kind: Kind, cautious: bool) -> None:
    optimizer = build(kind, cautious=cautious)
    with Calls() as calls:
        step_with(optimizer, 1e-2, 1.0, False, "cpu")
    assert calls.largest == (17 if kind in NARROW or cautious else 1)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_the_work_of_the_host_does_not_grow_with_the_number_of_runs(kind: Kind) -> None:
    counts = []
    for lengths in ((640,), (3, 2)):
        optimizer = build(kind, [(runs, NO_DECAY) for runs in runs_of(lengths)])
        with Calls() as calls:
            step_with(optimizer, 1e-2, 1.0, False, "cpu")
        counts.append(calls.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_step_after_a_skipped_one_is_as_if_it_had_not_been(kind: Kind, cautious: bool) -> None:
    with_skip, without = build(kind, cautious=cautious), build(kind, cautious=cautious)
    for step in range(4):
        take(with_skip, step, lr=1e-2)
        take(with_skip, 50, lr=1e-2, scale=float("nan"), skip=True)
        take(without, step, lr=1e-2)
    assert all(torch.equal(a, b) for a, b in zip(state_of(with_skip), state_of(without), strict=True))
    assert with_skip.step_count.item() == 4


@pytest.mark.parametrize("kind", KINDS)
def test_weight_decay_touches_its_group_alone_and_what_is_in_no_run_stays(kind: Kind) -> None:
    strong, none, start = build(kind, weight_decay=0.5), build(kind, weight_decay=0.0), normal(1, kind[0])
    for optimizer in (strong, none):
        take(optimizer, 3, lr=1e-2)
    decayed, plain, frozen = runs_of()
    for run in decayed:
        parts = [tensors[run.bucket][run.start : run.stop] for tensors in (strong.masters, none.masters)]
        assert not torch.isclose(parts[0], parts[1], rtol=1e-4, atol=0).any()
    for run in plain:
        parts = [tensors[run.bucket][run.start : run.stop] for tensors in (strong.masters, none.masters, start)]
        assert torch.equal(parts[0], parts[1])
        assert (parts[0] != parts[2]).all()
    for run in frozen:
        assert torch.equal(strong.masters[run.bucket][run.start : run.stop], start[run.bucket][run.start : run.stop])
        assert not strong.exp_avg[run.bucket][run.start : run.stop].any()


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_group_without_elements_is_no_call(kind: Kind) -> None:
    optimizer = build(kind, [([], NO_DECAY)])
    take(optimizer, 2, lr=1e-2)
    assert all(map(torch.equal, optimizer.masters, normal(1, kind[0])))


@pytest.mark.parametrize("kind", KINDS)
def test_who_reads_the_state_is_told_before_it_changes(kind: Kind) -> None:
    optimizer = build(kind)
    told = []

    def state() -> list[Tensor]:
        lists = (optimizer.masters, optimizer.exp_avg, optimizer.exp_avg_sq, [optimizer.step_count])
        return [tensor.clone() for each in lists for tensor in each]

    optimizer.before_change = lambda: told.append(state())
    before = state()
    take(optimizer, 2, lr=0.1)
    assert len(told) == 1
    assert all(map(torch.equal, told[0], before))
    assert not any(map(torch.equal, state()[:2], before))


ALIGNED = [SliceRange(0, 0, 320), SliceRange(2, 64, 1279)], [SliceRange(0, 320, 640), SliceRange(1, 0, 64)]


@DEVICES
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("kind", "cautious"),
    [
        *(pytest.param(kind, False, marks=pytest.mark.long) for kind in KINDS[:4]),
        *((KINDS[4], cautious) for cautious in (False, True)),
    ],
)
def test_the_compiled_update_is_the_definition_and_rounds_the_masters(kind: Kind, cautious: bool, device: str) -> None:
    """Each step from where the last one ended, and a skipped one of gradients that are no numbers.

    Units in the last place of the number before and of the one after the step: 4 for the first moment (2 for CUDA's
    division by the scale, and a half for each of scale, 1 - beta1, product and sum), 7 for the second (twice that
    division and scale, 1 - beta2, two products, a sum), 15 for masters: the step has 4 from the first moment, half of
    7 from the second, 2 for CUDA's division, 2 for its root, and 3 from other roundings. The decay is the last half.
    In fp64 two units of beta^t are up to 20 of 1 - beta1^t, and half of 40 of 1 - beta2^t.
    """
    sizes = (640, 64, 1280)
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
    start[-1] = 0.0  # padding
    masters = start.to(device, kind[0]).split(sizes)
    parameters = [master.bfloat16() for master in masters[:2]] + [masters[2]]
    groups = [(ALIGNED[0], UpdateRule(4.0, DECAY, 2.0**25)), ([*ALIGNED[1], SliceRange(2, 0, 64)], NO_DECAY)]
    options = {"sizes": sizes, "masters": masters, "parameters": parameters, "device": device}
    optimizer = build(kind, groups, **options, cautious=cautious)
    assert optimizer.rounds
    for step in range(6):
        before = [tensor.clone() for tensor in (*state_of(optimizer), *parameters)]
        for gradient in optimizer.gradients:
            gradient.copy_(3 * torch.randn(len(gradient), generator=generator))
        optimizer.gradients[2][-1] = 0.0
        starts = [[tensor.clone().double() for tensor in tensors] for tensors in moving(optimizer)]
        expected = expected_step(optimizer, 1e-2, 1.7, groups, decay_factor := 1 - step / 6, cautious=cautious)
        if step == 3:
            optimizer.gradients[0][5] = torch.nan
        step_with(optimizer, 1e-2, 1.7, step == 3, device, decay_factor)
        if step == 3:
            assert all(map(torch.equal, (*state_of(optimizer), *parameters), before))
            continue
        of_masters = 15 + 40 * (kind[0] == torch.float64)
        for units, *lists in zip((of_masters, 4, 7), moving(optimizer), expected, starts, strict=True):
            assert_near(kind, units, *lists)
        assert all(map(torch.equal, parameters[:2], [master.bfloat16() for master in optimizer.masters[:2]]))
