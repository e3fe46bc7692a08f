"""The formula for a GPU's memory gives what GPUs measured, the microbatch that fits is taken, and halved where not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml  # type: ignore[import-untyped]

from megalite.commands.train import train_rank
from megalite.config.compose import load_config
from megalite.config.derive import derive, micro_batch_sizes
from megalite.config.rules import check
from megalite.config.schema import Config
from megalite.config.settings import with_values
from megalite.launch.context import ParallelContext
from megalite.launch.process import ProcessEnvironment
from megalite.layout.ranks import ParallelLayout
from megalite.model.gpt import GPT
from megalite.observe.run_data import read_run
from megalite.plan.gpu_memory import WORKSPACES, fit_micro_batch, largest_that_fits, rank_memory
from megalite.train.build import derive_device
from megalite.train.history import read_events
from tests.ranks import run_ranks
from tests.train.runs import metrics
from tests.train.test_run import config_for

GIB = 1 << 30
ALONE = ParallelLayout()
GPT2 = ["model=gpt2", "model.vocab_size=50257"]
LARGE = [*GPT2, "model.num_layers=24", "model.num_attention_heads=16"]
LLAMA = ["model=llama3_8b", "model.vocab_size=32000", "model.num_key_value_heads=32", "model.ffn_hidden_size=11008"]
EXPERTS = ["model=qwen3_30b_a3b", "model.vocab_size=32000", "model.num_layers=4", "model.qk_norm=false"]


def config_of(words: list[str], world_size: int = 1) -> Config:
    config = load_config([*words, "device=cuda", "precision=bf16", "tokenizer=byte"], world_size)
    return with_values(config, {"train.compile": True})


def largest(config: Config, gib: int) -> int:
    return largest_that_fits(config, micro_batch_sizes(config, 1), ALONE, 0, gib * GIB)


@pytest.mark.parametrize(
    ("words", "batch", "length", "measured"),
    [
        (GPT2, 4, 1024, 3.7),
        (GPT2, 32, 1024, 12.1),
        (GPT2, 64, 1024, 21.3),
        ([*LARGE, "model.hidden_size=1024"], 16, 1024, 18.9),
        ([*LARGE, "model.hidden_size=2048", "model.max_positions=2048"], 8, 2048, 47.2),
        ([*LLAMA, "model.num_layers=8"], 2, 4096, 40.4),
        (EXPERTS, 4, 4096, 52.2),
    ],
)
def test_the_formula_gives_what_gpus_measured(words: list[str], batch: int, length: int, measured: float) -> None:
    """GiB of docs/performance.md, the allocator's peak."""
    sizes = [f"train.{name}={batch}" for name in ("global_batch_size", "micro_batch_size")]
    found = rank_memory(config_of([*words, *sizes, f"train.seq_length={length}"]), ALONE, 0)
    assert 0.98 < (found.total - found.outside) / GIB / measured < 1.02


@pytest.mark.parametrize(("ranks", "graph"), [(1, "null"), (1, "true"), (1, "false"), (2, "null")])
def test_the_copy_of_measured_masters_has_the_room_of_activations_unless_graphs_keep_it(ranks: int, graph: str) -> None:
    """Graphs are for one process. Of 16 tokens activations take less than the copy, of 4,096 more."""

    def more(batch: int, length: int) -> tuple[int, int]:
        """Bytes that measuring adds, and those that come and go without."""
        sizes = f"train.micro_batch_size={batch}", f"train.seq_length={length}", f"train.cuda_graph={graph}"
        plain, measured = (
            rank_memory(config_of([*GPT2, *sizes, f"log.update_sizes={on}"], ranks), ParallelLayout(dp=ranks), 0)
            for on in ("false", "true")
        )
        return measured.total - plain.total, plain.total - plain.state - plain.outside - WORKSPACES

    copy, graphs = pytest.approx(4 * 124_475_904 / ranks, rel=0.01), ranks == 1 and graph != "false"
    few, many = more(1, 16), more(4, 1024)
    assert few[0] == copy if graphs else sum(few) == copy
    assert many[0] == copy if graphs else many[0] == 0


@pytest.mark.parametrize(
    ("words", "gib", "size"),
    [
        ([], 80, 64),  # 65,536 tokens
        ([], 24, 32),  # 13.1 GiB of 21.6; 64 would need 22.2
        ([], 14, 16),
        ([], 1, 1),  # none fits
        (["train.global_batch_size=96"], 80, 32),
        (["train.global_batch_size=6"], 80, 6),
        (["train.recompute=full"], 14, 64),
    ],
)
def test_the_largest_that_divides_the_batch_and_fits_is_taken(words: list[str], gib: int, size: int) -> None:
    config = config_of([*GPT2, "train.seq_length=1024", "train.global_batch_size=512", *words])
    assert largest(config, gib) == size


