"""Whatever a setting is given, it is taken or refused: no traceback, no hang."""

from contextlib import suppress

import pytest

from megalite.config.compose import load_config
from megalite.config.schema import OptimizerConfig
from megalite.config.settings import SETTINGS
from megalite.errors.problems import UserError
from megalite.model.parameters import gpt_parameters
from megalite.optim.rank_buffers import bytes_of_element
from megalite.plan import memory
from megalite.plan.memory import fits_this_machine
from tests.config.refusal import refusal

HOSTILE = [  # each kind of value once: a case takes a second
    *("", "null", "nan", "1e400", "-1", "0", "4611686018427387904", "9" * 5000, "-0.5"),
    *("[]", "[[1],[2]]", "[0,0,0]", "[1,1,99999999999]", "[null]", "[" * 2000, "{a: 1}", "true", "1_0"),
    *("'\0'", "'\x1b[31m'", "'\u202eé'", "'\udcff'", "x" * 5000, "'", "~root", "/", "..", "*"),
    *("${", "${seed}", "${run_dir}", "${oc.env:${seed}}", "${oc.decode:'['}"),
]


def survive(words: list[str]) -> None:
    with suppress(UserError):
        config = load_config(words, 2)
        [*fits_this_machine(config, 2, 2)]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: ascii(value)[:20])
def test_every_setting_at_once(value: str) -> None:
    survive([f"{name}={value}" for name in SETTINGS])


SIZES = ["model.vocab_size=10000000000", "model.num_layers=1000000000", "train.global_batch_size=100000000"]
RAMP = "train.batch_ramp=[1,1,1000000] train.global_batch_size=1000000"


@pytest.mark.parametrize(
    "text", [*SIZES, "train.sample_tokens=1000000000", RAMP, "seed=" + "9" * 5000, "train.steps=" + "9" * 4000]
)
def test_sizes_that_cannot_be_are_refused_in_few_words(text: str) -> None:
    said = str(refusal(*text.split()))
    assert text.partition("=")[0] in said
    assert len(said) < 2000


TOO_LARGE = ["model.vocab_size=2000000000", "model.hidden_size=1048576"]


@pytest.mark.parametrize("text", [*TOO_LARGE, "model.num_layers=10000 model.hidden_size=16384"])
def test_what_cannot_be_held_is_refused_before_torch(text: str) -> None:
    config = load_config(["device=cpu", *text.split()], 1)
    assert "GiB" in str(next(fits_this_machine(config, 1, 1)))


MIXED = "model.num_layers=3 model.moe.num_experts=64 model.moe.first_dense_layers=1 model.moe.num_shared_experts=2"


@pytest.mark.parametrize("text", ["model.num_layers=1", MIXED])
def test_what_is_held_at_least_is_what_the_leanest_optimizer_keeps(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["device=cpu", "model.vocab_size=500000", "model.hidden_size=128", "model.num_attention_heads=2"]
    config = load_config([*words, *text.split()], 1)
    least = sum(record.numel for record in gpt_parameters(config.model))
    least *= bytes_of_element("bf16", OptimizerConfig(gradient_dtype="bf16", moment_dtype="bf16")).total
    monkeypatch.setattr(memory, "memory_bytes", lambda: int(least * 0.99))
    assert [problem.setting for problem in fits_this_machine(config, 1, 1)] == ["model"]
    monkeypatch.setattr(memory, "memory_bytes", lambda: least)
    assert [*fits_this_machine(config, 1, 1)] == []


def test_experts_are_held_by_the_ranks_that_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """192 GiB of weights and gradients by the ranks of ep and etp, 480 GiB of the optimizer's state by all 8."""
    experts = "model.moe.num_experts=256 model.moe.ffn_hidden_size=8192 model.hidden_size=8192 model.num_layers=1"
    monkeypatch.setattr(memory, "memory_bytes", lambda: 100 * 2**30)
    for axes, refused in (("parallel.ep=2", True), ("parallel.ep=8", False), ("parallel.tp=2 parallel.ep=4", False)):
        words = ["device=cpu", *experts.split(), *axes.split(), "train.global_batch_size=8"]
        assert bool([*fits_this_machine(load_config(words, 8), 8, 1)]) == refused, axes


def test_what_a_gpu_holds_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config([TOO_LARGE[0]], 1)
    monkeypatch.setattr("os.path.exists", lambda path: path == "/dev/nvidiactl")
    assert [*fits_this_machine(config, 1, 1)] == []
