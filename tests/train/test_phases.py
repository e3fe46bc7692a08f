"""A run in phases: what each step takes and does is planned, whatever ends the run in between."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.commands.models import evaluate
from megalite.config.compose import load_config
from megalite.config.phases import phases_of
from megalite.data.samples import IntArray, SampleSource, permute, round_keys
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.optim.schedule import step_rates
from megalite.train.history import read_events
from tests.ranks import run_ranks
from tests.train import runs
from tests.train.runs import kill, launch, metrics, state_bytes, train_on_rank, wait_for_step
from tests.train.test_run import stop_after

STEPS, SEED = 36, 1234
ENDS = 10, 24, STEPS
LENGTHS, WEIGHTS = (64, 64, 128), ({"text.txt": 1, "b.txt": 1}, {"text.txt": 3, "b.txt": 1}, {"b.txt": 1, "c.txt": 1})


@pytest.fixture(scope="module")
def sources(folder: Path) -> Path:
    for seed, name in enumerate(("b.txt", "c.txt"), 1):
        words = random.Random(seed).choices(["sand", "rain", "moss", "fire", "snow"], k=9000 + 500 * seed)
        (folder / name).write_text(" ".join(words))
    return folder


def plan(folder: Path, *entries: str) -> list[str]:
    """Overrides: three phases with another mixture each; the last one has longer samples, and a rate that falls."""
    longer = f"data.path: [{folder / 'b.txt'}, {folder / 'c.txt'}], data.weights: [1, 1], train.seq_length: 128"
    third = f"{{{longer}, train.z_loss: 1e-4, lr: {{schedule: linear, min_lr: 0}}}}"
    phases = entries or (f"{{until: {ENDS[0]}}}", f"{{until: {ENDS[1]}, data: {{weights: [3, 1]}}}}", third)
    return [
        f"data.path=[{folder / 'text.txt'},{folder / 'b.txt'}]",
        "data.weights=[1,1]",
        f"phases=[{','.join(phases)}]",
    ]


def overrides(folder: Path, run: str, *extra: str) -> list[str]:
    words = [word for word in runs.overrides(folder, run) if not word.startswith("data.path")]
    small = (
        "lr.warmup_steps=4",
        f"train.steps={STEPS}",
        "train.eval_interval=12",
        "checkpoint.keep=40",
        "train.skip_spikes=9",
    )
    return [*words, *plan(folder), *small, *extra]


def run_words(context: ParallelContext, words: list[str]) -> int:
    return train_on_rank(context, load_config(words, context.world_size))


@pytest.fixture(scope="module")
def undisturbed(sources: Path) -> Path:
    assert run_words(ParallelContext(), overrides(sources, "whole")) == 0
    return sources / "whole"


def test_killed_and_stopped_in_every_phase_it_ends_where_the_undisturbed_run_ends(
    sources: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, arguments = sources / "killed", overrides(sources, "killed")
    for step in (7, 17):
        process = launch(arguments)
        wait_for_step(process, run, step)
        kill(process)
    for step in (ENDS[1] - 1, 29):  # before the last step of a phase, and in the phase after it
        with monkeypatch.context() as patch:
            stop_after(step, patch)
            assert run_words(ParallelContext(), arguments) == 0
    assert run_words(ParallelContext(), arguments) == 0
    assert metrics(run) == metrics(undisturbed)
    assert state_bytes(run, STEPS) == state_bytes(undisturbed, STEPS)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, int]]:
    """What a run reads in training: index, source, first token, length of each sample."""
    found, original = list[tuple[str, int, int, int]](), SampleSource.read

    def noted(source: SampleSource, indices: IntArray) -> Any:
        rows, parts, starts = original(source, indices)
        if source.seed is not None:
            tokens = {len(part.file.tokens): part for part in source.parts}
            assert len(tokens) == len(source.parts), "sources are told apart by their sizes"
            for index, part, start in zip(indices.tolist(), parts.tolist(), starts.tolist(), strict=True):
                found.append((index, len(source.parts[part].file.tokens), start, source.seq_length))
        return rows, parts, starts

    monkeypatch.setattr(SampleSource, "read", noted)
    return found


def test_no_mixture_repeats_or_skips_a_sample_of_a_source(sources: Path, read: list[Any]) -> None:
    """A source that is met again goes on behind what was read of it, in its own order. Shares hold in each phase."""
    assert run_words(ParallelContext(), overrides(sources, "read", "train.eval_interval=0")) == 0
    assert [index for index, *_ in read] == list(range(8 * STEPS))
    sizes = {name: len((sources / name).read_bytes()) + 1 for name in ("text.txt", "b.txt", "c.txt")}
    for begin, end, length, weights in zip((0, *ENDS), ENDS, LENGTHS, WEIGHTS, strict=False):
        taken = read[8 * begin : 8 * end]
        assert {of for *_, of in taken} == {length}
        for name, weight in weights.items():
            share = sum(size == sizes[name] for _, size, *_ in taken)
            assert share == 8 * (end - begin) * weight / sum(weights.values())
    for name in ("text.txt", "b.txt"):
        starts = [start for _, size, start, length in read if size == sizes[name] and length == 64]
        assert len({*starts}) == len(starts), "no sample of the epoch comes twice"
    of_b = [each for each in read if each[1] == sizes["b.txt"]]
    before = sum(length == 64 for *_, length in of_b)
    windows, first = (int(sizes["b.txt"] * 0.9) - 1) // 128, -(-before * 64 // 128)
    later = permute(np.arange(first, first + len(of_b) - before), windows, round_keys(SEED, 1, 0)) * 128
    assert [start for _, _, start, length in of_b if length == 128] == later.tolist()


def test_phases_of_any_layout_are_those_of_one_process(sources: Path) -> None:
    """Stopped in each phase and continued by other ranks, in fp64."""
    words = ("precision=fp64", "model.dropout=0", "train.micro_batch_size=1")
    alone, changing = overrides(sources, "fp64", *words), overrides(sources, "changing", *words)
    assert run_words(ParallelContext(), alone) == 0
    layouts: list[dict[str, int]] = [{"dp": 2}, {"tp": 2}, {"pp": 2}]
    for layout, steps in zip(layouts, (6, 18, STEPS), strict=True):
        axes = [f"parallel.{axis}={layout.get(axis, 1)}" for axis in ("tp", "pp")]
        assert run_ranks(stopped_at, 2, [*changing, *axes], steps, layout=ParallelLayout(**layout)) == [0, 0]
    for one, other in zip(metrics(sources / "changing"), metrics(sources / "fp64"), strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


@pytest.mark.long
def test_killed_twenty_times_at_random_under_changing_layouts(sources: Path) -> None:
    """Losses are those of one undisturbed process, in fp64 to 1e-9; wherever a kill came, no sample was lost."""
    words = ("precision=fp64", "model.dropout=0", "train.micro_batch_size=1", "checkpoint.interval=2")
    alone, run, dice = overrides(sources, "one", *words), sources / "random", random.Random(5)
    assert run_words(ParallelContext(), alone) == 0
    for _ in range(20):
        layout = dice.choice([{}, {"dp": 2}, {"tp": 2}, {"pp": 2}])
        axes = [f"parallel.{axis}={layout.get(axis, 1)}" for axis in ("tp", "pp")]
        process = launch([*overrides(sources, run.name, *words), *axes], ranks=2 if layout else 1)
        newest = max([line["step"] for line in metrics(run)], default=0)
        wait_for_step(process, run, min(newest + dice.randint(0, 3), STEPS - 1))
        kill(process)
    assert run_words(ParallelContext(), overrides(sources, run.name, *words, "parallel.tp=1", "parallel.pp=1")) == 0
    for one, other in zip(metrics(run), metrics(sources / "one"), strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


def stopped_at(context: ParallelContext, words: list[str], step: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        if step < STEPS:
            stop_after(step, patch)
        return run_words(context, words)


def test_the_rate_of_a_phase_begins_where_the_one_before_it_ended(undisturbed: Path) -> None:
    rates = {line["step"]: line["lr"] for line in metrics(undisturbed) if "lr" in line}
    begun = rates[ENDS[1]]
    steps = ENDS[2] - ENDS[1]
    for at in range(steps):
        assert rates[ENDS[1] + 1 + at] == pytest.approx(begun * (1 - at / (steps - 1)), abs=1e-15)


def test_a_record_tells_when_phases_begin_and_how_far_their_sources_are(undisturbed: Path) -> None:
    events = [event for event in read_events(undisturbed / "events.jsonl") if event["kind"] == "phase"]
    assert [event["step"] for event in events] == [*ENDS[:2]]
    assert {*events[-1]["epochs"]} == {"b.txt", "c.txt"}
    assert events[-1]["epochs"]["c.txt"] == 0 < events[-1]["epochs"]["b.txt"]


CHANGES: dict[str, tuple[tuple[str, ...], str]] = {
    "what is over": (("{until: 9}", "{until: 24, data.weights: [3, 1]}", "{}"), "phase 2 has begun after step 10"),
    "what began": (("{until: 10}", "{until: 24, data.weights: [2, 1]}", "{}"), "started with data.weights=.3,1."),
    "an end that is past": (
        ("{until: 10}", "{until: 11, data.weights: [3, 1]}", "{}"),
        "would have ended before step 1[45]",
    ),
}


@pytest.fixture(scope="module")
def stopped(sources: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        stop_after(14, patch)
        assert run_words(ParallelContext(), overrides(sources, "edited")) == 0
    return sources


@pytest.mark.parametrize("entries", CHANGES.values(), ids=CHANGES)
def test_a_phase_that_has_begun_is_not_changed_silently(stopped: Path, entries: tuple[tuple[str, ...], str]) -> None:
    words = [*overrides(stopped, "edited"), plan(stopped, *entries[0])[-1]]
    with pytest.raises(UserError, match=entries[1]):
        run_words(ParallelContext(), words)


def test_phases_to_come_may_change(stopped: Path) -> None:
    entries = ("{until: 10}", "{until: 16, data.weights: [3, 1]}", "{data.weights: [1, 9]}")
    assert run_words(ParallelContext(), [*overrides(stopped, "edited"), plan(stopped, *entries)[-1]]) == 0


def test_shares_of_tokens_count_what_each_phase_consumes() -> None:
    """4,096 tokens: half in steps of 2 x 64, the rest in steps of 4 x 128, the last of which is begun for few."""
    words = ["tokenizer=byte", "train.tokens=4096", "train.global_batch_size=2", "train.seq_length=64"]
    later = "train: {global_batch_size: 4, seq_length: 128}"
    for until, ends in (("0.5", [16, 20]), ("0.52", [17, 21]), ("7", [7, 14])):
        config = load_config([*words, f"phases=[{{until: {until}}}, {{{later}}}]"], 1)
        assert [phase.end for phase in phases_of(config)] == ends
        assert {phase.config.train.steps for phase in phases_of(config)} == {ends[-1]}


def test_a_phase_sets_its_schedule_where_the_run_leaves_it_open() -> None:
    """wsd over 8 steps: 5 of warm-up from the rate before, then a fall of 3; later steps have the last rate."""
    schedule = "lr: {schedule: wsd, warmup_steps: 3, decay_steps: 2, steps: 8, min_lr: 0}, optimizer.lr: 0.01"
    words = [
        "train.steps=20",
        "lr.schedule=constant",
        f"phases=[{{until: 10}}, {{{schedule}, train.micro_batch_size: 4}}]",
    ]
    plan = phases_of(load_config(words, 1))
    rates = [step_rates(step, plan)[0] for step in range(10, 20)]
    expected = [0.00325, 0.0055, 0.00775, 0.01, 0.01, 0.01, 0.005, 0.0, 0.0, 0.0]
    assert rates == pytest.approx(expected, abs=1e-12)
    assert "train.micro_batch_size" not in plan[1].config.derived


def test_new_sources_have_new_weights_and_the_same_positions() -> None:
    later = "{data.path: [c.txt, d.txt]}"
    words = ["data=text", "data.path=[a.txt,b.txt]", "data.weights=[9,1]", "model.position=learned", "train.steps=20"]
    plan = phases_of(load_config([*words, f"phases=[{{until: 10}}, {later}]"], 1))
    assert plan[1].config.data.weights is None
    assert {phase.config.model.max_positions for phase in plan} == {256}


def test_a_longer_run_leaves_the_rate_that_a_phase_began_with(sources: Path) -> None:
    """The run's cosine would have been higher there; the folder without its last checkpoint begins the phase anew."""
    words = ("phases=[{until: 6}, {lr.schedule: constant}]", "lr.warmup_tokens=300", "lr.warmup_steps=null")
    for steps in (10, 14):
        assert run_words(ParallelContext(), overrides(sources, "longer", *words, f"train.steps={steps}")) == 0
    rates = [line["lr"] for line in metrics(sources / "longer") if "lr" in line]
    assert len({*rates[5:]}) == 1, rates