def test_a_pipeline_holds_more_microbatches_on_its_first_rank_and_the_logits_on_its_last() -> None:
    words = [*GPT2, "train.seq_length=1024", "parallel.pp=4", "train.global_batch_size=64", "train.micro_batch_size=4"]
    world = ParallelLayout(pp=4)
    found = [rank_memory(config_of(words, 4), world, rank) for rank in range(4)]
    assert [round(one.activations / found[3].activations) for one in found] == [4, 3, 2, 1]
    assert found[3].passing > found[0].passing


def on_gpus(context: ParallelContext, words: list[str], gib: list[int], run_dir: str = "new") -> Config:
    """The config on GPUs with so much memory, of which nothing is asked but their memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (gib[context.rank] * GIB, 80 * GIB))
        patch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        config = config_of([*words, "train.cuda_graph=false"], context.world_size)
        config = with_values(config, {"run_dir": run_dir})
        gpus = replace(context, device=torch.device("cuda", 0), dtype=torch.bfloat16)
        return derive_device(config, gpus, fit_micro_batch)


@pytest.mark.parametrize(
    ("words", "kept", "size"),
    [
        ([], None, 64),
        ([], 8, 8),  # of the run that goes on
        ([], 128, 128),  # more tokens than are chosen, but it fits
        ([], 512, 64),  # it was on a larger GPU
        ([], 7, 64),  # it does not divide this batch
        ([], "{", 64),  # no YAML
        (["train.micro_batch_size=2"], 8, 2),
    ],
)
def test_a_run_keeps_its_size_where_it_fits_and_a_user_is_obeyed(
    tmp_path: Path, words: list[str], kept: object, size: int
) -> None:
    if kept is not None:
        (tmp_path / "config.yaml").write_text(f"train: {{micro_batch_size: {kept}}}")
    batch = ["train.seq_length=1024", "train.global_batch_size=512"]
    assert on_gpus(ParallelContext(), [*GPT2, *batch, *words], [80], str(tmp_path)).train.micro_batch_size == size


@pytest.mark.parametrize("gib", [80, 52, 2])
@pytest.mark.parametrize(
    "words", [["model.moe.aux_loss=microbatch"], ["model.moe.capacity_factor=1.5"], ["train.deterministic=true"]]
)
def test_memory_does_not_choose_where_another_size_would_be_another_training(words: list[str], gib: int) -> None:
    words = [
        "model=tiny_moe",
        "model.vocab_size=300",
        "model.moe.aux_loss=sequence",
        "train.global_batch_size=32",
        *words,
    ]
    assert on_gpus(ParallelContext(), words, [gib]).train.micro_batch_size == 8
    assert on_gpus(ParallelContext(), words[:-1], [80]).train.micro_batch_size == 32


def test_a_run_that_cannot_fit_is_warned_once_of_the_rank_that_lacks_memory() -> None:
    words = [*GPT2, "train.seq_length=1024", "train.global_batch_size=64", "parallel.tp=2"]
    found = run_ranks(on_gpus, 2, words, [80, 1], layout=ParallelLayout(tp=2))
    [warning, other] = [line for one in found for line in one.told]
    assert warning == other, "rank 0 says it, and both have it in their logs"
    needed = rank_memory(with_values(found[0], {"train.micro_batch_size": 1}), ParallelLayout(tp=2), 1).total / 0.9
    assert (
        f"train.micro_batch_size=1 needs {needed / GIB:.1f} GiB by the formula, and 1.0 are free on rank 1" in warning
    )
    assert "train.recompute=full" in warning
    assert len(run_ranks(on_gpus, 2, words, [1, 1], layout=ParallelLayout(tp=2))[0].told) == 1
    for roomy in run_ranks(on_gpus, 2, words, [80, int(needed / GIB) + 1], layout=ParallelLayout(tp=2)):
        assert roomy.told == ()
    [given] = run_ranks(on_gpus, 1, [*GPT2, "train.micro_batch_size=1"], [1])
    assert given.told == (), "a user is obeyed"


def chosen_for_a_group(context: ParallelContext, batch: int, group: int) -> Config:
    pp = context.size("pp")
    words = [*GPT2, "model.num_layers=16", "train.seq_length=1024", f"train.global_batch_size={batch}"]
    asked = [f"parallel.pp={pp}", "parallel.vpp=2", f"parallel.microbatch_group_size={group}"]
    return on_gpus(context, [*words, *asked], [80] * pp)


@pytest.mark.parametrize(("pp", "batch", "group", "size"), [(8, 192, 8, 8), (4, 160, 4, 8), (4, 256, 4, 32)])
def test_a_size_that_breaks_the_schedule_of_a_given_group_is_not_taken(
    pp: int, batch: int, group: int, size: int
) -> None:
    """16 of 192 are 12 microbatches, which groups of 8 leave 4 of, for 8 ranks: all would wait for ever."""
    found = run_ranks(chosen_for_a_group, pp, batch, group, layout=ParallelLayout(pp=pp, vpp=2))
    assert {one.train.micro_batch_size for one in found} == {size}
    assert check(found[0], pp) == []


def test_ranks_agree_on_the_least_and_groups_of_a_pipeline_follow() -> None:
    words = [*GPT2, "train.seq_length=1024", "train.global_batch_size=288", "parallel.pp=2", "parallel.vpp=2"]
    found = run_ranks(on_gpus, 2, words, [80, 8], layout=ParallelLayout(pp=2, vpp=2))
    assert [one.train.micro_batch_size for one in found] == [16, 16]
    [roomy, _] = run_ranks(on_gpus, 2, words, [80, 80], layout=ParallelLayout(pp=2, vpp=2))
    assert roomy.train.micro_batch_size == 32
    assert roomy.parallel.microbatch_group_size == 3  # of 9; of the 36 that 8 sequences make it was 2
    assert check(roomy, 2) == []


def test_a_first_step_without_memory_begins_again_with_half_the_microbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("some text to learn " * 200)
    loss = GPT.loss

    def short_of_memory(self: GPT, batch, *arguments):  # type: ignore[no-untyped-def]
        found = loss(self, batch, *arguments)  # the head's gradient is there
        if len(batch.tokens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return found

    given = config_for(tmp_path / "a.txt", tmp_path / "given")
    chosen = derive(with_values(given, {"run_dir": str(tmp_path / "chosen"), "train.micro_batch_size": None}))
    chosen = replace(chosen, derived=(*given.derived, "train.micro_batch_size"))
    assert chosen.train.micro_batch_size == 4
    assert train_rank(given, ProcessEnvironment()) == 0
    monkeypatch.setattr(GPT, "loss", short_of_memory)
    assert train_rank(chosen, ProcessEnvironment()) == 0
    assert metrics(tmp_path / "chosen") == metrics(tmp_path / "given")
    words = "out of memory before the first update: the step begins again with train.micro_batch_size=2, which was 4"
    assert capfd.readouterr().out.count(f"step 0, settings changed: {words}\n") == 1
    [event] = [it for it in read_events(tmp_path / "chosen" / "events.jsonl") if it["kind"] == "settings_changed"]
    assert (event["settings"], event["message"]) == ({"train.micro_batch_size": 2}, words)
    page = (tmp_path / "chosen" / "report.html").read_text()
    assert '<tr><th scope="row">train.micro_batch_size</th><td><code>2</code></td></tr>' in page
    file = tmp_path / "chosen" / "config.yaml"
    assert yaml.safe_load(file.read_text())["train"]["micro_batch_size"] == 2
    file.write_text(file.read_text().replace("micro_batch_size: 2", "micro_batch_size: 1"))
    assert read_run(tmp_path / "chosen").config["train.micro_batch_size"] == 1, "of a later start"


@pytest.mark.parametrize(("given", "repeats"), [(True, False), (False, True), (False, False)])
def test_a_size_that_must_not_change_stays_and_there_is_one_second_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], given: bool, repeats: bool
) -> None:
    """A size that a user gave, and that of a run that must repeat."""
    (tmp_path / "a.txt").write_text("some text to learn " * 200)
    tried = []

    def short_of_memory(self: GPT, batch, *arguments):  # type: ignore[no-untyped-def]
        tried.append(len(batch.tokens))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(GPT, "loss", short_of_memory)
    config = config_for(tmp_path / "a.txt", tmp_path / "run", micro_batch_size=4, deterministic=repeats)
    if not given:
        config = replace(config, derived=(*config.derived, "train.micro_batch_size"))
    with pytest.raises(torch.OutOfMemoryError):
        train_rank(config, ProcessEnvironment())
    assert tried == ([4] if given or repeats else [4, 2])
    assert f"less memory is needed with train.micro_batch_size={tried[-1] // 2}, " in capfd.readouterr().err


def test_memory_that_is_short_after_an_update_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is not that of the step's beginning any more."""
    (tmp_path / "a.txt").write_text("some text to learn " * 200)
    loss, seen = GPT.loss, []

    def short_of_memory(self: GPT, batch, *arguments):  # type: ignore[no-untyped-def]
        seen.append(1)
        if len(seen) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss(self, batch, *arguments)

    monkeypatch.setattr(GPT, "loss", short_of_memory)
    config = config_for(tmp_path / "a.txt", tmp_path / "run", micro_batch_size=4)
    with pytest.raises(torch.OutOfMemoryError):
        train_rank(replace(config, derived=(*config.derived, "train.micro_batch_size")), ProcessEnvironment())
