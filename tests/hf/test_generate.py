"""Text from a folder of transformers: numbers are transformers', and nothing is run or read from elsewhere."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Regex, pre_tokenizers

from megalite.commands.models import evaluate, generate
from megalite.config.schema import Config
from megalite.data.tokenizers import byte_tokenizer, load_tokenizer
from megalite.hf import inference
from megalite.hf.inference import Sampling, continued, read_prompt, texts_of
from megalite.hf.saved_model import open_model
from megalite.prepare.prepare import bpe_tokenizer
from tests.hf.peers import PEERS, change_config, save_peer

LIKELIEST, CONFIG = Sampling(temperature=0), Config(device="cpu")
GREEDY = ("--temperature", "0", "--max-new-tokens", "3")
TEXT = "Once upon a time there's a naïve 12345 tree, isn't there?\n" * 20


def sound(folder: Path, name: str = "llama", **config: Any) -> Path:
    """A folder with a model of 257 bytes and their tokenizer."""
    peer = transformers.AutoConfig.for_model(**PEERS[name].to_dict() | {"vocab_size": 257, **config})
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(peer).save_pretrained(folder)
    byte_tokenizer().save(folder)
    return folder


def texts(folder: Path, prompts: list[str], count: int, sampling: Sampling = LIKELIEST) -> list[str]:
    return [text for _, text in texts_of(open_model(folder), prompts, CONFIG, replace(sampling, max_new_tokens=count))]


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PEERS)
def test_every_step_has_the_logits_of_transformers_over_the_whole_text(name: str, tmp_path: Path) -> None:
    """Theirs are computed anew from all tokens, without kept keys, in fp64."""
    peer = save_peer(name, tmp_path)
    model = open_model(tmp_path).load(CONFIG)  # in fp64, as the folder
    steps: list[torch.Tensor] = []

    class Likeliest(Sampling):
        def draw(self, logits: torch.Tensor, dice: Any) -> torch.Tensor:
            steps.append(logits)
            return logits.argmax(1)

    begun = torch.tensor([[3, 17, 40, 8, 2], [50, 1, 1, 30, 9]])
    text = continued(model, begun, 7, Likeliest(), torch.Generator())
    assert text.shape == (2, 12)
    theirs = peer(input_ids=text).logits[:, 4:-1]
    ours = torch.stack(steps, dim=1)
    bound = 1e-9 if name.startswith("gpt2") else 1e-6  # transformers computes RMSNorm of fp64 models in fp32
    assert ((ours - theirs).abs().max() / theirs.abs().max()).item() < bound
    assert torch.equal(text[:, 5:], theirs.argmax(-1)), "the likeliest token of each place"


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 30.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 99])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 1.0])
def test_tokens_are_drawn_with_the_shares_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(1)).double() * 4
    shares, tokens = Sampling(temperature, top_k, top_p).shares(logits)
    ours = torch.zeros_like(logits).scatter(1, tokens, shares / shares.sum(1, keepdim=True))
    warpers: list[Any] = [transformers.TemperatureLogitsWarper(temperature)]
    warpers += [transformers.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    for warp in warpers:
        logits = warp(None, logits)
    torch.testing.assert_close(ours, torch.softmax(logits, dim=1), rtol=1e-12, atol=1e-15)


def test_a_text_ends_where_the_folder_says_that_texts_end(tmp_path: Path) -> None:
    saved = open_model(sound(tmp_path))
    assert saved.tokenizer is not None
    model = saved.load(CONFIG)
    [ids] = continued(model, torch.tensor([[*b"a tree"]]), 9, LIKELIEST, torch.Generator()).tolist()
    assert texts(tmp_path, ["a tree"], 9) == [saved.tokenizer.decode(ids)]
    named = {"eos_token_id": [ids[9], 256], "num_beams": 10**9}
    (tmp_path / "generation_config.json").write_text(json.dumps(named))
    expected = saved.tokenizer.decode(ids[: ids.index(ids[9], 6)])
    assert texts(tmp_path, ["a tree"], 9) == [expected]


def test_a_prompt_is_read_with_the_ids_of_an_evaluation(tmp_path: Path) -> None:
    """AutoTokenizer makes a GPT2Tokenizer of this folder, which has a pre-tokenizer of its own."""
    tokenizer = bpe_tokenizer([TEXT], 300)
    digits = pre_tokenizers.Split(Regex(r"\d"), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    sound(tmp_path, "gpt2", vocab_size=300)
    (tmp_path / "tokenizer.json").write_text(tokenizer.backend.to_str())
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    saved, prompt = open_model(tmp_path), "Once upon a 12345 tree"
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)(prompt).input_ids
    assert expected != tokenizer.backend.encode(prompt).ids
    assert read_prompt(saved, prompt) == expected == load_tokenizer(tmp_path).encode(prompt)
    assert read_prompt(saved, f"{prompt}<|endoftext|>")[-1] == 0, "a special token that is spelled out"
    assert load_tokenizer(tmp_path).encode("<|endoftext|>") != [0], "but not in a document"


def test_samples_do_not_depend_on_other_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Sampling(temperature=1.0, top_k=0, num_samples=20)
    monkeypatch.setattr(inference, "TOGETHER", 8)
    alone = texts(sound(tmp_path), ["a tree"], 4, drawn)
    assert len(set(alone)) == 20
    both = texts(tmp_path, ["the river", "a tree"], 4, drawn)
    assert both[20:] == alone
    assert all(text.startswith("the river") for text in both[:20])


# --- folders ---------------------------------------------------------------------------------------------------------


def refused_by_both(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What generate and evaluate say; the same."""
    (folder.parent / "text.txt").write_text("a tree")
    data = ["data=text", f"data.path={folder.parent / 'text.txt'}", f"data.cache_dir={folder.parent / 'cache'}"]
    said, _ = list[str](), capsys.readouterr()
    for command, words in ((generate, ["--prompt", "a tree"]), (evaluate, data)):
        assert command([str(folder), *words, "device=cpu"]) == 2
        said.append(capsys.readouterr().err)
        assert "Traceback" not in said[-1]
    assert said[0] == said[1]
    return said[0]