def test_groups_keep_their_rates_when_a_phase_sets_another_peak(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the optimizer was made in the first phase or in the second: to the bit."""
    groups = "optimizer.groups=[{match: '*.mlp.*', lr: 3e-4}]"
    words = (groups, "phases=[{until: 4}, {optimizer.lr: 1e-2}]", "train.steps=10", "train.eval_interval=0")
    assert run_words(ParallelContext(), overrides(sources, "groups", *words)) == 0
    with monkeypatch.context() as patch:
        stop_after(6, patch)
        assert run_words(ParallelContext(), overrides(sources, "stopped-groups", *words)) == 0
    assert run_words(ParallelContext(), overrides(sources, "stopped-groups", *words)) == 0
    assert state_bytes(sources / "stopped-groups", 10) == state_bytes(sources / "groups", 10)


def test_a_run_in_phases_is_evaluated_with_the_tokenizer_of_the_first(
    sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = f"{{data.path: {sources / 'c.txt'}}}"
    words = ("tokenizer=bpe", "data.bpe_vocab_size=300", "train.steps=6", f"phases=[{{until: 3}}, {later}]")
    assert run_words(ParallelContext(), overrides(sources, "bpe", *words)) == 0
    capsys.readouterr()
    assert evaluate([str(sources / "bpe")]) == 0
    assert f"{metrics(sources / 'bpe')[-1]['val_loss']:.4f}" in capsys.readouterr().out


def refusals() -> Iterator[tuple[str, str]]:
    yield "[{until: 20}, {until: 10}, {}]", "phase 2 ends at step 10"
    yield "[{until: 20}, {until: 20}, {}]", "phase 2 ends at step 20"
    yield "[{}, {}]", "phase 1 has until=None"
    yield "[{until: 99}, {}]", "phase 2 ends at step 36"
    yield "[{until: 1.5}, {}]", "phase 1 has until=1.5"
    yield "[{until: 10}, {until: 36}]", "it has no until"
    yield "[{until: 10}, {model: {hidden_size: 128}}]", "the same in all phases"
    yield "[{until: 10}, {data: {wieghts: [1, 2]}}]", r"data\.weights"
    yield "[{until: 10}, {train: {seq_length: long}}]", "whole number"
    yield "[{until: 10}, {train: {global_batch_size: 3}}]", "phases, 2: train.global_batch_size"
    yield "[{until: 10}, {data: {weights: [1, 2, 3]}}]", "phases, 2: data.weights"
    yield "[{until: 10}, {lr: {min_lr: -1}}]", "at least 0"
    yield "[{until: 10}, {data.validation_fraction: 0.5}]", "the same in all phases"
    yield "[{until: 10}, {train.seq_length: 128}] // model.position=learned", "longer than the table"
    yield "[{until: 10}, {}] // train.steps=null // train.epochs=1", "a run whose length is given in"


@pytest.mark.parametrize(("phases", "words"), refusals())
def test_plans_that_cannot_be_are_refused(sources: Path, phases: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_config([*overrides(sources, "refused"), *f"phases={phases}".split(" // ")], 1)
    assert not (sources / "refused").exists()


def test_a_source_that_is_not_there_is_refused_before_the_first_step(sources: Path) -> None:
    phases = f"phases=[{{until: 10}}, {{data.path: {sources / 'none.txt'}, data.weights: null}}]"
    words = [*overrides(sources, "nowhere"), phases]
    with pytest.raises(UserError, match=r"none\.txt"):
        run_words(ParallelContext(), words)
    assert not (sources / "nowhere").exists()


def branch(folder: Path, run: str, *extra: str, of: str = "constant") -> list[str]:
    return [f"run_dir={folder / run}", f"checkpoint.branch_from={folder / of}@step-20", *extra]


CONSTANT = ("phases=[]", "lr.schedule=constant")
COOLING = ("train.steps=32", "lr.schedule=linear", "lr.min_lr=0", "data.weights=[1,3]", "train.seq_length=128")


@pytest.fixture(scope="module")
def constant(sources: Path) -> Path:
    assert run_words(ParallelContext(), overrides(sources, "constant", *CONSTANT)) == 0
    return sources


def test_a_branch_is_a_run_that_had_been_planned_so_from_the_start(
    constant: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped before its first checkpoint and after it, and then continued by its folder's name alone."""
    later = "{lr: {schedule: linear, min_lr: 0}, data.weights: [1, 3], train.seq_length: 128}"
    planned = ["lr.schedule=constant", "train.steps=32", f"phases=[{{until: 20}}, {later}]"]
    assert run_words(ParallelContext(), overrides(constant, "planned", *planned)) == 0
    arguments = branch(constant, "branch", *COOLING)
    for step in (21, 27):
        with monkeypatch.context() as patch:
            stop_after(step, patch)
            assert run_words(ParallelContext(), arguments) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:  # a branch that has checkpoints of its own needs no other run
        patch.setattr(Path, "glob", lambda *_: iter(()))
        (constant / "constant").rename(constant / "moved")
        assert run_words(ParallelContext(), arguments[:1]) == 0
        (constant / "moved").rename(constant / "constant")
    assert f"off {constant / 'constant'}@step-20" in capsys.readouterr().out
    assert state_bytes(constant / "branch", 32) == state_bytes(constant / "planned", 32)
    trained = [[line for line in metrics(constant / run) if "loss" in line] for run in ("branch", "planned")]
    assert trained[0] == trained[1], "with the history of the run that it left"


def test_a_branch_needs_the_data_of_its_own_phase_alone(constant: Path) -> None:
    hidden = constant / "hidden.txt"
    (constant / "text.txt").rename(hidden)
    try:
        words = branch(constant, "other", f"data.path={constant / 'c.txt'}", "data.weights=null", "train.steps=24")
        assert run_words(ParallelContext(), words) == 0
    finally:
        hidden.rename(constant / "text.txt")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["checkpoint.branch_from=nowhere"], "no checkpoint of a run"),
        (["checkpoint.branch_from={folder}/constant@step-21"], "no checkpoint of step 21"),
        (["model.hidden_size=32"], r"model\.hidden_size=32"),
        (["phases=[{{until: 30}}, {{}}]"], "a branch has those of its run"),
        (["train.steps=20"], "where no step is left"),
    ],
)
def test_branches_that_cannot_be_are_refused(constant: Path, words: list[str], message: str) -> None:
    given = [word.format(folder=constant) for word in words]
    with pytest.raises(UserError, match=message):
        run_words(ParallelContext(), [*branch(constant, "refused"), *given])
    assert not (constant / "refused").exists()


def test_a_branch_of_a_damaged_checkpoint_is_refused(constant: Path) -> None:
    checkpoint = constant / "constant/checkpoints/step-00000015"
    state = (checkpoint / "state.json").read_text()
    (checkpoint / "state.json").write_text(state.replace("samples", "simples"))
    words = [f"run_dir={constant / 'bad'}", f"checkpoint.branch_from={constant / 'constant'}@15"]
    with pytest.raises(UserError, match=r"state\.json is damaged"):
        run_words(ParallelContext(), words)
    assert not (constant / "bad").exists()
