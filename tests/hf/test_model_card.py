"""The model card says what a model is, what it was trained on and how well it does; nothing of where that was."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.config.derive import derive, derive_vocabulary
from megalite.config.schema import Config, DataConfig, LearningRateConfig, MuonConfig, OptimizerConfig, ParallelConfig
from megalite.hf.export import model_card
from megalite.hf.saved_model import SavedModel
from megalite.train.saving import Progress, SavedState

METRICS = {"loss": 2.34567, "val_loss": float("nan"), "val_bits_per_byte": None}


def card(
    config: Config | None = None,
    data: str = "stdlib: 2,345,678 tokens",
    tokenizer: Path | None = None,
    ema: bool = False,
) -> str:
    config = derive_vocabulary(derive(config or Config()), 4096)
    state = SavedState(Progress(step=1200, tokens=9_830_400), {"description": data}, {})
    return model_card(SavedModel(Path(), config, tokenizer, None, state, ema=ema), METRICS).decode()


def test_it_states_data_tokens_and_losses() -> None:
    text = card()
    for row in (
        "| data | stdlib: 2,345,678 tokens |",
        "| tokens | 9,830,400 |",
        "| steps | 1,200 |",
        "| training, at the last step that was logged | 2.3457 |",
        "| validation | nan |",
        "| vocabulary | 4,096 |",
    ):
        assert row in text
    assert "bits per byte" not in text
    assert text.startswith("---\nlibrary_name: transformers\n")
    assert "LlamaForCausalLM with 4,262,144 parameters" in text


def test_paths_of_the_machine_and_the_layout_stay_out_of_it() -> None:
    data = DataConfig(source="text", path=["/home/someone/secret/books.txt", "/home/someone/web"])
    here = Config(data=data, run_dir="/home/someone/run")
    assert "books.txt, web" in card(here)
    assert "someone" not in card(here)
    layout = replace(here, parallel=ParallelConfig(tp=2, pp=2), run_dir="/elsewhere")
    assert card(layout) == card(here)
    begun = replace(here, checkpoint=replace(here.checkpoint, init_from="/home/someone/gpt2"))
    assert "the weights of gpt2" in card(begun)


def test_names_of_data_are_whole_and_break_no_table_and_a_tokenizer_is_used_where_there_is_one() -> None:
    text = card(Config(data=DataConfig(source="hf", path="org/name", subset="en")), data="a|b\n<script>")
    assert "| data | org/name, en, train; a&#124;b &lt;script> |" in text
    assert "AutoTokenizer" not in text
    assert "AutoTokenizer" in card(tokenizer=Path())


def test_it_says_by_which_rule_and_rates_the_weights_were_trained() -> None:
    text = card()
    assert "| optimizer | AdamW, betas [0.9, 0.95], weight decay 0.1 |\n| learning rate | 0.001, cosine" in text
    assert "Muon" not in text
    assert "of the matrices" not in text
    assert "QK-clip" not in text
    keller = MuonConfig(lr=0.02, momentum=0.9, weight_decay=0.0, router=False)
    groups = [{"match": "*.router.*", "lr": "0.1x", "weight_decay": 0}, {"match": "embedding.*", "lr": 3e-4}]
    text = card(Config(optimizer=OptimizerConfig(name="muon", qk_clip=100.0, muon=keller, groups=groups)))
    for row in (
        "| optimizer | Muon for the matrices of blocks but routers, momentum 0.9, weight decay 0; for all else AdamW, "
        "betas [0.9, 0.95], weight decay 0.1 |",
        "| learning rate | 0.001, of the matrices 0.02, cosine over 200 steps, 20 of warm-up, least 0.0001 |",
        "| parameters `*.router.*` | learning rate 0.1x, weight decay 0 |\n"
        "| parameters `embedding.*` | learning rate 0.0003 |",
        "| attention logits | kept at 100 by QK-clip |\n| precision |",
    ):
        assert row in text
    same = card(Config(optimizer=OptimizerConfig(name="muon", weight_decay=0.3)))
    assert "momentum 0.95, weight decay 0.3; for all else AdamW, betas [0.9, 0.95], weight decay 0.3 |" in same
    assert "of the matrices 0." not in same


def test_it_says_whether_the_weights_are_averages() -> None:
    config = Config(optimizer=OptimizerConfig(ema_half_life_steps=50.0))
    assert "moving average" not in card(config)
    assert (
        "| weights | an exponential moving average of those that were trained, with a half-life of 50 steps |"
        in card(config, ema=True)
    )


def test_it_says_how_rates_and_weight_decay_changed_and_that_updates_were_cautious() -> None:
    optimizer = OptimizerConfig(cautious=True, weight_decay_schedule="to_zero")
    text = card(Config(optimizer=optimizer, lr=LearningRateConfig("table", table=[[0.0, 1.0], [1.0, 0.5]])))
    assert "| cautious AdamW, betas [0.9, 0.95], weight decay 0.1, all weight decay falling to zero |" in text
    assert "| learning rate | 0.001, table [[0.0, 1.0], [1.0, 0.5]] over 200 steps |" in text
    text = card(Config(optimizer=OptimizerConfig(weight_decay_schedule="with_lr")))
    assert "| AdamW, betas [0.9, 0.95], weight decay 0.1, all weight decay following the learning rate |" in text


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ({"mup_base_width": 64, "mup_base_layers": 2}, "a base of width 64 with 2 layers"),
        ({"mup_base_width": 64}, "a base of width 64"),
        ({"mup_base_layers": 2}, "a base with 2 layers"),
    ],
)
def test_it_says_of_which_base_rates_and_weight_decay_are(base: dict[str, Any], words: str) -> None:
    config = Config()
    assert "muP" not in card(config)
    text = card(replace(config, model=replace(config.model, **base)))
    row = f"| muP | learning rates and weight decay are those of {words}; those of each weight, with its start values "
    assert row + "and eps, are scaled to this model |\n| precision" in text
