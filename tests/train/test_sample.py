"""Text from the model: the same on every layout, whatever stands beside it, and training is not disturbed by it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.schema import Config
from megalite.data.batch import unscored
from megalite.data.open import open_data
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.prepare.prepare import prepare
from megalite.train import evaluate as evaluate_module
from megalite.train.evaluate import prompts_of, sample
from megalite.train.history import read_events
from tests.pipeline.stages import stages_config, started
from tests.train.runs import outcome, state_bytes
from tests.train.test_run import STEPS, config_for, losses, run_on, start

PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2]]


def texts(prompts: list[list[int]], **options: Any) -> list[list[int]]:
    config = stages_config(1, num_layers=2, position="rope")
    training = started(ParallelContext(dtype=torch.float64), config)
    settings = {"seq_length": config.train.seq_length, "seed": 2, **options}
    return sample(training, ParallelContext(dtype=torch.float64), prompts, 12, **settings)


def test_a_text_does_not_depend_on_what_is_sampled_beside_it_nor_on_the_shape_of_the_windows() -> None:
    alone = [texts([prompt])[0] for prompt in PROMPTS]
    assert len({*alone[0]}) > 3, "a text that can differ"
    assert texts(PROMPTS) == alone
    assert texts(PROMPTS, rows=2) == alone
    assert texts(PROMPTS[:2], seq_length=1000) == texts(PROMPTS[:2], seq_length=1000, rows=2)
    assert texts(PROMPTS, seed=3) != alone


def test_the_next_token_is_drawn_from_what_the_model_says_after_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_module, "TOP_K", 1)
    context, config = ParallelContext(dtype=torch.float64), stages_config(1, num_layers=2, position="rope")
    (model,) = started(context, config).chunks
    for prompt, (token, *_) in zip(PROMPTS, texts(PROMPTS, seq_length=1000, rows=3), strict=True):
        said = model.logits(unscored(torch.tensor([prompt])))
        assert token == int(said[0, -1].argmax())


def sampled(run_dir: Path) -> dict[tuple[int, str], str]:
    events = read_events(run_dir / "events.jsonl")
    return {(it["step"], it["prompt"]): it["text"] for it in events if it["kind"] == "sample"}


SAMPLING = {"sample_interval": 6, "sample_prompts": ["tree ", ""], "sample_tokens": 6}


def test_samples_are_written_on_the_way_and_at_the_end_and_change_nothing(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(config_for(text, tmp_path / "plain", sample_tokens=0)) == 0
    assert "the model writes" not in capsys.readouterr().out
    assert sampled(tmp_path / "plain") == {}
    assert start(config_for(text, tmp_path / "sampling", **SAMPLING)) == 0
    assert capsys.readouterr().out.count("the model writes") == 2 * 2  # on the way, and at the end, once
    assert {*sampled(tmp_path / "sampling")} == {(step, prompt) for step in (6, 12) for prompt in ("tree ", "")}
    assert losses(tmp_path / "sampling") == losses(tmp_path / "plain")
    assert state_bytes(tmp_path / "sampling", STEPS) == state_bytes(tmp_path / "plain", STEPS)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(ParallelLayout(tp=2, dp=2), id="tp2-dp2", marks=pytest.mark.long),
        pytest.param(ParallelLayout(tp=2, pp=2), id="tp2-pp2"),
    ],
)
def test_every_layout_writes_the_texts_of_one_process(text: Path, tmp_path: Path, layout: ParallelLayout) -> None:
    def config(name: str, **parallel: int) -> Config:
        found = config_for(text, tmp_path / name, **SAMPLING, steps=6)
        model = replace(found.model, num_layers=2, dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)
        return replace(found, precision="fp64", model=model, parallel=replace(found.parallel, **parallel))

    assert start(config("alone")) == 0
    assert run_on(layout, config("run", tp=layout.tp, pp=layout.pp), outcome) == [0] * layout.world_size
    assert sampled(tmp_path / "run") == sampled(tmp_path / "alone")
    assert len(sampled(tmp_path / "run")) == 2


def prompts(text: Path, **settings: Any) -> dict[str, list[int]]:
    config = config_for(text, text.parent / "unused", sample_prompts=settings.pop("prompts", None))
    config = replace(config, **settings)
    return prompts_of(config, open_data(config, prepare(config)))


def test_a_sample_begins_with_the_prompt_or_an_end_of_document(text: Path) -> None:
    assert prompts(text, prompts=["ab", ""]) == {"ab": [97, 98], "": [256]}
    assert prompts(text) == {"": [256]}
    assert len(prompts(text, tokenizer="char")[""]) == 1  # no end of document: the first symbol of the data


def test_prompts_that_the_tokenizer_does_not_know_are_refused_before_anything_is_written(
    text: Path, tmp_path: Path
) -> None:
    config = config_for(text, tmp_path / "run", sample_prompts=["tree", "ça", "123"])
    with pytest.raises(UserError) as refused:
        start(replace(config, tokenizer="char"))
    message = str(refused.value)
    assert "2 problems" in message
    for words in ("train.sample_prompts='ça'", "train.sample_prompts='123'", "tokenizer=byte"):
        assert words in message
    assert not (tmp_path / "run").exists()