class Unpickled:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    ("changes", "files", "told"),
    [
        ({"transformers_weights": "adapter_model.bin"}, {}, "transformers_weights='adapter_model.bin'"),
        ({}, {"adapter_config.json": '{"peft_type": "LORA"}'}, "an adapter beside the weights is not applied"),
        (
            {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.C"}},
            {"theirs.py": "RUN"},
            "must be one of gpt2, llama, ",
        ),
        ({"auto_map": {"AutoModelForCausalLM": "theirs.M"}}, {"theirs.py": "RUN", "weights": ""}, "never loaded"),
        ({}, {"model.safetensors.index.json": '{"weight_map": {"a": "pytorch_model.bin"}}', "weights": ""}, "complete"),
        ({}, {"model.safetensors.index.json": '{"weight_map": "abc"}', "weights": ""}, "must be an index"),
        ({"hidden_size": "32"}, {}, "hidden_size='32': must be a whole number"),
        ({"num_hidden_layers": 1_000_000_000}, {}, "num_hidden_layers=1000000000: must be at least 1, at most 10000"),
        ({"num_hidden_layers": 10_000}, {}, "20 problems"),
    ],
)
def test_a_folder_that_is_not_sound_is_refused_nothing_is_unpickled_and_no_code_is_run(
    changes: dict[str, Any], files: dict[str, str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, ran = sound(tmp_path / "theirs"), tmp_path / "ran"
    change_config(folder, **changes)
    for name in ("pytorch_model.bin", "adapter_model.bin"):
        torch.save(Unpickled(ran), folder / name)
    for name, content in files.items():
        if name == "weights":
            (folder / "model.safetensors").unlink()
        else:
            (folder / name).write_text(content.replace("RUN", f"open({str(ran)!r}, 'w')"))
    assert told in refused_by_both(folder, capsys)
    assert not ran.exists()


def test_a_head_beside_tied_embeddings_is_not_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers does not tie them then: its logits are those of the head in the file."""
    folder = sound(tmp_path / "theirs", tie_word_embeddings=False)
    tokens, models = torch.tensor([[1, 2, 3]]), transformers.AutoModelForCausalLM
    expected = models.from_pretrained(folder)(tokens).logits
    change_config(folder, tie_word_embeddings=True)
    assert torch.equal(models.from_pretrained(folder)(tokens).logits, expected)
    assert "is another matrix than the embedding" in refused_by_both(folder, capsys)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert len(texts(folder, ["a"], 1)) == 1


# --- the command -----------------------------------------------------------------------------------------------------


def test_all_prompts_are_sampled_and_no_control_character_reaches_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = "\x1b]0;title\x07\x9b31m\u202etree\r\tA\n"
    asked = [str(sound(tmp_path / "theirs")), "--prompt", odd, "--prompt", "the\u2028river", *GREEDY]
    assert generate([*asked, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["prompt"] for each in found] == [odd, "the\u2028river"]
    assert all(each["text"].startswith(each["prompt"]) for each in found), "a program gets them all"
    assert generate(asked) == 0
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("---")] == ["--- 1 of 2 ---", "--- 2 of 2 ---"]
    assert "\n\\x1b]0;title\\x07\\x9b31m\\u202etree\\r\tA\n" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "required: --prompt"),
        (["--prompt", "a", "--prompt", ""], "--prompt='': there is nothing to continue"),
        (["--prompt", "a", "--num-samples", "0"], "--num-samples: 0 must be a whole number from 1"),
        (["--prompt", "a", "--seed", "1"], "is no setting"),
    ],
)
def test_mistakes_are_refused_before_a_model_is_looked_for(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(["gone", *words]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("megalite: refused")) == ("", 1)
    assert told in said.err
