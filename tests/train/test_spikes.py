"""A spike is not applied, on any rank; after several bad steps in a row the run goes back to a checkpoint."""

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import megalite.train.loop as loop_module
from megalite.config.derive import derive
from megalite.config.schema import Config
from megalite.data.batch import Batch
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.model.gpt import GPT
from megalite.optim.spikes import SpikeWindow
from megalite.train.build import needs_of
from megalite.train.history import read_events, read_metrics
from tests.ranks import run_ranks
from tests.train.runs import outcome, state_bytes
from tests.train.test_run import STEPS, at_step, checkpoints, config_for, kinds, losses, resume_differs, start

SPIKES = {"skip_spikes": 20.0, "spike_window": 8}  # judged from the fifth step on
LOSS, GRADIENT, NOT_FINITE = (4.0, 4.0), (1.0, 40.0), (math.nan, 1.0)  # factors of the loss, and of the gradient
WHOLE = GPT.loss


def disturb(steps: Collection[int], factors: tuple[float, float] = LOSS, patch: Any = None) -> None:
    """Of these steps the second microbatch has another loss and gradient."""

    def disturbed(self: GPT, batch: Batch, scale: Tensor, received: Tensor | None = None) -> Tensor:
        value, (at, within) = WHOLE(self, batch, scale, received), divmod(int(batch.samples[0]), 4)
        if not (self.training and self.has_loss) or within != 2 or at + 1 not in steps:
            return value
        return value.detach() * factors[0] + (value - value.detach()) * factors[1]

    (patch or pytest.MonkeyPatch()).setattr(GPT, "loss", disturbed)


def told(run_dir: Path) -> list[tuple[str, int]]:
    return [event for event in kinds(run_dir) if event[0] in ("spike", "skipped", "rolled_back", "failed")]


@pytest.mark.parametrize("factors", [LOSS, GRADIENT], ids=["loss", "gradient"])
def test_a_spike_is_told_and_leaves_everything_as_it_was(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    factors: tuple[float, float],
) -> None:
    """As if its data had been passed over by train.skip_steps. Steps before the window is half full are applied."""
    disturb([7, 8, 9, 10], factors, monkeypatch)
    assert start(config_for(text, tmp_path / "asked", skip_steps=[7, 8, 9, 10])) == 0
    assert start(config_for(text, tmp_path / "off")) == 0
    assert start(config_for(text, tmp_path / "run", **SPIKES)) == 0
    disturb([4], factors, monkeypatch)
    assert start(config_for(text, tmp_path / "early", **SPIKES)) == 0
    assert told(tmp_path / "off") == told(tmp_path / "early") == []
    assert told(tmp_path / "run") == [("spike", step) for step in (7, 8, 9, 10)], "none of them raises the limit"
    assert "step 7, spike: loss " in capsys.readouterr().out
    assert state_bytes(tmp_path / "run", STEPS) == state_bytes(tmp_path / "asked", STEPS)
    records = {
        record["step"]: record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in record
    }
    assert [records[step]["bad_steps"] for step in (6, 7, 10, 12)] == [0, 1, 4, 4]
    assert records[STEPS]["tokens"] == (STEPS - 4) * 64


