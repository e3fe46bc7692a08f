"""The model card says what a model is, what it was trained on and how well it does; nothing of where that was."""

from dataclasses import replace
from pathlib import Path

from megalite.config.derive import derive, derive_vocabulary
from megalite.config.schema import Config, DataConfig, ParallelConfig
from megalite.hf.export import model_card
from megalite.hf.saved_model import SavedModel
from megalite.train.saving import Progress, SavedState

METRICS = {"loss": 2.34567, "val_loss": float("nan"), "val_bits_per_byte": None}


def card(config: Config | None = None, data: str = "stdlib: 2,345,678 tokens", tokenizer: Path | None = None) -> str:
    config = derive_vocabulary(derive(config or Config()), 4096)
    state = SavedState(Progress(step=1200, tokens=9_830_400), {"description": data}, {})
    return model_card(SavedModel(Path(), config, tokenizer, None, state), METRICS).decode()


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
