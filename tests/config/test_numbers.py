"""Whole numbers as people write them, wherever a count is taken."""

from pathlib import Path

import pytest

from megalite.commands.plan import ranks
from megalite.config.arguments import number_from
from megalite.config.compose import load_config
from megalite.config.numbers import whole_number
from tests.config.refusal import refusal

WRITTEN = {
    "20B": 20_000_000_000,
    "1.5B": 1_500_000_000,
    "10M": 10_000_000,
    "2K": 2_000,
    "2k": 2_000,
    "1T": 10**12,
    "3G": 3_000_000_000,
    "512Ki": 524_288,
    "2Mi": 2_097_152,
    "1Gi": 1_073_741_824,
    "1Ti": 1_099_511_627_776,
    "0.5Ki": 512,
    ".5M": 500_000,
    "1.K": 1_000,
    "1e9": 10**9,
    "1.5e9": 1_500_000_000,
    "2E+3": 2_000,
    "30e-1": 3,
    "200": 200,
    "1_000": 1_000,
    "+7": 7,
    "-3K": -3_000,
    " 2K ": 2_000,
    "123456789.123456789B": 123456789123456789,
}
NO_WHOLE_NUMBERS = (
    *(
        "1.5",
        "0.1Ki",
        "1.0005K",
        "1e-3",
        "nan",
        "inf",
        "1e400",
        "",
        "K",
        "abc",
        "true",
        "2KB",
        "2Bi",
        "2m",
        "2 K",
        "1e3K",
    ),
    *("0x10", "9" * 5000, "9" * 5000 + "K", "1,000"),
)


@pytest.mark.parametrize(("text", "number"), WRITTEN.items())
def test_a_number_is_what_its_unit_says(text: str, number: int) -> None:
    assert whole_number(text) == number
    assert isinstance(whole_number(text), int)


@pytest.mark.parametrize("text", NO_WHOLE_NUMBERS)
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"nan|inf|1\.5|0\.001|literal|convert|digits"):
        whole_number(text)


def test_the_command_line_takes_them() -> None:
    config = load_config(["train.steps=2K", "train.seq_length=0.5Ki", "lr.warmup_steps=1e2", "seed=1T"], 1)
    assert (config.train.steps, config.train.seq_length, config.lr.warmup_steps) == (2_000, 512, 100)
    assert config.seed == 10**12
    ramp = load_config(["train.batch_ramp=[2,2,1.5M]", "train.global_batch_size=8"], 1).train.batch_ramp
    assert ramp == [2, 2, 1_500_000]
    assert all(type(number) is int for number in ramp)


def test_files_take_them(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.yaml").write_text("steps: 1e4\nglobal_batch_size: 64\nlog_interval: 1K\n")
    train = load_config(["--config-dir", str(tmp_path), "train=mine"], 1).train
    assert (train.steps, train.log_interval) == (10_000, 1_000)


def test_a_training_has_one_folder_however_its_numbers_are_written() -> None:
    one, other = (load_config([f"model.hidden_size={size}"], 1).run_name for size in ("512", "0.5Ki"))
    assert one == other


def test_bounds_hold_for_them() -> None:
    for word in ("train.global_batch_size=-2K", "train.seq_length=20T", "train.steps=1e30", "train.steps=1.5"):
        (problem,) = refusal(word).problems
        assert problem.setting == word.partition("=")[0]


def test_options_of_commands_take_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert number_from(1)("2K") == 2_000
    assert ranks(["--world-size", "0.016K", "--tp", "2e0", "train.global_batch_size=16"]) == 0
    assert "16" in capsys.readouterr().out