def test_a_run_of_nothing_but_spikes_ends(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disturb(range(6, 99), LOSS, monkeypatch)
    assert start(config_for(text, tmp_path / "run", max_bad_steps=3, **SPIKES)) == 1
    assert "loss or gradient was not finite or a spike in 3 steps in a row" in capsys.readouterr().err


def test_the_window_goes_on_with_the_run(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 8 is a spike to the steps before the stop; the negative control forgets them."""
    disturb([8], LOSS, monkeypatch)
    train = replace(config_for(text, tmp_path).train, **SPIKES)
    assert not resume_differs(text, tmp_path, monkeypatch, train=train)
    assert told(tmp_path / "parts") == [("spike", 8)]
    monkeypatch.setattr(SpikeWindow, "fill", lambda window, steps: None)
    (tmp_path / "without").mkdir()
    assert resume_differs(text, tmp_path / "without", monkeypatch, train=train)


LAYOUTS = [ParallelLayout(dp=2), ParallelLayout(pp=2)]


def _decisions(context: ParallelContext, config: Config, alone: bool) -> tuple[Any, list[bool]]:
    """How the run ended, and which steps this rank did not apply. `alone`: rank 1 judges nothing."""
    decided, judge = list[bool](), SpikeWindow.skips

    def noted(window: SpikeWindow, loss: Tensor, norm: Tensor, skipped: Tensor) -> Tensor:
        if alone and context.rank == 1:
            window._sigmas = math.inf
        decided.append(bool(found := judge(window, loss, norm, skipped)))
        return found

    SpikeWindow.skips = noted  # type: ignore[method-assign]
    disturb([7])
    return outcome(context, config), decided


def on_ranks(text: Path, run_dir: Path, layout: ParallelLayout, alone: bool, **train: Any) -> list[Any]:
    config = config_for(text, run_dir, **SPIKES, **train)
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0}
    config.model = replace(config.model, num_layers=2, tie_embeddings=not alone, **no_dropout)
    parallel = replace(config.parallel, pp=layout.pp, timeout_s=20)
    config = derive(replace(config, precision="fp64", parallel=parallel), layout.world_size)
    if layout.world_size == 1:
        return [_decisions(ParallelContext(), config, alone)]
    needs = needs_of(config)
    return run_ranks(_decisions, layout.world_size, config, alone, layout=layout, needs=needs, timeout=60)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["dp2", "pp2"])
def test_all_ranks_decide_alike_though_one_of_them_sees_the_spike(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: ParallelLayout
) -> None:
    monkeypatch.setattr(SpikeWindow, "skips", SpikeWindow.skips)
    monkeypatch.setattr(GPT, "loss", WHOLE)
    only_the_seventh = [step == 7 for step in range(1, STEPS + 1)]
    assert on_ranks(text, tmp_path / "one", ParallelLayout(), False) == [(0, only_the_seventh)]
    assert on_ranks(text, tmp_path / "two", layout, False) == [(0, only_the_seventh)] * 2
    found, expected = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert found.keys() == expected.keys()
    assert all(found[step] == pytest.approx(loss, rel=1e-10) for step, loss in expected.items())


def test_a_rank_that_decides_alone_is_found(text: Path, tmp_path: Path) -> None:
    """The two stages of a pipeline share no other state."""
    found = on_ranks(text, tmp_path / "run", ParallelLayout(pp=2), True, check_replicas_every=1)
    assert [status for status, _ in found] == [1, 1]
    assert "step 7: parameters or moments of ranks [0, 1] differ" in (tmp_path / "run" / "events.jsonl").read_text()


ROLLS = {**SPIKES, "rollback_after": 3, "max_bad_steps": 1}


@pytest.mark.parametrize("factors", [LOSS, NOT_FINITE], ids=["spikes", "not finite"])
@pytest.mark.parametrize("late", [0, 1])
def test_a_run_goes_back_and_passes_over_what_led_astray(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    factors: tuple[float, float],
    late: int,
) -> None:
    """To step 4, bit for bit as by hand: the checkpoint of step 8 holds what the bad steps were computed with. Where
    metrics are read late, as on an accelerator, another bad step has been launched. A kill after it changes nothing."""
    monkeypatch.setitem(loop_module.LATENESS, "cpu", late)
    last = 9 + late
    disturb(range(7, last + 1), factors, monkeypatch)
    by_hand = config_for(text, tmp_path / "by hand", skip_steps=[*range(5, last + 1)], **SPIKES)
    config = config_for(text, tmp_path / "run", **ROLLS)
    by_hand.optimizer = config.optimizer = replace(config.optimizer, ema_half_life_steps=3)
    assert start(by_hand) == 0
    crash = ValueError("a crash")

    def end() -> None:
        raise crash

    with monkeypatch.context() as patch, suppress(ValueError):
        at_step(last + 1, end, patch)
        start(config)
    assert checkpoints(tmp_path / "run") == [4, 8, last]
    assert start(config) == 0
    kind = "spike" if factors == LOSS else "skipped"
    back = [*((kind, step) for step in range(7, last + 1)), ("rolled_back", last)]
    assert [event for event in told(tmp_path / "run") if event[0] != "failed"] == back
    [event] = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "rolled_back"]
    over = f"steps 5 to {last}, samples 16 to {4 * last - 1}, are passed over"
    words = f"{3 + late} steps in a row until step {last} were not applied; from the state of step 4 on, {over}"
    assert (event["checkpoint"], event["message"]) == (4, words)
    assert f"step {last}, rolled back: {words}" in capsys.readouterr().out
    assert state_bytes(tmp_path / "run", STEPS) == state_bytes(tmp_path / "by hand", STEPS)
    lines = [read_metrics(tmp_path / name / "metrics.jsonl")[-1] for name in ("run", "by hand")]
    assert lines[0]["tokens"] == lines[1]["tokens"] == (STEPS - last + 4) * 64


def test_a_run_that_has_recovered_before_it_is_known_does_not_go_back(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loop_module.LATENESS, "cpu", 1)
    disturb([5, 6], LOSS, monkeypatch)
    assert start(config_for(text, tmp_path / "run", **{**ROLLS, "rollback_after": 2})) == 0
    assert told(tmp_path / "run") == [("spike", 5), ("spike", 6)]


@pytest.mark.parametrize(
    ("steps", "events", "words", "intact"),
    [
        (
            range(1, 99),
            [],
            "3 steps in a row until step 3 were not applied, and no good checkpoint was written so far",
            None,
        ),
        (range(7, 99), [("rolled_back", 9)], "no good checkpoint was written since step 9, where the run went back", 4),
        ([*range(7, 10), 11, 12, 13], [("rolled_back", 9)], "no good checkpoint was written since step 9, where", 9),
    ],
    ids=["none", "again at once", "again after a step"],
)
def test_a_run_that_cannot_go_back_or_would_again_gives_up(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    steps: Collection[int],
    events: list[Any],
    words: str,
    intact: int | None,
) -> None:
    disturb(steps, NOT_FINITE, monkeypatch)
    assert start(config_for(text, tmp_path / "run", steps=16, **ROLLS)) == 1
    assert [event for event in told(tmp_path / "run") if event[0] == "rolled_back"] == events
    message = capsys.readouterr().err
    assert words in message
    assert f"checkpoint of step {intact} is intact" in message or intact is None


def test_a_run_that_has_changed_its_optimizer_goes_back_to_no_state_of_it(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb([7, 8, 9], NOT_FINITE, monkeypatch)
    for name, train in (("by hand", {"skip_steps": [5, 6, 7, 8, 9]}), ("run", {"rollback_after": 3})):
        assert start(config_for(text, tmp_path / name, steps=4)) == 0
        config = config_for(text, tmp_path / name, **train)
        config.optimizer = replace(config.optimizer, name="muon", ownership=None, may_change=True)
        assert start(derive(config)) == 0
    assert ("rolled_back", 9) in told(tmp_path / "run")
    assert state_bytes(tmp_path / "run", STEPS) == state_bytes(tmp_path / "by hand", STEPS)


def test_samples_that_are_passed_over_are_those_of_longer_sequences(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 4 ends after 256 tokens: 16 samples of 16, or of 17 with the one that is begun."""
    disturb([7, 8, 9], NOT_FINITE, monkeypatch)
    assert start(config_for(text, tmp_path / "run", steps=4)) == 0
    assert start(config_for(text, tmp_path / "run", rollback_after=3, seq_length=17)) == 0
    [event] = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "rolled_back"]
    assert event["message"].endswith("of step 4 on, steps 5 to 9, samples 16 to 35, are passed over")


def test_a_damaged_checkpoint_is_passed_over_on_the_way_back(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb([7, 8, 9], LOSS, monkeypatch)
    config = config_for(text, tmp_path / "run", **ROLLS)
    config.checkpoint = replace(config.checkpoint, interval=2, keep=9)
    manifest = tmp_path / "run" / "checkpoints" / "step-00000004" / "manifest.json"
    with monkeypatch.context() as patch:
        at_step(8, lambda: manifest.write_text("{}"), patch)
        assert start(config) == 0
    assert ("rolled_back", 9) in told(tmp_path / "run")
    [event] = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "rolled_back"]
    assert event["checkpoint"] == 2


def _rolled_back(context: ParallelContext, config: Config) -> int | str:
    disturb([7, 8, 9])
    return outcome(context, config)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["dp2", "pp2"])
def test_all_ranks_go_back_together(text: Path, tmp_path: Path, layout: ParallelLayout) -> None:
    config = config_for(text, tmp_path / "run", **ROLLS, check_replicas_every=1)
    config.model = replace(config.model, num_layers=2)
    config.checkpoint = replace(config.checkpoint, asynchronous=True)
    config = derive(replace(config, parallel=replace(config.parallel, pp=layout.pp, timeout_s=20)), 2)
    assert run_ranks(_rolled_back, 2, config, layout=layout, needs=needs_of(config), timeout=60) == [0, 0]
    assert told(tmp_path / "run") == [("spike", 7), ("spike", 8), ("spike", 9), ("rolled_back", 9)]
    assert checkpoints(tmp_path / "run") == [8, 9, STEPS] or checkpoints(tmp_path / "run")[-2:] == [9, STEPS]
