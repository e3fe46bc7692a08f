"""What a run tells of its experts: figures as done by hand, the same whatever the log interval, in every place."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.commands.train import train_rank
from megalite.config.derive import derive
from megalite.config.schema import Config, MoEConfig
from megalite.launch.process import ProcessEnvironment
from megalite.moe.balance import in_numbers
from megalite.observe.report.page import experts_of, render
from megalite.observe.run_data import RunData, read_run
from megalite.train.history import read_metrics
from tests.observe.test_terminal import STEP, Plain, ends_of_cells
from tests.train.runs import write_text

MOE = {"imbalance_max": 3.0, "imbalance_mean": 2.5, "dropped_share": 0.25, "tokens_per_expert": [[1, 0, 3], [0, 4, 0]]}


def test_figures_are_those_by_hand() -> None:
    """Two layers of 8 tokens with two choices each: counts, those of a balancing loss, dropped, balance * tokens,
    z * tokens, entropy * tokens."""
    counts, balanced = [[8.0, 4.0, 4.0, 0.0], [4.0, 4.0, 4.0, 4.0]], [5.0, 3.0, 2.0, 1.0]
    sums = [[2.0, 1.6, 0.8, 4.0, 8.0], [0.0, 0.8, 0.0, 8.0, 8.0]]
    table = [own + balanced + its for own, its in zip(counts, sums, strict=True)]
    found = in_numbers(torch.tensor(table, dtype=torch.float64))
    assert found.pop("tokens_per_expert") == [[8, 4, 4, 0], [4, 4, 4, 4]]
    shares = {"dropped_share": 2 / 32, "balancing_loss": 0.15, "z_loss": 0.05, "entropy": 0.75}
    assert found == pytest.approx({"imbalance_max": 2.0, "imbalance_mean": 1.5, **shares})
    nothing = in_numbers(torch.zeros(1, 13, dtype=torch.float64))
    assert nothing.pop("tokens_per_expert") == [[0, 0, 0, 0]]
    assert all(map(math.isnan, nothing.values()))


def trained(folder: Path, log_interval: int) -> list[dict[str, Any]]:
    """Metrics of four steps of 4 x 16 tokens, of two layers of which the second has experts."""
    text = write_text(folder / "text.txt")
    config = Config(run_dir=str(folder / f"every-{log_interval}"), tokenizer="byte", device="cpu", precision="fp64")
    config.data = replace(config.data, source="text", path=str(text), cache_dir=str(folder / "cache"), workers=1)
    moe = MoEConfig(num_experts=4, ffn_hidden_size=8, first_dense_layers=1, capacity_factor=0.75, z_loss_coeff=0.01)
    config.model = replace(config.model, num_layers=2, hidden_size=16, num_attention_heads=2, moe=moe)
    shape = {"steps": 4, "global_batch_size": 4, "micro_batch_size": 2, "seq_length": 16, "sample_tokens": 0}
    config.train = replace(config.train, **shape, eval_interval=0, log_interval=log_interval)
    config.log = replace(config.log, wandb="disabled")
    assert train_rank(derive(config), ProcessEnvironment()) == 0
    return read_metrics(folder / f"every-{log_interval}" / "metrics.jsonl")


def test_a_record_holds_the_sums_of_its_steps_and_the_report_shows_them(tmp_path: Path) -> None:
    single, pairs = trained(tmp_path, 1), trained(tmp_path, 2)
    for at, pair in enumerate(pairs):
        of = [step["moe"] for step in single[2 * at : 2 * at + 2]]
        counts = [sum(each) for each in zip(*(its["tokens_per_expert"][0] for its in of), strict=True)]
        assert sum(counts) == 2 * 64 * 2
        assert pair["moe"]["tokens_per_expert"] == [counts]
        assert pair["moe"]["imbalance_max"] == pytest.approx(max(counts) / 64)
        for name in ("dropped_share", "balancing_loss", "z_loss", "entropy"):
            assert pair["moe"][name] == pytest.approx((of[0][name] + of[1][name]) / 2)
            assert pair["moe"][name] > 0
    run = read_run(tmp_path / "every-2")
    assert "Experts" in render([run])
    counts = [sum(its) for its in zip(*(pair["moe"]["tokens_per_expert"][0] for pair in pairs), strict=True)]
    experts = experts_of(run)
    assert experts is not None
    assert experts["layers"] == [1]
    assert experts["all"] == [counts]
    assert [point[1] for point in experts["imbalance"][0]] == pytest.approx(
        [pair["moe"]["imbalance_max"] for pair in pairs], abs=1e-3
    )


def test_the_terminal_shows_the_imbalance_of_experts_also_where_the_first_step_was_skipped() -> None:
    plain = Plain()
    for steps, moe in ((1, {}), (9_999_999, {"moe": MOE})):
        plain.terminal.follow(RunData(Path("run"), {"train.steps": steps, "model.moe.num_experts": 4}), "")
        plain.terminal.add(STEP | {"mfu": 0.4} | moe)
    names, first, last = plain.lines()
    assert "imbalance" in names
    assert (first.split()[-2], last.split()[-2]) == ("-", "3.00")
    assert ends_of_cells(first)[1:] == ends_of_cells(names)[1:]
    assert max(map(len, plain.lines())) <= 100


LINES = [  # the last step was skipped
    {"step": 1, "loss": 2.0, "moe": {**MOE, "tokens_per_expert": [[9, 9, 9]]}},
    {"step": 2, "loss": 1.0, "moe": MOE},
    {"step": 3, "loss": 1.0},
]


def written(folder: Path, *lines: dict[str, Any], first: int = 0, every: int = 1) -> RunData:
    """A run with these metrics, whose layers with experts are `first`, and so on."""
    (folder / "config.yaml").write_text(f"model: {{moe: {{first_dense_layers: {first}, layer_freq: {every}}}}}")
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return read_run(folder)


def test_the_report_has_the_load_of_all_steps_and_of_the_newest_that_was_applied(tmp_path: Path) -> None:
    before = {**MOE, "tokens_per_expert": [[4, 4, 4], [2, 2, 2]]}
    found = experts_of(written(tmp_path, {"step": 1, "loss": 2.0, "moe": before}, *LINES[1:], first=1, every=2))
    assert found is not None
    assert found["layers"] == [1, 3]
    assert found["all"] == [[5, 4, 7], [2, 6, 2]]
    assert found["newest"] == MOE["tokens_per_expert"]
    assert found["imbalance"] == [[[1, 1.0], [2, 2.25]], [[1, 1.0], [2, 3.0]]]


def test_a_report_does_without_what_a_record_does_not_hold(tmp_path: Path) -> None:
    for damage in ({"tokens_per_expert": 3}, {"tokens_per_expert": [[]]}, {}):
        moe = {name: value for name, value in MOE.items() if name != "tokens_per_expert"} | damage
        run = written(tmp_path, {"step": 1, "loss": 1.0, "moe": moe})
        assert (run.damage, experts_of(run)) == ([], None)
        assert "Experts" in render([run])


def test_a_page_of_many_experts_is_small_and_a_change_of_experts_begins_their_sums_again(tmp_path: Path) -> None:
    counts = [[10] * 256 for _ in range(61)]
    run = written(tmp_path, *LINES[:2], {"step": 4, "loss": 1.0, "moe": {**MOE, "tokens_per_expert": counts}}, first=3)
    found = experts_of(run)
    assert found is not None
    assert found["all"] == counts
    assert found["layers"][-1] == 63
    assert len(render([run])) < 600_000
